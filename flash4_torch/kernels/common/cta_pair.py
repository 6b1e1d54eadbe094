"""Two CTAs of a cluster, which load for each other: how they start, fetch work together, and exit."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from . import ring
from .ring import Cursor, Ring

_WORK_IDX_BYTES = 4


class CtaPair(NamedTuple):
    rank: Int32
    """0 for the CTA that fetches work for both."""
    work_ring: Ring
    """One stage: the work index that CTA 0 hands to both load warps. Its `empty` barrier counts in CTA 0
    only."""
    work_idx: cute.Pointer


def peer_of(cluster_size: int) -> Int32 | None:
    """Rank of the peer CTA, if there is one."""
    return None if cluster_size == 1 else cute.arch.block_idx_in_cluster() ^ 1


def make_cta_pair(memory: SmemAllocator, peer: Int32 | None) -> CtaPair | None:
    if peer is None:
        return None
    full, empty = memory.allocate_array(Int64), memory.allocate_array(Int64)
    return CtaPair(peer ^ 1, Ring(full, empty, 1, peer), memory.allocate_array(Int32))


@cute.jit
def cluster_sync_init(cluster_size: cutlass.Constexpr) -> None:
    """Wait until barriers are initialised, which a fence has followed: neither CTA uses them earlier."""
    if cutlass.const_expr(cluster_size == 1):
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


@cute.jit
def cluster_sync_exit(cluster_size: cutlass.Constexpr) -> None:
    """Wait for the peer before exit: a CTA that has exited has no barrier at which the peer could arrive."""
    if cutlass.const_expr(cluster_size > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def share_work_idx(cta_pair: CtaPair, number: Uint32, at: Cursor) -> Uint32:
    """The number that lane 0 of CTA 0's load warp holds, in all lanes of both CTAs' load warps."""
    number, lane = Int32(cute.arch.shuffle_sync(number, 0)), cute.arch.lane_idx()
    if cta_pair.rank == 0:
        ring.wait_empty(cta_pair.work_ring, at)
        if lane < cta_pair.work_ring.cluster_size:
            cute.arch.store_async_dsmem(cta_pair.work_idx, number, cta_pair.work_ring.full, lane)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(cta_pair.work_ring.full, _WORK_IDX_BYTES)
    ring.wait_full(cta_pair.work_ring, at)
    work_idx = cute.arch.make_warp_uniform(cute.arch.load(cta_pair.work_idx, Int32))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(cta_pair.work_ring.empty, 0)
    return Uint32(work_idx)
