"""The loop over a tile's blocks of queries: five GEMMs for each."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import dropout, warp_mma, warp_tf32
from ...common.bwd import tiles
from ...common.bwd.tiles import Tile
from . import empty
from .context import Context
from .dq_sums import add_dq
from .load import load_kv, load_rows
from .state import Block, BlockState, Copy, Thread, TileState, make_sums
from .weights import (
    begin_dp,
    differentiate,
    dropped,
    first_key,
    first_query,
    generate_keep_bits,
    head_of,
    mask_words,
    recompute_p,
    take_keep_bits,
)


def make_thread(ctx: Context) -> Thread:
    """Sums of nothing yet."""
    plan, each = ctx.plan, ctx.plan.column_warps
    return Thread(*(make_sums(plan, n // each, plan.key_mmas) for n in (plan.D, plan.Dv)))


@cute.jit
def mainloop(ctx: Context, t: Thread, tile: Tile) -> None:
    plan, ahead = ctx.plan, ctx.plan.ahead
    work, count = _work(ctx, tile), tiles.count_blocks(ctx, tile)
    blocks = (_begin(ctx, work, Int32(0)),)
    for _ in cutlass.range_constexpr(ahead):
        blocks = (*blocks, _next_block(ctx, work, blocks[-1]))
    load_kv(ctx, tile)
    for i in cutlass.range_constexpr(ahead):
        load_rows(ctx, tile, Copy(blocks[i], Int32(i), count, Int32(i)))
    if cutlass.const_expr(plan.generates_ahead):
        generate_keep_bits(ctx, work, _own(ctx, work, blocks[0]))
    if cutlass.const_expr(plan.overlaps_blocks):
        empty.init(ctx)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
    stage, freed = Int32(0), Int32(plan.stages - 1)
    for i in cutlass.range(count, unroll=1):
        block = blocks[0]
        own = _own(ctx, work, block)
        mask = [mask_words(ctx, work.of_mma(m), own) for m in range(plan.key_mmas)]
        if cutlass.const_expr(plan.generates_under_wait):
            generate_keep_bits(ctx, work, own)
        if cutlass.const_expr(not plan.overlaps_blocks):
            cute.arch.cp_async_wait_group(plan.groups_in_flight)
            # The block is there, and all warps have used dS, Q and dO of the one before.
            cute.arch.sync_threads()
        copy = Copy(blocks[-1], i + ahead, count, freed if plan.stages > 1 else stage)
        if cutlass.const_expr(plan.stages > 1 and not plan.config.copies_after_scores):
            load_rows(ctx, tile, copy)
        _to_dk(ctx, t, work, blocks, own, mask, stage, copy)
        if cutlass.const_expr(plan.stages == 1):
            if cutlass.const_expr(plan.shares_weights):
                cute.arch.sync_threads()
            load_rows(ctx, tile, copy)
        add_dq(ctx, work, own)
        freed, stage = stage, Int32(0) if stage + 1 == plan.stages else stage + 1
        blocks = (*blocks[1:], _next_block(ctx, work, blocks[-1]))


def _own(ctx: Context, work: TileState, block: Block) -> BlockState:
    """A block of the tile."""
    return BlockState(work.tile, head_of(ctx, work, block), block.n)


@cute.jit
def _to_dk(
    ctx: Context,
    t: Thread,
    work: TileState,
    blocks: tuple,
    own: BlockState,
    mask: list,
    stage: Int32,
    copy: Copy,
) -> None:
    """The first block's share of dV and dK. At the end dS is in SMEM; Q and dO have been used, if no warps
    share.
    """
    plan = ctx.plan
    for part in cutlass.range(plan.query_parts, unroll=1):
        _part_to_dk(ctx, t, work, blocks[0], own._replace(part=part), mask, stage, copy)
    if cutlass.const_expr(plan.overlaps_blocks):
        # The next block is there, too.
        cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    if cutlass.const_expr(plan.shares_weights):
        _accumulate_shared(ctx, t.dV, ctx.sP, ctx.sdO[None, None, stage])
    if cutlass.const_expr(plan.generates_ahead):
        # Those of the last block are of no use.
        generate_keep_bits(ctx, work, _own(ctx, work, blocks[1]))
    if cutlass.const_expr(plan.shares_weights):
        _accumulate_shared(ctx, t.dK, ctx.sdS, ctx.sQ[None, None, stage])


def _part_to_dk(
    ctx: Context,
    t: Thread,
    work: TileState,
    block: Block,
    own: BlockState,
    mask: list,
    stage: Int32,
    copy: Copy,
) -> None:
    """A part's dS, and P where warps share keys, to SMEM; its share of dV and dK where they do not."""
    plan = ctx.plan
    sQ, sdO = ctx.sQ[None, None, stage], ctx.sdO[None, None, stage]
    S, dP = (make_sums(plan, plan.part_queries, plan.key_mmas, filled=False) for _ in range(2))
    mmas = range(plan.key_mmas)
    _scores(ctx, own, S, ctx.sK, sQ, plan.D)
    if plan.overlaps_blocks:
        empty.wait(ctx, copy.i - plan.ahead)
    if plan.config.copies_after_scores:
        load_rows(ctx, work.tile, copy)
    probs = [recompute_p(ctx, work.of_mma(m), block, own, S[m], m, mask[m], stage) for m in mmas]
    if plan.features.dropout and plan.generates_by_parts:
        generate_keep_bits(ctx, work, own)
    keep_bits = take_keep_bits(ctx, own)
    begin_dp(ctx, own, dP, stage)
    _scores(ctx, own, dP, ctx.sV, sdO, plan.Dv, begun=plan.begins_at_delta)
    P = [dropped(ctx, probs[m], S[m], dP[m], keep_bits, m) for m in mmas]
    if plan.shares_weights:
        _store(ctx, own, P, ctx.sP)
    if plan.own_in_regs:
        _accumulate(ctx, own, t.dV, P, sdO)
    dS = [differentiate(ctx, work.of_mma(m), own, probs[m], S[m], dP[m], keep_bits, stage, m) for m in mmas]
    _store(ctx, own, dS, ctx.sdS)
    if plan.own_in_regs:
        _accumulate(ctx, own, t.dK, dS, sQ)


