"""The loop over a tile's blocks of keys: S = Q K^T, softmax, O += P V."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from ...common import attn_mask, dropout, mods, scores, softmax, warp_mma
from ...common import band as bands
from ...common.fragment import mma_fragment
from ...common.fwd import tiles
from ...common.fwd.tiles import Tile
from ...common.rounding import round_to
from .context import Context
from .load import load_k, load_q, load_v
from .state import Thread, TileState


class Block(NamedTuple):
    """A block of keys that the tile visits."""

    n: Int32
    partial: Boolean
    """Whether the mask changes any of its scores."""


def make_thread(ctx: Context) -> Thread:
    """Registers that have seen nothing yet."""
    plan = ctx.plan
    S = warp_mma.make_accumulators(plan.dtype, plan.row_mmas, plan.keys)
    O = warp_mma.make_accumulators(plan.dtype, plan.row_mmas, plan.Dv)
    rows = tuple(softmax.make_rows(2) for _ in O)
    for own, accumulator in zip(rows, O, strict=True):
        softmax.reset(own)
        accumulator.fill(0.0)
    return Thread(S, O, rows)


@cute.jit
def mainloop(ctx: Context, t: Thread, tile: Tile) -> None:
    plan, stages = ctx.plan, ctx.plan.stages
    work = _work(ctx, tile)
    count = work.blocks.span.last - work.blocks.span.first
    blocks = tuple(_block_at(ctx, work, Int32(i)) for i in range(stages))
    load_q(ctx, tile)
    load_k(ctx, tile, blocks[0].n, Int32(0), count, Int32(0))
    cute.arch.cp_async_commit_group()
    for i in cutlass.range_constexpr(1, stages):
        load_v(ctx, tile, blocks[i - 1].n, Int32(i - 1), count, Int32(i - 1))
        cute.arch.cp_async_commit_group()
        load_k(ctx, tile, blocks[i].n, Int32(i), count, Int32(i))
        cute.arch.cp_async_commit_group()
    stage, freed = Int32(0), Int32(stages - 1)
    for i in cutlass.range(count, unroll=1):
        further = _block_at(ctx, work, i + stages)
        words = _mask_words(ctx, work, blocks[0].n)
        if cutlass.const_expr(plan.features.dropout):
            _generate_keep_bits(ctx, work, blocks[0].n)
        cute.arch.cp_async_wait_group(plan.groups_in_flight)
        # This block's K is there, and all warps have used the V before it.
        cute.arch.sync_threads()
        load_v(ctx, tile, blocks[-1].n, i + (stages - 1), count, freed)
        cute.arch.cp_async_commit_group()
        own_q = cute.local_tile(ctx.sQ, (plan.warp_rows, plan.D), (ctx.warp, 0))
        warp_mma.scores(t.S, own_q, ctx.sK[None, None, stage], ctx.lane)
        cute.arch.cp_async_wait_group(plan.groups_in_flight)
        # Its V is there, and all warps have used its K.
        cute.arch.sync_threads()
        load_k(ctx, tile, further.n, i + stages, count, stage)
        cute.arch.cp_async_commit_group()
        P = _attend(ctx, t, work, blocks[0], words)
        warp_mma.accumulate(t.O, P, ctx.sV[None, None, stage], ctx.lane)
        freed, stage = stage, Int32(0) if stage + 1 == stages else stage + 1
        blocks = (*blocks[1:], further)


@cute.jit
def _work(ctx: Context, tile: Tile) -> TileState:
    plan = ctx.plan
    first = tiles.first_query(ctx, tile)
    own_row = ctx.warp * plan.warp_rows
    rows = tuple(row_pair(ctx, m) for m in range(plan.row_mmas))
    positions = tuple(tuple(first + row // plan.pack_gqa for row in pair) for pair in rows)
    last = first + (own_row + plan.warp_rows - 1) // plan.pack_gqa
    own = first + own_row // plan.pack_gqa, cutlass.min(last, tile.Sq - 1)
    masks, own_mods, philox = (), (), None
    if cutlass.const_expr(plan.features.dropout):
        philox = dropout.load(ctx.rng_state, ctx.params.drop_byte, ctx.params.drop_fraction)
    if cutlass.const_expr(any(plan.features.mods)):
        head = tiles.query_head(ctx, tile)
        own_mods = tuple(
            mods.rows_of(
                ctx.mods, plan, tile.batch, tuple(head + row % plan.pack_gqa for row in rows[m]), positions[m]
            )
            for m in range(plan.row_mmas)
        )
    if cutlass.const_expr(plan.features.mask):
        head = tiles.query_head(ctx, tile)
        masks = tuple(
            attn_mask.rows_of(
                ctx.mask,
                tile.batch,
                tuple(head + row % plan.pack_gqa for row in rows[m]),
                positions[m],
                ctx.lane % warp_mma.LANES,
            )
            for m in range(plan.row_mmas)
        )
    band = tiles.band_of(ctx, tile)
    return TileState(tile, first, own, band, tiles.blocks_of(ctx, tile), positions, masks, own_mods, philox)


def row_pair(ctx: Context, m: int) -> tuple[Int32, Int32]:
    """The thread's rows of its m-th MMA, among those of the tile."""
    row = ctx.warp * ctx.plan.warp_rows + m * warp_mma.ROWS + ctx.lane // warp_mma.LANES
    return row, row + 8


