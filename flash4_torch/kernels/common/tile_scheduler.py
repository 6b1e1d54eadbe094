"""Persistent CTAs, and the work indices by which they, or CTA pairs, fetch tiles.

A CTA stays for the whole launch. `ctx` is the context of a kernel's roles; `SchedulerContext` is what is read
of it here.
"""

from __future__ import annotations

from typing import Any, Protocol

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...configs.types import Features
from . import ring
from .cta_pair import CtaPair, share_work_idx
from .launch_params import LaunchParams
from .ring import Cursor


class SchedulerPlan(Protocol):
    """What the scheduler reads of a plan."""

    features: Features

    @property
    def cluster_size(self) -> int: ...

    @property
    def threads(self) -> int: ...


class SchedulerContext(Protocol):
    """What the scheduler reads of a context."""

    plan: SchedulerPlan
    params: LaunchParams
    tile_counter: cute.Tensor
    cta_pair: CtaPair | None


def launch(
    kernel: Any,
    plan: SchedulerPlan,
    num_work: Int32,
    num_sms: Int32,
    stream: cuda.CUstream,
    at_once: int = 1,
    use_pdl: bool = False,
) -> None:
    """Launch as many CTAs, or clusters of them, as the GPU has room for, `at_once` on an SM, or as there are
    work items. use_pdl: as in `dependent_launch`.
    """
    block = (plan.threads, 1, 1)
    shared = {"min_blocks_per_mp": at_once, "stream": stream, "use_pdl": use_pdl}
    if at_once > 1:
        # All of what an SM has; without a number the compiler asks a GPU, which need not be there.
        shared["preferred_smem_carveout"] = 100
    if plan.cluster_size == 1:
        kernel.launch(grid=(cutlass.min(num_work, num_sms * at_once), 1, 1), block=block, **shared)
    else:
        clusters = cutlass.max(cutlass.min(num_work, num_sms // plan.cluster_size), 1)
        grid, cluster = (clusters * plan.cluster_size, 1, 1), (plan.cluster_size, 1, 1)
        kernel.launch(grid=grid, block=block, cluster=cluster, **shared)


@cute.jit
def initial_work(ctx: SchedulerContext) -> Uint32:
    """The first work index of this CTA or cluster, which is not fetched from the counter."""
    own, _, _ = cute.arch.block_idx()
    return Uint32(own // ctx.plan.cluster_size)


@cute.jit
def prefetch_work(ctx: SchedulerContext, num_work: Uint32) -> Uint32:
    """Ask for the next work index: a number in lane 0 that takes a microsecond to arrive, so use it late.

    The counter is back at 0 after the launch: it runs from 0 to `num_work` - 1, and `num_work` numbers are
    fetched, of which the last one of every CTA, or cluster, is too high.
    """
    number = Uint32(0)
    draws = cute.arch.lane_idx() == 0
    if cutlass.const_expr(ctx.plan.cluster_size > 1):
        draws = draws & (ctx.cta_pair.rank == 0)
    if draws:
        number = cute.arch.inline_ptx(
            "atom.global.inc.u32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Uint32],
            read_only_args=[ctx.tile_counter.iterator.toint(), num_work - 1],
        )
    return number


@cute.jit
def await_work(ctx: SchedulerContext, number: Uint32, num_work: Uint32, work_idx: Uint32, at: Cursor):
    """The work index after `work_idx`, in all lanes of both CTAs of a cluster, and the next cursor.

    All CTAs fetch their second item at the start. If no CTA can have a third (and the call is not varlen),
    second items are dealt in reverse order, not as fetched: the CTA with the longest first item gets the
    shortest second one. Varlen calls have empty tiles, whose CTAs fetch again at once.
    """
    workers = _num_workers(ctx)
    if cutlass.const_expr(ctx.plan.cluster_size == 1):
        number = cute.arch.shuffle_sync(number, 0)
    else:
        number, at = share_work_idx(ctx.cta_pair, number, at), ring.after(at, 1)
    if cutlass.const_expr(not ctx.plan.features.varlen):
        # After the second one that is a huge number, so that there is no third.
        opposite = cutlass.min(workers - 1 - work_idx, num_work)
        number = opposite if num_work <= 2 * workers else number
    return number + workers, at


def _num_workers(ctx: SchedulerContext) -> Uint32:
    """The number of CTAs, or of clusters, of the launch."""
    grid, _, _ = cute.arch.grid_dim()
    return Uint32(grid // ctx.plan.cluster_size)


@cute.jit
def decode_work(ctx: SchedulerContext, tiles_per_head: Uint32, num_work: Uint32, work_idx: Uint32):
    """The tile that a work index stands for, among a head's `tiles_per_head`, and its head.

    Sections of heads follow one another; within one, the first tile of every head comes before the second.
    """
    heads_per_section = Uint32(ctx.params.heads_per_section)
    size = heads_per_section * tiles_per_head
    number = work_idx // size
    rest = work_idx - number * size
    in_section = cutlass.min(heads_per_section, num_work // tiles_per_head - number * heads_per_section)
    step = rest // in_section
    return step, number * heads_per_section + rest - step * in_section