def _scores(
    ctx: Context,
    own: BlockState,
    S: tuple,
    of_keys: cute.Tensor,
    of_queries: cute.Tensor,
    D: int,
    begun: bool = False,
) -> None:
    """Products of the warp's keys with a part of the queries for which it computes scores; `begun`: added to
    what S has.
    """
    plan, key, query = ctx.plan, first_key(ctx), ctx.column_warp * ctx.plan.own_queries
    if plan.is_float32:
        keys, queries = warp_tf32.Rows(of_keys, key), warp_tf32.Rows(of_queries, query)
        warp_tf32.scores(S, keys, queries, ctx.lane, plan.tf32_method, begun)
    else:
        keys = warp_mma.left(of_keys, key, ctx.lane)
        queries = warp_mma.right(of_queries, query, ctx.lane, eight=plan.has_eight)
        queries = queries.below(own.part * plan.part_queries)
        is_looped = plan.config.scores_by_parts and of_keys is ctx.sK
        (warp_mma.scores_by_halves if is_looped else warp_mma.scores)(S, keys, queries, D)


def _store(ctx: Context, own: BlockState, weights: list[cute.Tensor], target: cute.Tensor) -> None:
    """Store the warp's part of P or dS."""
    plan = ctx.plan
    for m, numbers in enumerate(weights):
        if plan.is_float32:
            row, key = ctx.column_warp * plan.own_queries, first_key(ctx) + m * warp_mma.ROWS
            warp_tf32.store_columns(numbers, target, row, key, ctx.lane)
        elif plan.stores_by_address:
            column, part = first_query(ctx, own), plan.chunk_queries
            to = warp_mma.target(target, first_key(ctx), ctx.lane, column=column, part=part)
            to.write(numbers, m * warp_mma.ROWS)
        else:
            tiler, column = (warp_mma.ROWS, plan.part_queries), ctx.column_warp * plan.query_parts + own.part
            place = ctx.key_warp * plan.key_mmas + m, column
            warp_mma.store_to_smem(numbers, cute.local_tile(target, tiler, place), ctx.lane)