def _block_at(ctx: Context, work: TileState, i: Int32) -> Block:
    """The i-th block from the last one down; past the end it is arbitrary."""
    return Block(*tiles.block_at(ctx, work.blocks, work.blocks.span.last - 1 - i))


def _mask_words(ctx: Context, work: TileState, n: Int32) -> tuple:
    """The words of a bool mask for block n, loaded before the scores are ready."""
    if ctx.plan.features.mask:
        return tuple(attn_mask.words_of(rows, n) for rows in work.mask)
    return ()


@cute.jit
def _attend(ctx: Context, t: Thread, work: TileState, block: Block, words: tuple) -> tuple:
    """Turn the scores of a block into weights, rescale O, and return P, the operands of PV."""
    plan = ctx.plan
    for S in t.S:
        scores.scale_and_cap(S, ctx.params, plan.features)
    if cutlass.const_expr(any(plan.features.mods)):
        _modify(ctx, t, work, block.n)
    if cutlass.const_expr(plan.band.masks or plan.features.lists_blocks):
        partial = block.partial | bands.is_partial(work.band, plan.band, block.n, *work.own)
        if partial:
            _mask(ctx, t, work, block.n, words)
    scale, method, operands = scores.softmax_scale(ctx.params, plan.features), plan.softmax, []
    for m in cutlass.range_constexpr(plan.row_mmas):
        values = warp_mma.rows_of(t.S[m])
        update = softmax.next_block(values, t.rows[m], scale, method)
        softmax.exp2_columns(values, t.rows[m], update, scale, method, 0, cute.size(values, mode=[1]))
        softmax.rescale_output(warp_mma.rows_of(t.O[m]), update.factors, method)
        rounded = cute.make_rmem_tensor(t.S[m].layout, plan.dtype)
        round_to(t.S[m], rounded)
        if cutlass.const_expr(plan.features.dropout):
            keep_bits = dropout.take(ctx.sKeepBits[None, None, m, ctx.warp], ctx.lane)
            dropout.QueryRows.drop(rounded, keep_bits)
        operands.append(warp_mma.operand_of(t.S[m], rounded, plan.keys))
    return tuple(operands)


@cute.jit
def _modify(ctx: Context, t: Thread, work: TileState, n: Int32) -> None:
    """Apply score_mod, and mask_mod where no block mask says which blocks it masks."""
    plan = ctx.plan
    for m in cutlass.range_constexpr(plan.row_mmas):
        fragment = mma_fragment(t.S[m], work.positions[m], n * plan.keys, ctx.lane)
        mods.modify(ctx.mods, plan, work.mods[m], fragment)
        if cutlass.const_expr(not plan.features.mods.blocks):
            mods.mask(ctx.mods, plan, work.mods[m], n * plan.keys, fragment)


@cute.jit
def _mask(ctx: Context, t: Thread, work: TileState, n: Int32, words: tuple) -> None:
    plan = ctx.plan
    for m in cutlass.range_constexpr(plan.row_mmas):
        fragment = mma_fragment(t.S[m], work.positions[m], n * plan.keys, ctx.lane)
        if cutlass.const_expr(plan.features.mods.blocks):
            mods.mask(ctx.mods, plan, work.mods[m], n * plan.keys, fragment)
        if cutlass.const_expr(plan.features.mask):
            attn_mask.apply(ctx.mask, work.mask[m], words[m], n, fragment)
        if cutlass.const_expr(plan.band.masks):
            bands.mask(work.band, plan.band, fragment)


@cute.jit
def _generate_keep_bits(ctx: Context, work: TileState, n: Int32) -> None:
    """Generate the keep bits of the warp's weights of block n, strip by strip: eight lanes have one."""
    plan, tile = ctx.plan, work.tile
    strips = dropout.strips(plan.keys)
    head = tile.batch * ctx.lse.shape[0 if plan.features.varlen else 1] + tiles.query_head(ctx, tile)
    cute.arch.sync_warp()  # the bits of the block before have been taken
    for base in cutlass.range_constexpr(0, plan.row_mmas * strips, dropout.WARP_STRIPS):
        slot = base + ctx.lane // dropout.STRIP_LANES
        m, strip = slot // strips, Uint32(slot % strips)
        if slot < plan.row_mmas * strips:
            row = work.first + ctx.warp * plan.warp_rows + m * warp_mma.ROWS
            rows = dropout.QueryRows.at(work.philox, row, head, ctx.lane)
            rows.generate(n * plan.keys, strip, ctx.sKeepBits[None, None, m, ctx.warp])
    cute.arch.sync_warp()
