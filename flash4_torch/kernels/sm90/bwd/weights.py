"""P and dS, which a thread computes from scores and dP, with masks, softcap and dropout."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common import attn_mask, dropout, mods, ring, scores
from ...common import band as bands
from ...common.bwd.dmask import add_dmask
from ...common.bwd.probs import columns_of, find_dtanh, four_of, mask_rows_beyond_end, pair_of
from ...common.fragment import MMA_MATES, mma_fragment
from ...common.ring import Cursor
from ...common.rounding import round_to, widened
from ...common.warps import WARP, WARPS
from .. import wgmma
from ..warps import LANES
from . import block_entries
from .context import Context
from .state import Cursors, Thread, TileState


class MaskRows(NamedTuple):
    """The rows of a floating attn_mask for a thread's keys, or the words of a bool one for a block."""

    rows: attn_mask.Rows | None
    words: tuple


class Probs(NamedTuple):
    """What a block's dS needs besides S itself, in the register order of the scores."""

    P: cute.Tensor
    dtanh: cute.Tensor | None
    """Softcap's derivative, in 16 bits."""
    keep_bits: cute.Tensor | None
    scores: cute.Tensor | None = None
    """float32, before score_mod, if its derivative reads them: in registers, or with `role_split` the lane's
    own ones in shared memory."""


@cute.jit
def mask_rows(ctx: Context, t: Thread, work: TileState, n: Int32) -> MaskRows:
    """The mask's rows and words, found anew for every block.

    Kept, they would hold registers that wgmmas in flight need (ptxas.md, P17).
    """
    if cutlass.const_expr(ctx.plan.features.mask == "bool"):
        return MaskRows(None, _words(ctx, t, work, n))
    heads = (work.head, work.head)
    rows = attn_mask.rows_of(ctx.mask, work.tile.batch, heads, work.positions, t.lane % LANES)
    return MaskRows(rows, ())


@cute.jit
def fetch_words(ctx: Context, t: Thread, work: TileState, at: Cursors) -> Cursors:
    """Begin to load a bool mask's words of the block whose Q has arrived: a block ahead, under the MMAs.

    The block may be another head's first one. Then these are not its words, and are loaded anew. A block of
    which the mask hides nothing may still be masked by the band.
    """
    if cutlass.const_expr(not ctx.plan.fetches_words):
        return at
    n, partial = block_entries.read(ctx, at.q)
    words = attn_mask.all_ones(ctx.plan.mask, 2)
    # A branch on a vote: predicates would leave the addresses to be computed for full blocks, too.
    if cute.arch.vote_any_sync(partial):
        words = _words(ctx, t, work, n)
    return at._replace(words=words)


def _words(ctx: Context, t: Thread, work: TileState, n: Int32) -> attn_mask.Words:
    pair = t.lane % LANES
    return attn_mask.words_at(ctx.mask, work.tile.batch, work.head, work.positions, n, pair)


