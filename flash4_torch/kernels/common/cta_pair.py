"""Two CTAs of a cluster, which load for each other: how they start, draw tiles together, and end."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from . import ring
from .ring import Cursor, Ring

_TICKET_BYTES = 4


class Pair(NamedTuple):
    rank: Int32
    """0 for the CTA that draws for both."""
    handed: Ring
    """One stage: the ticket that CTA 0 hands to both loading warps. Its `empty` counts in CTA 0 only."""
    ticket: cute.Pointer


def peer_of(ctas: int) -> Int32 | None:
    """Rank of the other CTA, if there is one."""
    return None if ctas == 1 else cute.arch.block_idx_in_cluster() ^ 1


def make_pair(memory: SmemAllocator, peer: Int32 | None) -> Pair | None:
    if peer is None:
        return None
    full, empty = memory.allocate_array(Int64), memory.allocate_array(Int64)
    return Pair(peer ^ 1, Ring(full, empty, 1, peer), memory.allocate_array(Int32))


@cute.jit
def start_together(ctas: cutlass.Constexpr) -> None:
    """Barriers are initialised and a fence has followed: nobody uses them before, in either CTA."""
    if cutlass.const_expr(ctas == 1):
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


@cute.jit
def finish_together(ctas: cutlass.Constexpr) -> None:
    """A CTA that has left has no barrier at which the other one could arrive."""
    if cutlass.const_expr(ctas > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def hand_over(pair: Pair, number: Uint32, at: Cursor) -> Uint32:
    """The number in lane 0 of CTA 0's loading warp, in all lanes of both."""
    number, lane = Int32(cute.arch.shuffle_sync(number, 0)), cute.arch.lane_idx()
    if pair.rank == 0:
        ring.wait_empty(pair.handed, at)
        if lane < pair.handed.ctas:
            cute.arch.store_async_dsmem(pair.ticket, number, pair.handed.full, lane)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(pair.handed.full, _TICKET_BYTES)
    ring.wait_full(pair.handed, at)
    ticket = cute.arch.make_warp_uniform(cute.arch.load(pair.ticket, Int32))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(pair.handed.empty, 0)
    return Uint32(ticket)
