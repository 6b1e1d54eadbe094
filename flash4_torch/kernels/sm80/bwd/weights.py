"""P and dS, which a thread computes from scores and dP, with masks, softcap and dropout."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ...common import attn_mask, dropout, mods, scores, warp_mma
from ...common import band as bands
from ...common.bwd import tiles
from ...common.bwd.dmask import add_dmask
from ...common.bwd.probs import columns_of, find_dtanh, four_of, mask_rows_beyond_end, pair_of
from ...common.fragment import MMA_MATES, Fragment, mma_fragment
from ...common.rounding import round_to, widened
from ...common.warps import WARP
from .context import Context
from .mask_tile import add_tile
from .state import Block, BlockState, TileState

LSE_LOG2, DELTA, LSE, LSE_LOW = range(4)
"""Statistics of a row, in the order in which the preprocess kernel writes them."""


class Probs(NamedTuple):
    """What a block's dS needs besides S itself, in the order of the accumulator."""

    P: cute.Tensor
    """Rounded, but not yet where `Plan.drops_both`."""
    dtanh: cute.Tensor | None
    """Softcap's derivative, in 16 bits."""
    scores: cute.Tensor | None = None
    """float32, before score_mod, if its derivative reads them."""


@cute.jit
def mask_words(ctx: Context, work: TileState, own: BlockState) -> tuple:
    """The words of a bool mask: those of the thread's keys, for its queries."""
    if cutlass.const_expr(ctx.plan.features.mask != "bool"):
        return ()
    rows = attn_mask.rows_of(
        ctx.mask, work.tile.batch, (own.head, own.head), work.positions, ctx.lane % warp_mma.LANES
    )
    words = attn_mask.words_of(rows, own.n)
    if cutlass.const_expr(ctx.plan.shares_weights):
        # A word's bits begin with the block's first query; two stand for eight queries.
        for of_row in words:
            for i in cutlass.range_constexpr(cute.size(of_row)):
                of_row[i] = of_row[i] >> Uint32(first_query(ctx, own) // 4)
    return words


def _words_of_part(ctx: Context, own: BlockState, words: tuple) -> tuple:
    """The words, begun with the first query of a part."""
    plan = ctx.plan
    if plan.query_parts == 1:
        return words
    moved = tuple(cute.make_rmem_tensor(of_row.layout, Uint32) for of_row in words)
    for of_row, target in zip(words, moved, strict=True):
        for i in range(cute.size(of_row)):
            target[i] = of_row[i] >> Uint32(own.part * (plan.part_queries // 4))
    return moved


def first_key(ctx: Context) -> Int32:
    """The first of the warp's keys in the tile."""
    return ctx.key_warp * ctx.plan.warp_keys


def first_query(ctx: Context, own: BlockState) -> Int32:
    """The first of the queries in a block whose scores the warp has."""
    return ctx.column_warp * ctx.plan.own_queries + own.part * ctx.plan.part_queries


@cute.jit
def recompute_p(
    ctx: Context,
    work: TileState,
    block: Block,
    own: BlockState,
    S: cute.Tensor,
    m: cutlass.Constexpr,
    mask: tuple,
    stage: Int32,
) -> Probs:
    """Turn scores, of the warp's m-th MMA, into P: rounded in the result, and unrounded in their place."""
    plan, features = ctx.plan, ctx.plan.features
    P, dtanh = cute.make_rmem_tensor(S.layout, plan.dtype), None
    before, own_mods = None, None
    scores.scale_and_cap(S, ctx.params, features)
    if cutlass.const_expr(features.softcap):
        dtanh = cute.make_rmem_tensor(S.layout, plan.dtype)
        find_dtanh(S, dtanh, ctx.params, features)
    if cutlass.const_expr(any(features.mods)):
        own_mods = mods.rows_of(ctx.mods, plan, work.tile.batch, (own.head, own.head), work.positions)
        before = _modify(ctx, work, own, S, own_mods)
    if cutlass.const_expr(features.float_mask):
        # Not in the branch below: outside of it the sums are one FFMA each with scaling. The tile of a block
        # that the mask leaves alone is 0.
        add_tile(ctx, S, first_query(ctx, own), first_key(ctx) + m * warp_mma.ROWS, stage)
    if cutlass.const_expr(plan.masks):
        partial = block.partial | (own.n < work.full.first) | (own.n >= work.full.last)
        if partial:
            _mask(ctx, work, own, fragment_of(ctx, work, own, S), mask, own_mods)
    scale, ramp = scores.softmax_scale(ctx.params, features), ()
    if cutlass.const_expr(features.mods.ramp):
        ramp = mods.step_and_bases(own_mods, fragment_of(ctx, work, own, S).key)
    lse = _of_own_queries(ctx, own, LSE if features.large_scores else LSE_LOG2, stage)
    low = _of_own_queries(ctx, own, LSE_LOW, stage) if features.large_scores else None
    for j in cutlass.range_constexpr(cute.size(S) // 4):
        of_column, low_of_column = pair_of(lse, j), None if low is None else pair_of(low, j)
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(features.large_scores):
                x = (S[4 * j + i] - of_column[i % 2]) * scale - low_of_column[i % 2]
            elif cutlass.const_expr(features.mods.ramp):
                step, bases = ramp
                less = of_column[i % 2] - step * Float32(8 * j + i % 2)
                x = (S[4 * j + i] * scale + bases[i // 2]) - less
            else:
                x = S[4 * j + i] * scale - of_column[i % 2]
            S[4 * j + i] = cute.math.exp2(x, fastmath=True)
        if cutlass.const_expr(not plan.drops_both):
            round_to(four_of(S, j), four_of(P, j))
    return Probs(P, dtanh, before)


@cute.jit
def _modify(
    ctx: Context, work: TileState, own: BlockState, S: cute.Tensor, own_mods: mods.Rows
) -> cute.Tensor | None:
    """Apply score_mod, and mask_mod where no block mask says which blocks it masks; returns the scores before
    them, if the derivative reads them."""
    plan, before = ctx.plan, None
    if cutlass.const_expr(plan.keeps_scores):
        before = cute.make_rmem_tensor(S.layout, Float32)
        for i in cutlass.range_constexpr(cute.size(S)):
            before[i] = S[i]
    fragment = fragment_of(ctx, work, own, S)
    # Rows beyond the end have an infinite lse, which does not hide what score_mod makes of them.
    mods.modify(ctx.mods, plan, own_mods, fragment, work.tile.Sq)
    if cutlass.const_expr(not plan.features.mods.blocks):
        mods.mask(ctx.mods, plan, own_mods, own.n * plan.queries, fragment)
    return before


def fragment_of(ctx: Context, work: TileState, own: BlockState, S: cute.Tensor) -> Fragment:
    """The warp's scores of a block, whose rows are keys."""
    return mma_fragment(S, work.positions, own.n * ctx.plan.queries + first_query(ctx, own), ctx.lane)


@cute.jit
def _mask(
    ctx: Context,
    work: TileState,
    own: BlockState,
    fragment: Fragment,
    mask: tuple,
    own_mods: mods.Rows | None,
) -> None:
    plan = ctx.plan
    if cutlass.const_expr(plan.features.mods.blocks):
        mods.mask(ctx.mods, plan, own_mods, own.n * plan.queries, fragment)
    if cutlass.const_expr(plan.features.mask == "bool"):
        attn_mask.mask_out(_words_of_part(ctx, own, mask), fragment)
    if cutlass.const_expr(plan.band.masks):
        bands.mask(work.band, plan.band, fragment)
    if cutlass.const_expr(plan.config.ragged_k):
        mask_rows_beyond_end(fragment, work.tile.Sk)


def _of_own_queries(ctx: Context, own: BlockState, which: int, stage: Int32) -> cute.Tensor:
    """A statistic of the queries whose scores the warp has: see `columns_of`."""
    plan = ctx.plan
    numbers = ctx.sStats[None, which, stage]
    part = ctx.column_warp * plan.query_parts + own.part
    return columns_of(cute.local_tile(numbers, (plan.part_queries,), (part,)), ctx.lane)


def _keep_bits_of(ctx: Context, own: BlockState) -> cute.Tensor:
    """The warp's keep bits, (32, words): those of a part lie where its dS will be."""
    plan = ctx.plan
    if not plan.generates_by_parts:
        return ctx.sKeepBits[None, None, ctx.warp]
    # A swizzle moves no vector out of its eight rows.
    chunk, row = first_query(ctx, own) * plan.keys, first_key(ctx) * plan.part_queries
    first = cute.recast_ptr(ctx.sdS.iterator, cute.make_swizzle(0, 4, 3), dtype=Uint32)
    place = cute.assume((chunk + row) // 2, divby=WARP)
    return cute.make_tensor(first + place, cute.make_layout((WARP, plan.keep_words)))


@cute.jit
def take_keep_bits(ctx: Context, own: BlockState) -> cute.Tensor | None:
    """The thread's keep bits of a part, the strips of all MMAs side by side."""
    if cutlass.const_expr(not ctx.plan.features.dropout):
        return None
    taken = dropout.take(_keep_bits_of(ctx, own), ctx.lane)
    if cutlass.const_expr(ctx.plan.has_eight):
        # Those of the second eight queries lie beside those of the first.
        for i in cutlass.range_constexpr(cute.size(taken)):
            taken[i] = taken[i] >> Uint32(ctx.column_warp % 2)
    if cutlass.const_expr(ctx.plan.generates_by_parts):
        cute.arch.sync_warp()  # dS comes in their place
    return taken


def _strip_of(ctx: Context, m: int) -> int:
    """The place of the m-th MMA's first strip among those of a part."""
    return m * ctx.plan.part_strips


@cute.jit
def begin_dp(ctx: Context, own: BlockState, dP: tuple[cute.Tensor, ...], stage: Int32) -> None:
    """Begin sums of dP at -delta / 2, if they do so.

    Tensor cores truncate sums: by as much as a sum is long, and towards 0. The dP of a row that sees one key
    is its delta, so that from -delta / 2 on its sum is half as long, and what is cut off cancels.
    """
    if cutlass.const_expr(ctx.plan.begins_at_delta):
        delta = _of_own_queries(ctx, own, DELTA, stage)
        for accumulator in dP:
            for j in cutlass.range_constexpr(cute.size(accumulator) // 4):
                of_column = pair_of(delta, j)
                for i in cutlass.range_constexpr(4):
                    accumulator[4 * j + i] = of_column[i % 2] * -0.5


@cute.jit
def dropped(
    ctx: Context,
    probs: Probs,
    S: cute.Tensor,
    dP: cute.Tensor,
    keep_bits: cute.Tensor | None,
    m: cutlass.Constexpr,
) -> cute.Tensor:
    """P of the m-th MMA after dropout; and dP, in its place, if both are dropped together."""
    if cutlass.const_expr(not ctx.plan.features.dropout):
        return probs.P
    if cutlass.const_expr(ctx.plan.drops_both):
        kept = cute.make_rmem_tensor(S.layout, Float32)
        for i in cutlass.range_constexpr(cute.size(S)):
            kept[i] = S[i]
        dropout.KeyRows.select_both(kept, dP, keep_bits, _strip_of(ctx, m))
        round_to(kept, probs.P)
        return probs.P
    dropped = cute.make_rmem_tensor(probs.P.layout, ctx.plan.dtype)
    for i in cutlass.range_constexpr(cute.size(dropped)):
        dropped[i] = probs.P[i]
    dropout.KeyRows.drop(dropped, keep_bits, _strip_of(ctx, m))
    return dropped


@cute.jit
def differentiate(
    ctx: Context,
    work: TileState,
    own: BlockState,
    probs: Probs,
    S: cute.Tensor,
    dP: cute.Tensor,
    keep_bits: cute.Tensor | None,
    stage: Int32,
    m: cutlass.Constexpr,
) -> cute.Tensor:
    """dS = P (dP - delta), the gradient with respect to scaled scores."""
    plan, features = ctx.plan, ctx.plan.features
    dS = cute.make_rmem_tensor(dP.layout, plan.dtype)
    if cutlass.const_expr(features.dropout and not plan.drops_both):
        dropout.KeyRows.select(dP, keep_bits, _strip_of(ctx, m))
    delta = _of_own_queries(ctx, own, DELTA, stage)
    for j in cutlass.range_constexpr(cute.size(dP) // 4):
        of_column, weights = pair_of(delta, j), four_of(S, j)
        if cutlass.const_expr(plan.config.round_weights):
            weights = widened(four_of(probs.P, j))
        for i in cutlass.range_constexpr(4):
            gradient, less = dP[4 * j + i], of_column[i % 2]
            if cutlass.const_expr(features.dropout):
                gradient = gradient * ctx.params.keep_scale
            if cutlass.const_expr(plan.begins_at_delta):
                less = less * 0.5
            dP[4 * j + i] = weights[i] * (gradient - less)
    if cutlass.const_expr(features.dmask):
        add_dmask(ctx, own, own.n, fragment_of(ctx, work, own, dP))
    if cutlass.const_expr(plan.differentiates_mod):
        _differentiate_mod(ctx, work, own, probs, dP)
    for j in cutlass.range_constexpr(cute.size(dP) // 4):
        if cutlass.const_expr(probs.dtanh is not None):
            dtanh = widened(four_of(probs.dtanh, j))
            for i in cutlass.range_constexpr(4):
                dP[4 * j + i] = dP[4 * j + i] * dtanh[i]
        round_to(four_of(dP, j), four_of(dS, j))
    return dS


@cute.jit
def _differentiate_mod(
    ctx: Context, work: TileState, own: BlockState, probs: Probs, gradients: cute.Tensor
) -> None:
    """Turn gradients of modified scores into those of scores before score_mod."""
    before = None
    if cutlass.const_expr(probs.scores is not None):
        before = fragment_of(ctx, work, own, probs.scores).values
    of_rows = mods.derivative_rows(ctx.mods, ctx.plan, work.tile.batch, own.head, work.positions)
    fragment = fragment_of(ctx, work, own, gradients)
    mods.differentiate(ctx.mods, ctx.plan, of_rows, before, fragment, MMA_MATES)


@cute.jit
def generate_keep_bits(ctx: Context, work: TileState, own: BlockState) -> None:
    """Generate the keep bits of the warp's weights of a part, strip by strip: see `dropout.passes`."""
    plan, tile = ctx.plan, work.tile
    strips = plan.part_strips
    count = plan.key_mmas * strips
    head = tile.batch * ctx.maps.mQ.shape[2] + own.head
    first = tile.index * plan.keys + first_key(ctx)
    query = own.n * plan.queries + first_query(ctx, own) // dropout.BLOCK * dropout.BLOCK
    keep_bits = _keep_bits_of(ctx, own)
    if cutlass.const_expr(not plan.generates_by_parts):
        cute.arch.sync_warp()  # the bits of the block before have been taken
    philox = work.philox.with_keys_anew() if plan.key_mmas > 1 else work.philox
    for base, lanes in dropout.passes(count):
        slot = base + ctx.lane // lanes
        m, strip = slot // strips, Uint32(slot % strips)
        rows = dropout.KeyRows.at(philox, first + m * warp_mma.ROWS, head, ctx.lane)
        if cutlass.const_expr(lanes == dropout.SHARED_LANES):
            rows.generate_shared(query, strip, keep_bits, Uint32(slot), ctx.lane, slot < count)
        elif slot < count:
            rows.generate(query, strip, keep_bits, Uint32(slot))
    cute.arch.sync_warp()


def head_of(ctx: Context, work: TileState, block: Block) -> Int32:
    """The block's query head."""
    return work.tile.kv_head * tiles.group(ctx) + block.h