@cute.jit
def recompute_p(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    q_at: Cursor,
    mask: MaskRows | None,
    masked: cutlass.Constexpr,
) -> Probs:
    """Turn scores into P: rounded in the result, and unrounded in their place."""
    plan = ctx.plan
    features = plan.features if masked else plan.features.without_float_mask
    P, dtanh, keep_bits = wgmma.p_fragment(plan.dtype, plan.queries), None, None
    before = None
    scores.scale_and_cap(t.S, ctx.params, features)
    if cutlass.const_expr(features.softcap and not plan.shares_scores):
        dtanh = wgmma.p_fragment(plan.dtype, plan.queries)
        find_dtanh(t.S, dtanh, ctx.params, features)
    ramp = ()
    if cutlass.const_expr(any(features.mods)):
        own = mods.rows_of(ctx.mods, plan, work.tile.batch, (work.head, work.head), work.positions)
        before = _modify(ctx, t, work, n, own, masked)
        if cutlass.const_expr(features.mods.ramp):
            first = mma_fragment(t.S, work.positions, n * plan.queries, t.lane).key
            ramp = mods.step_and_bases(own, first)
    if cutlass.const_expr(masked):
        fragment = mma_fragment(t.S, work.positions, n * plan.queries, t.lane)
        if cutlass.const_expr(features.mask):
            one_by_one = plan.adds_rows_one_by_one
            attn_mask.apply(ctx.mask, mask.rows, mask.words, n, fragment, one_by_one)
        if cutlass.const_expr(plan.band.masks):
            bands.mask(work.band, plan.band, fragment)
        if cutlass.const_expr(plan.config.ragged_k):
            mask_rows_beyond_end(fragment, work.tile.Sk)
    scale = scores.softmax_scale(ctx.params, features)
    lse, low = columns_of(ctx.sLseLog2[None, q_at.stage], t.lane), None
    if cutlass.const_expr(features.large_scores):
        lse, low = (columns_of(stats[None, q_at.stage], t.lane) for stats in (ctx.sLse, ctx.sLseLow))
    for j in cutlass.range_constexpr(cute.size(t.S) // 4):
        of_column, low_of_column = pair_of(lse, j), None if low is None else pair_of(low, j)
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(features.large_scores):
                x = (t.S[4 * j + i] - of_column[i % 2]) * scale - low_of_column[i % 2]
            elif cutlass.const_expr(features.mods.ramp):
                step, bases = ramp
                less = of_column[i % 2] - step * Float32(8 * j + i % 2)
                x = (t.S[4 * j + i] * scale + bases[i // 2]) - less
            else:
                x = t.S[4 * j + i] * scale - of_column[i % 2]
            t.S[4 * j + i] = cute.math.exp2(x, fastmath=True)
        round_to(four_of(t.S, j), four_of(P, j))
    if cutlass.const_expr(features.dropout):
        keep_bits = take_keep_bits(ctx, t, q_at)
    return Probs(P, dtanh, keep_bits, before)


@cute.jit
def _modify(
    ctx: Context, t: Thread, work: TileState, n: Int32, own: mods.Rows, masked: cutlass.Constexpr
) -> cute.Tensor | None:
    """Apply score_mod, and mask_mod where it may mask something of block n; returns the scores before, if the
    derivative reads them.

    own: what rows need, found anew for every block, like a mask's rows.
    """
    plan, before = ctx.plan, None
    if cutlass.const_expr(plan.shares_scores):
        before = shared_scores(ctx, t)
        cute.autovec_copy(in_fours(t.S), before)
    elif cutlass.const_expr(plan.keeps_scores):
        before = cute.make_rmem_tensor(t.S.layout, Float32)
        for i in cutlass.range_constexpr(cute.size(t.S)):
            before[i] = t.S[i]
    fragment = mma_fragment(t.S, work.positions, n * plan.queries, t.lane)
    # Rows beyond the end have an infinite lse, which does not hide what score_mod makes of them.
    mods.modify(ctx.mods, plan, own, fragment, work.tile.Sq)
    if cutlass.const_expr(masked or not plan.features.mods.blocks):
        mods.mask(ctx.mods, plan, own, n * plan.queries, fragment)
    return before


@cute.jit
def take_keep_bits(ctx: Context, t: Thread, q_at: Cursor) -> cute.Tensor:
    """The keep bits of the thread's weights. Their ring advances with that of Q."""
    ring.wait_full(ctx.keep_bits, q_at)
    own_warp = t.warpgroup * WARPS + t.index // WARP
    keep_bits = dropout.take(ctx.sKeepBits[None, None, own_warp, q_at.stage], t.lane)
    ring.release(ctx.keep_bits, q_at)
    return keep_bits


@cute.jit
def dropped(ctx: Context, probs: Probs) -> cute.Tensor:
    """P after dropout."""
    if cutlass.const_expr(not ctx.plan.features.dropout):
        return probs.P
    dropped = wgmma.p_fragment(ctx.plan.dtype, ctx.plan.queries)
    for i in cutlass.range_constexpr(cute.size(dropped)):
        dropped[i] = probs.P[i]
    dropout.KeyRows.drop(dropped, probs.keep_bits)
    return dropped


@cute.jit
def differentiate(
    ctx: Context, t: Thread, work: TileState, n: Int32, do_at: Cursor, probs: Probs, dP: cute.Tensor
) -> cute.Tensor:
    """dS = P (dP - delta), the gradient with respect to scaled scores."""
    features = ctx.plan.features
    dS = wgmma.p_fragment(ctx.plan.dtype, ctx.plan.queries)
    if cutlass.const_expr(features.dropout):
        dropout.KeyRows.drop(dP, probs.keep_bits)
    delta = columns_of(ctx.sDelta[None, do_at.stage], t.lane)
    for j in cutlass.range_constexpr(cute.size(dP) // 4):
        of_column, weights = pair_of(delta, j), four_of(t.S, j)
        if cutlass.const_expr(ctx.plan.config.round_weights or ctx.plan.config.role_split):
            weights = widened(four_of(probs.P, j))
        for i in cutlass.range_constexpr(4):
            gradient = dP[4 * j + i]
            if cutlass.const_expr(features.dropout):
                gradient = gradient * ctx.params.keep_scale
            dP[4 * j + i] = weights[i] * (gradient - of_column[i % 2])
    if cutlass.const_expr(features.dmask):
        add_dmask(ctx, work, n, mma_fragment(dP, work.positions, n * ctx.plan.queries, t.lane))
    if cutlass.const_expr(ctx.plan.differentiates_mod):
        _differentiate_mod(ctx, t, work, n, probs, dP)
    of_softcap = probs.dtanh
    if cutlass.const_expr(features.softcap and ctx.plan.shares_scores):
        of_softcap = wgmma.p_fragment(ctx.plan.dtype, ctx.plan.queries)
        find_dtanh(_scores_before(ctx, t, probs), of_softcap, ctx.params, features)
    for j in cutlass.range_constexpr(cute.size(dP) // 4):
        if cutlass.const_expr(of_softcap is not None):
            dtanh = widened(four_of(of_softcap, j))
            for i in cutlass.range_constexpr(4):
                dP[4 * j + i] = dP[4 * j + i] * dtanh[i]
        round_to(four_of(dP, j), four_of(dS, j))
    return dS


@cute.jit
def _differentiate_mod(
    ctx: Context, t: Thread, work: TileState, n: Int32, probs: Probs, gradients: cute.Tensor
) -> None:
    """Turn gradients of modified scores into those of scores before score_mod."""
    plan, before, first = ctx.plan, None, n * ctx.plan.queries
    if cutlass.const_expr(probs.scores is not None):
        before = mma_fragment(_scores_before(ctx, t, probs), work.positions, first, t.lane).values
    own = mods.derivative_rows(ctx.mods, plan, work.tile.batch, work.head, work.positions)
    fragment = mma_fragment(gradients, work.positions, first, t.lane)
    mods.differentiate(ctx.mods, plan, own, before, fragment, MMA_MATES)


def shared_scores(ctx: Context, t: Thread) -> cute.Tensor:
    """The lane's own scores before score_mod in shared memory: (4, scores / 4), in register order."""
    own = ctx.sScores[None, None, t.index]
    place = cute.make_ptr(Float32, own.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(place, own.layout)


def in_fours(registers: cute.Tensor) -> cute.Tensor:
    """The same registers, by fours."""
    return cute.make_tensor(registers.iterator, cute.make_layout((4, cute.size(registers) // 4)))


@cute.jit
def _scores_before(ctx: Context, t: Thread, probs: Probs) -> cute.Tensor:
    """Scores before score_mod, in registers.

    From shared memory they are loaded where they are needed: between, P takes the registers.
    """
    if cutlass.const_expr(not ctx.plan.shares_scores):
        return probs.scores
    loaded = cute.make_rmem_tensor(t.S.layout, Float32)
    cute.autovec_copy(probs.scores, in_fours(loaded))
    return loaded
