"""Tiles of 128 rows by warpgroup MMAs and warp roles, on GPUs that have them.

    load warps (warpgroup 2)  ==load_k==> mainloop (warpgroups 0 and 1, 64 rows each) -> epilogue
                              ==load_v==>

Both warpgroups read the same K and V, so that the tile reads them once from the L2 cache where two tiles of
64 rows would read them twice, and neither waits for the other. As in wide.py, S of a block is in flight
together with PV of the block before it. With groups of splits each CTA has some alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...configs.decode import WARPS
from ..common import band as bands
from ..common import ring, softmax
from ..common.band import Span
from ..common.ring import Cursor, Ring
from ..common.role import role
from ..common.rounding import round_to
from ..common.warp_mma import rows_of
from ..common.warps import GROUP
from ..sm90 import wgmma
from . import groups
from .context import Context, NamedBarrier
from .epilogue import epilogue
from .load import load_k, load_q, load_v, locate, look_up_first, look_up_next
from .mainloop import Splits, Thread, begin_split, registers_of_ended, split_off
from .merge import merge
from .wide import (
    block_softmax,
    end_splits,
    issue_scores,
    last_pv,
    make_thread,
    merges_under_scores,
    operand_of_q,
)


@cute.jit
def run(ctx: Context) -> None:
    """The whole of a CTA's work, each warp in its role."""
    plan, tile = ctx.plan, ctx.tile
    load_registers, compute_registers = plan.registers
    if ctx.warp == 0:
        for edge in (ctx.load_k, ctx.load_v):
            ring.initialise(edge, readers=plan.compute_warps, writers=WARPS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if ctx.warp >= plan.compute_warps:
        cute.arch.setmaxregister_decrease(load_registers)
        if tile.has_work:
            blocks = tile.blocks
            if cutlass.const_expr(plan.form.groups):
                blocks = groups.blocks_of_all(ctx)
            _load(replace(ctx, warp=ctx.warp - plan.compute_warps), blocks)
    else:
        cute.arch.setmaxregister_increase(compute_registers)
        t = make_thread(ctx)
        if tile.has_work:
            if cutlass.const_expr(plan.form.groups):
                groups.run(ctx, t, _mainloop)
            else:
                begin_split(t)
                _mainloop(ctx, t, tile.blocks)
                epilogue(ctx, t)
        if cutlass.const_expr(plan.shares_keys):
            if tile.merges:
                merge(ctx, t.rows)
        if cutlass.const_expr(plan.merges_together and plan.form.parts):
            if tile.merges:
                groups.merge_together(ctx, t.rows)


@role(produces=("load_k", "load_v"))
@cute.jit
def _load(ctx: Context, blocks: Span) -> None:
    """Copy the split's blocks. K and V of a block are there once `in_flight` more blocks are on their way."""
    plan, last, in_flight = ctx.plan, blocks.last, ctx.plan.in_flight
    pages = look_up_first(ctx, blocks.first)
    places = locate(ctx, pages, blocks.first, blocks.first)
    next_places = locate(ctx, pages, blocks.first, blocks.first + 1)
    at, landed = ring.start(), ring.start()
    for n in cutlass.range(blocks.first, last, unroll=1):
        pages = look_up_next(ctx, pages, blocks.first, n + 2)
        places_after = locate(ctx, pages, blocks.first, n + 2)
        is_due = n - blocks.first >= in_flight
        ring.wait_empty(ctx.load_k, at)
        load_k(ctx, n, last, places, at.stage)
        if cutlass.const_expr(plan.lands_apart):
            _commit(ctx.load_k, landed, is_due, 2 * in_flight)
        ring.wait_empty(ctx.load_v, at)
        load_v(ctx, n, last, places, at.stage)
        if cutlass.const_expr(plan.lands_apart):
            _commit(ctx.load_v, landed, is_due, 2 * in_flight)
            if is_due:
                landed = ring.after(landed, plan.stages)
        else:
            cute.arch.cp_async_commit_group()
            if is_due:
                cute.arch.cp_async_wait_group(in_flight)
                _fill(ctx, landed)
                landed = ring.after(landed, plan.stages)
        at = ring.after(at, plan.stages)
        places, next_places = next_places, places_after
    cute.arch.cp_async_wait_group(0)
    for _ in cutlass.range(cutlass.min(last - blocks.first, in_flight), unroll=1):
        _fill(ctx, landed)
        landed = ring.after(landed, plan.stages)


@cute.jit
def _commit(edge: Ring, landed: Cursor, is_due: Boolean, in_flight: cutlass.Constexpr) -> None:
    """End a group of copies, and if one is due signal that it has arrived: all but the last `in_flight`."""
    cute.arch.cp_async_commit_group()
    if is_due:
        cute.arch.cp_async_wait_group(in_flight)
        cute.arch.fence_view_async_shared()
        ring.fill(edge, landed)


@cute.jit
def _fill(ctx: Context, at: Cursor) -> None:
    """Signal that this warp's share of a block has arrived."""
    # Copies by threads are writes of the generic proxy, and wgmmas read through the asynchronous one.
    cute.arch.fence_view_async_shared()
    ring.fill(ctx.load_k, at)
    ring.fill(ctx.load_v, at)


@role(consumes=("load_k", "load_v"))
@cute.jit
def _mainloop(ctx: Context, t: Thread, blocks: Span, splits: cutlass.Constexpr[Splits | None] = None) -> None:
    """Go through the split's blocks as the load warps bring them."""
    warpgroup = ctx.warp // WARPS
    ctx = replace(ctx, sQ=ctx.sQ[None, None, warpgroup])
    load_q(ctx, warpgroup)
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=NamedBarrier.Q + warpgroup, number_of_threads=GROUP)
    P = wgmma.p_fragment(ctx.plan.dtype, ctx.plan.form.keys)
    Q = operand_of_q(ctx)
    at = ring.start()
    if blocks.first < blocks.last:
        ring.wait_full(ctx.load_k, at)
        issue_scores(ctx, t, Q, at.stage)
        wgmma.wait(0)
        ring.release(ctx.load_k, at)
        factors = block_softmax(ctx, t, blocks.first, True)
        softmax.rescale_output(rows_of(t.O), factors, ctx.plan.softmax)
        round_to(t.S, P)
        ended = registers_of_ended(t)
        for n in cutlass.range(blocks.first + 1, blocks.last, unroll=1):
            before, at = at, ring.after(at, ctx.plan.stages)
            ring.wait_full(ctx.load_v, before)
            ring.wait_full(ctx.load_k, at)
            partial = bands.is_partial(ctx.tile.band, ctx.plan.band, n, *ctx.tile.tokens)
            # The branches enclose whole blocks, by votes, for wgmmas in flight (ptxas.md, P1 and P7).
            if cutlass.const_expr(splits is not None and splits.begins is not None):
                begins, follows = splits.begins(n), merges_under_scores(ctx, splits, blocks, n)
                if cute.arch.vote_any_sync(begins):
                    _first_of_split(ctx, t, ended, Q, P, n, at, before)
                elif cute.arch.vote_any_sync(partial):
                    _block(ctx, t, Q, P, n, at, before, True)
                else:
                    if cutlass.const_expr(splits.merge is not None):
                        if cute.arch.vote_any_sync(follows):
                            merge_ended = functools.partial(splits.merge, ended)
                            _block(ctx, t, Q, P, n, at, before, False, merge_ended)
                        else:
                            _block(ctx, t, Q, P, n, at, before, False)
                    else:
                        _block(ctx, t, Q, P, n, at, before, False)
                end_splits(ctx, splits, blocks, ended, n)
            else:
                if cute.arch.vote_any_sync(partial):
                    _block(ctx, t, Q, P, n, at, before, True)
                else:
                    _block(ctx, t, Q, P, n, at, before, False)
        ring.wait_full(ctx.load_v, at)
        last_pv(ctx, t, P, at.stage)
        if cutlass.const_expr(splits is not None):
            splits.end(t, blocks.last - 1)


