"""Tiles of 64 rows by warpgroup MMAs (wgmma), on GPUs that have them.

A warp has 16 rows of the accumulators, in the registers in which warp-level MMAs would have
them, so softmax and epilogue are those of all tiles. Q, K and V come from shared memory, P from registers.

    load      K of a block and V of the block before it are one group of copies
    mainloop  S of a block is in flight together with PV of the block before it, which its softmax overlaps

These MMAs add up in an order of their own, so bits differ from those of other tiles: launches that must be
batch invariant take them only where a token's query heads fill a tile alone. Those over FP8 caches do not,
whose bytes become float16 in registers, where no wgmma takes K and V from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...configs.decode import KEYS, WARPS
from ..common import band as bands
from ..common import scores, softmax
from ..common.band import Span
from ..common.rounding import round_to
from ..common.warp_mma import rows_of
from ..common.warps import WARP
from ..sm90 import wgmma
from .context import Context
from .load import Places, load_k, load_q, load_v, locate, look_up_first, look_up_next
from .mainloop import Splits, Thread, fragment_of, registers_of_ended, split_off, thread_of, to_weights


class _Step(NamedTuple):
    """A block's stages, and the places in the cache of what is copied next."""

    stage: Int32
    """The stage of the block itself."""
    before: Int32
    """The stage of the block before it, which takes the next K."""
    before_that: Int32
    """The stage of the block before that one, which takes the next V."""
    place: Places
    """The place of the next K."""
    place_before: Places
    """The place of the next V."""


def make_thread(ctx: Context) -> Thread:
    """Registers of the thread; see `begin_split`."""
    dtype = ctx.plan.dtype
    S = wgmma.scores_accumulator(dtype, ctx.plan.form.keys)
    return thread_of(ctx, S, wgmma.output_accumulator(dtype, ctx.plan.Dv))


@cute.jit
def operand_of_q(ctx: Context) -> cute.Tensor | None:
    """The warpgroup's rows of Q in registers, where S takes it from there."""
    Q = None
    if cutlass.const_expr(ctx.plan.form.q_in_regs):
        Q = wgmma.operand_fragment(ctx.plan.dtype, ctx.plan.D)
        wgmma.load_operand(Q, ctx.sQ, ctx.warp % WARPS * WARP + ctx.lane)
    return Q


@cute.jit
def issue_scores(ctx: Context, t: Thread, Q: cute.Tensor | None, stage: Int32) -> None:
    """Issue S of the block whose K is in a stage."""
    if cutlass.const_expr(Q is not None):
        wgmma.scores_from_regs(t.S, Q, ctx.sK[None, None, stage])
    else:
        wgmma.scores(t.S, ctx.sQ, ctx.sK[None, None, stage])


@cute.jit
def mainloop(ctx: Context, t: Thread, blocks: Span, splits: cutlass.Constexpr[Splits | None] = None) -> None:
    """Go through the split's blocks, and load `stages` - 1 blocks of K and `stages` - 2 of V ahead."""
    stages, last = ctx.plan.stages, blocks.last
    P = wgmma.p_fragment(ctx.plan.dtype, KEYS)
    pages = look_up_first(ctx, blocks.first)
    load_q(ctx)
    places = [locate(ctx, pages, blocks.first, blocks.first + i) for i in range(stages + 1)]
    for i in cutlass.range_constexpr(stages - 1):
        stage = Int32(i)
        _load(ctx, blocks.first + i, last, places[i], places[max(i - 1, 0)], stage, stage - 1, i > 0)
    at = _Step(Int32(0), Int32(stages - 1), Int32(stages - 2), places[stages - 1], places[stages - 2])
    place = places[stages]
    if blocks.first < last:
        _start_step(ctx, blocks.first, last, at)
        Q = operand_of_q(ctx)
        _block_alone(ctx, t, Q, P, blocks.first, at)
        ended = registers_of_ended(t)
        for n in cutlass.range(blocks.first + 1, last, unroll=1):
            at = _after(ctx, at, place)
            _start_step(ctx, n, last, at)
            pages = look_up_next(ctx, pages, blocks.first, n + stages)
            place = locate(ctx, pages, blocks.first, n + stages)
            partial = bands.is_partial(ctx.tile.band, ctx.plan.band, n, *ctx.tile.tokens)
            if cutlass.const_expr(splits is not None and splits.begins is not None):
                begins, follows = splits.begins(n), merges_under_scores(ctx, splits, blocks, n)
                # The branches enclose whole blocks, by votes, for wgmmas in flight (ptxas.md, P1 and P7).
                if cute.arch.vote_any_sync(begins):
                    _first_of_split(ctx, t, ended, Q, P, n, at)
                elif cute.arch.vote_any_sync(partial):
                    _block(ctx, t, Q, P, n, at, True)
                else:
                    if cutlass.const_expr(splits.merge is not None):
                        if cute.arch.vote_any_sync(follows):
                            merge_ended = functools.partial(splits.merge, ended)
                            _block(ctx, t, Q, P, n, at, False, merge_ended)
                        else:
                            _block(ctx, t, Q, P, n, at, False)
                    else:
                        _block(ctx, t, Q, P, n, at, False)
                end_splits(ctx, splits, blocks, ended, n)
            else:
                if cute.arch.vote_any_sync(partial):
                    _block(ctx, t, Q, P, n, at, True)
                else:
                    _block(ctx, t, Q, P, n, at, False)
        _await_copies(ctx)
        last_pv(ctx, t, P, at.stage)
        if cutlass.const_expr(splits is not None):
            splits.end(t, last - 1)