def _accumulate(
    ctx: Context,
    own: BlockState,
    sums: tuple,
    weights: list[cute.Tensor],
    rows: cute.Tensor,
) -> None:
    """Add the products of a part of the warp's weights, from registers, with rows of queries."""
    plan = ctx.plan
    if plan.is_float32:
        left = tuple(warp_tf32.InRegisters(numbers) for numbers in weights)
        right = warp_tf32.Columns(rows, Int32(0))
        warp_tf32.accumulate(sums, (), left, right, ctx.lane, plan.tf32_method)
    else:
        query = ctx.column_warp * plan.own_queries
        right = warp_mma.right(rows, query, ctx.lane, share=ctx.column_share, transposed=True)
        right = right.below(own.part * plan.part_queries)
        warp_mma.accumulate(sums, warp_mma.from_registers(weights), right, plan.part_queries)


def _accumulate_shared(ctx: Context, sums: tuple, weights: cute.Tensor, rows: cute.Tensor) -> None:
    """Add the products of the warp's keys' weights, in SMEM, with the warp's columns of rows of queries: of
    all queries, or those of other warps.
    """
    plan = ctx.plan
    if plan.is_float32:
        keys = [first_key(ctx) + m * warp_mma.ROWS for m in range(plan.key_mmas)]
        left = tuple(warp_tf32.from_columns(weights, key, ctx.lane) for key in keys)
        columns = cute.size(rows, mode=[1]) // 2 // plan.column_warps
        right = warp_tf32.Columns(rows, ctx.column_warp * columns)
        warp_tf32.accumulate(sums, (), left, right, ctx.lane, plan.tf32_method)
    else:
        queries, firsts = plan.queries, [Int32(0)]
        if plan.own_in_regs:
            queries = plan.own_queries
            firsts = [(ctx.column_warp ^ n) * queries for n in range(1, plan.column_warps)]
        for first in firsts:
            left = warp_mma.left(weights, first_key(ctx), ctx.lane, column=first, part=plan.chunk_queries)
            right = warp_mma.right(rows, first, ctx.lane, share=ctx.column_share, transposed=True)
            warp_mma.accumulate(sums, warp_mma.from_smem(left, plan.key_mmas), right, queries)


@cute.jit
def _work(ctx: Context, tile: Tile) -> TileState:
    plan = ctx.plan
    band, span = tiles.band_of(ctx, tile), tiles.span_of(ctx, tile)
    first = tile.index * plan.keys + first_key(ctx) + ctx.lane // warp_mma.LANES
    order, philox = None, None
    if cutlass.const_expr(plan.features.deterministic):
        order = tiles.order_of(ctx, tile)
    if cutlass.const_expr(plan.features.dropout):
        philox = dropout.load(ctx.rng_state, ctx.params.drop_byte, ctx.params.drop_fraction)
    full = tiles.full_span(ctx, tile, band, span)
    return TileState(tile, band, span, full, (first, first + 8), order, philox)


@cute.jit
def _begin(ctx: Context, work: TileState, h: Int32) -> Block:
    """The first block of a head."""
    blocks = tiles.blocks_of(ctx, work.tile, work.span, work.tile.kv_head * tiles.group(ctx) + h)
    n, partial = tiles.block_at(ctx, blocks, blocks.span.first)
    return Block(h, blocks.span.first, n, partial)


@cute.jit
def _next_block(ctx: Context, work: TileState, block: Block) -> Block:
    """The block after one; past the last head's last one it is arbitrary."""
    head = work.tile.kv_head * tiles.group(ctx) + block.h
    blocks = tiles.blocks_of(ctx, work.tile, work.span, head)
    h, position = block.h, block.position + 1
    n, partial = Int32(0), Boolean(False)
    if position == blocks.span.last:
        h, position, n, partial = _begin(ctx, work, h + 1)
    else:
        n, partial = tiles.block_at(ctx, blocks, position)
    return Block(h, position, n, partial)