@cute.jit
def _block(
    ctx: Context,
    t: Thread,
    Q: cute.Tensor | None,
    P: cute.Tensor,
    n: Int32,
    at: Cursor,
    before: Cursor,
    masked: cutlass.Constexpr,
    under_scores: cutlass.Constexpr[Callable[[], None] | None] = None,
) -> None:
    """S and P of block n, and PV of the one before it; both stages are free then.

    under_scores: what is done to O while S is in flight.
    """
    issue_scores(ctx, t, Q, at.stage)
    if cutlass.const_expr(under_scores is not None):
        under_scores()
    wgmma.accumulate(t.O, P, ctx.sV[None, None, before.stage], True)
    wgmma.wait(1)
    ring.release(ctx.load_k, at)
    factors = block_softmax(ctx, t, n, masked)
    wgmma.wait_after(t.parts[0].row_sum)
    ring.release(ctx.load_v, before)
    softmax.rescale_output(rows_of(t.O), factors, ctx.plan.softmax)
    round_to(t.S, P)


@cute.jit
def _first_of_split(
    ctx: Context,
    t: Thread,
    ended: Thread,
    Q: cute.Tensor | None,
    P: cute.Tensor,
    n: Int32,
    at: Cursor,
    before: Cursor,
) -> None:
    """S and P of block n, with which a split begins, and PV of the one before it, with which another ends."""
    issue_scores(ctx, t, Q, at.stage)
    wgmma.accumulate(t.O, P, ctx.sV[None, None, before.stage], True)
    wgmma.wait(1)
    ring.release(ctx.load_k, at)
    split_off(t, ended)
    block_softmax(ctx, t, n, True)
    wgmma.wait_after(t.parts[0].row_sum)
    ring.release(ctx.load_v, before)
    round_to(t.S, P)