@cute.jit
def _block_alone(ctx: Context, t: Thread, Q: cute.Tensor | None, P: cute.Tensor, n: Int32, at: _Step) -> None:
    """S and P of block n, the first one of all, with nothing else in flight."""
    issue_scores(ctx, t, Q, at.stage)
    wgmma.wait(0)
    factors = block_softmax(ctx, t, n, True)
    softmax.rescale_output(rows_of(t.O), factors, ctx.plan.softmax)
    round_to(t.S, P)


@cute.jit
def last_pv(ctx: Context, t: Thread, P: cute.Tensor, stage: Int32) -> None:
    """PV of a split's last block, whose V is in a stage."""
    wgmma.accumulate(t.O, P, ctx.sV[None, None, stage], True)
    wgmma.wait(0)


@cute.jit
def _block(
    ctx: Context,
    t: Thread,
    Q: cute.Tensor | None,
    P: cute.Tensor,
    n: Int32,
    at: _Step,
    masked: cutlass.Constexpr,
    under_scores: cutlass.Constexpr[Callable[[], None] | None] = None,
) -> None:
    """S and P of block n, and PV of the one before it.

    under_scores: what is done to O while S is in flight.
    """
    issue_scores(ctx, t, Q, at.stage)
    if cutlass.const_expr(under_scores is not None):
        under_scores()
    wgmma.accumulate(t.O, P, ctx.sV[None, None, at.before], True)
    wgmma.wait(1)
    factors = block_softmax(ctx, t, n, masked)
    wgmma.wait_after(t.parts[0].row_sum)
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
    at: _Step,
) -> None:
    """S and P of block n, with which a split begins, and PV of the one before it, with which another ends.

    Both are in flight together, as in any other block, so that a split's end waits for no more than they do.
    """
    issue_scores(ctx, t, Q, at.stage)
    wgmma.accumulate(t.O, P, ctx.sV[None, None, at.before], True)
    wgmma.wait(1)
    split_off(t, ended)
    block_softmax(ctx, t, n, True)
    wgmma.wait_after(t.parts[0].row_sum)
    round_to(t.S, P)


@cute.jit
def merges_under_scores(ctx: Context, splits: cutlass.Constexpr[Splits], blocks: Span, n: Int32) -> Boolean:
    """Whether the split that ended before block n - 1 is merged while S of block n is in flight.

    Block n then is no special one in another way, as each kind has a copy of the code.
    """
    merges = Boolean(False)
    if cutlass.const_expr(splits.merge is not None):
        partial = bands.is_partial(ctx.tile.band, ctx.plan.band, n, *ctx.tile.tokens)
        merges = (n < blocks.last) & (n - 1 > blocks.first) & splits.begins(n - 1)
        merges = merges & ~(partial | splits.begins(n))
    return merges


@cute.jit
def end_splits(
    ctx: Context, splits: cutlass.Constexpr[Splits], blocks: Span, ended: Thread, n: Int32
) -> None:
    """What is left to do after block n, with nothing in flight, to the split that ended before it, or before
    the block before it.
    """
    begins = splits.begins(n)
    if cutlass.const_expr(splits.merge is None):
        if cute.arch.vote_any_sync(begins):
            splits.end(ended, n - 1)
    else:
        ends_now = begins & ~merges_under_scores(ctx, splits, blocks, n + 1)
        if cute.arch.vote_any_sync(ends_now):
            splits.merge(ended)
        if cutlass.const_expr(splits.close is not None):
            if cute.arch.vote_any_sync(ends_now | merges_under_scores(ctx, splits, blocks, n)):
                splits.close(n - 1 if begins else n - 2)


@cute.jit
def block_softmax(ctx: Context, t: Thread, n: Int32, masked: cutlass.Constexpr) -> cute.Tensor:
    """Turn the scores of block n into weights, and return the factors of what was summed up before."""
    scores.scale_and_cap(t.S, ctx.params, ctx.plan.features)
    fragment = fragment_of(ctx, t, n)
    if cutlass.const_expr(masked):
        bands.mask(ctx.tile.band, ctx.plan.band, fragment)
    return to_weights(ctx, t, fragment)


@cute.jit
def _start_step(ctx: Context, n: Int32, last: Int32, at: _Step) -> None:
    """Wait for K of block n and V of the one before it, and start copies."""
    _await_copies(ctx)
    n_ahead = n + ctx.plan.stages - 1
    _load(ctx, n_ahead, last, at.place, at.place_before, at.before, at.before_that, True)


@cute.jit
def _after(ctx: Context, at: _Step, place: Places) -> _Step:
    after = Int32(0) if at.stage + 1 == ctx.plan.stages else at.stage + 1
    return _Step(after, at.stage, at.before, place, at.place)


@cute.jit
def _await_copies(ctx: Context) -> None:
    """Wait until all warps have what wgmmas read next, and have read what copies overwrite next."""
    cute.arch.cp_async_wait_group(ctx.plan.stages - 2)
    # Copies by threads are writes of the generic proxy, and wgmmas read through the asynchronous one.
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()


@cute.jit
def _load(
    ctx: Context,
    n: Int32,
    last: Int32,
    place: Places,
    place_before: Places,
    k_stage: Int32,
    v_stage: Int32,
    with_v: cutlass.Constexpr,
) -> None:
    """Start to copy K of block n and V of the one before it, if they are before block `last`."""
    load_k(ctx, n, last, place, k_stage)
    if cutlass.const_expr(with_v):
        load_v(ctx, n - 1, last, place_before, v_stage)
    cute.arch.cp_async_commit_group()
