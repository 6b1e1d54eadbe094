"""The loop over a tile's blocks of queries: five GEMMs for each."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import dropout, warp_mma, warp_tf32
from ...common.bwd import tiles
from ...common.bwd.tiles import Tile
from ..rows import swapped
from .context import Context
from .dq_sums import add_dq
from .load import load_kv, load_rows
from .state import Block, BlockState, Thread, TileState, make_sums
from .weights import differentiate, dropped, generate_keep_bits, head_of, mask_words, recompute_p


def make_thread(ctx: Context) -> Thread:
    """Sums of nothing yet."""
    plan, each = ctx.plan, ctx.plan.column_warps
    return Thread(*(make_sums(plan, n // each) for n in (plan.D, plan.Dv)))


@cute.jit
def mainloop(ctx: Context, t: Thread, tile: Tile) -> None:
    plan, ahead = ctx.plan, ctx.plan.ahead
    work, count = _work(ctx, tile), tiles.count_blocks(ctx, tile)
    blocks = (_begin(ctx, work, Int32(0)),)
    for _ in cutlass.range_constexpr(ahead):
        blocks = (*blocks, _next_block(ctx, work, blocks[-1]))
    load_kv(ctx, tile)
    for i in cutlass.range_constexpr(ahead):
        load_rows(ctx, tile, blocks[i], Int32(i), count, Int32(i))
        cute.arch.cp_async_commit_group()
    stage, freed = Int32(0), Int32(plan.stages - 1)
    for i in cutlass.range(count, unroll=1):
        block = blocks[0]
        further = _next_block(ctx, work, blocks[-1])
        own = BlockState(tile, head_of(ctx, work, block), block.n)
        mask = mask_words(ctx, work, own)
        if cutlass.const_expr(plan.features.dropout):
            generate_keep_bits(ctx, work, own)
        cute.arch.cp_async_wait_group(plan.groups_in_flight)
        # The block is there, and all warps have used dS, Q and dO of the one before.
        cute.arch.sync_threads()
        if cutlass.const_expr(plan.stages > 1):
            load_rows(ctx, tile, blocks[-1], i + ahead, count, freed)
            cute.arch.cp_async_commit_group()
        _to_dk(ctx, t, work, block, own, mask, stage)
        if cutlass.const_expr(plan.stages == 1):
            if cutlass.const_expr(plan.shares_weights):
                cute.arch.sync_threads()
            load_rows(ctx, tile, blocks[-1], i + ahead, count, stage)
            cute.arch.cp_async_commit_group()
        add_dq(ctx, work, own)
        freed, stage = stage, Int32(0) if stage + 1 == plan.stages else stage + 1
        blocks = (*blocks[1:], further)


@cute.jit
def _to_dk(
    ctx: Context, t: Thread, work: TileState, block: Block, own: BlockState, mask: tuple, stage: Int32
) -> None:
    """A block's share of dV and dK. At the end dS is in SMEM; Q and dO have been used, if no warps share."""
    plan = ctx.plan
    sQ, sdO = ctx.sQ[None, None, stage], ctx.sdO[None, None, stage]
    S, dP = (make_sums(plan, plan.own_queries, filled=False) for _ in range(2))
    _scores(ctx, S, ctx.sK, sQ)
    probs = recompute_p(ctx, work, block, own, S, mask, stage)
    _scores(ctx, dP, ctx.sV, sdO)
    P = dropped(ctx, probs)
    if cutlass.const_expr(plan.shares_weights):
        _store(ctx, P, ctx.sP)
    else:
        _accumulate(ctx, t.dV, S, P, sdO)
    dS = differentiate(ctx, work, own, probs, S, dP, stage)
    _store(ctx, dS, ctx.sdS)
    if cutlass.const_expr(not plan.shares_weights):
        _accumulate(ctx, t.dK, S, dS, sQ)
    cute.arch.sync_threads()
    if cutlass.const_expr(plan.shares_weights):
        for sums, weights, rows in ((t.dV, ctx.sP, sdO), (t.dK, ctx.sdS, sQ)):
            _accumulate_shared(ctx, sums, weights, rows)


@cute.jit
def _scores(ctx: Context, S: cute.Tensor, of_keys: cute.Tensor, of_queries: cute.Tensor) -> None:
    """Products of the warp's keys with the queries for which it computes scores."""
    if cutlass.const_expr(ctx.plan.is_float32):
        keys = warp_tf32.Rows(of_keys, ctx.key_warp * warp_mma.ROWS)
        queries = warp_tf32.Rows(of_queries, ctx.column_warp * ctx.plan.own_queries)
        warp_tf32.scores((S,), keys, queries, ctx.lane, ctx.plan.tf32_method)
    else:
        warp_mma.scores((S,), _own_keys(ctx, of_keys), _own_queries(ctx, of_queries), ctx.lane)


@cute.jit
def _store(ctx: Context, weights: cute.Tensor, target: cute.Tensor) -> None:
    """Store the warp's part of P or dS."""
    if cutlass.const_expr(ctx.plan.is_float32):
        row, first = ctx.column_warp * ctx.plan.own_queries, ctx.key_warp * warp_mma.ROWS
        warp_tf32.store_columns(weights, target, row, first, ctx.lane)
    else:
        tiler = (warp_mma.ROWS, ctx.plan.own_queries)
        own = cute.local_tile(target, tiler, (ctx.key_warp, ctx.column_warp))
        warp_mma.store_to_smem(weights, own, ctx.lane)


@cute.jit
def _accumulate(
    ctx: Context, sums: cute.Tensor, S: cute.Tensor, weights: cute.Tensor, rows: cute.Tensor
) -> None:
    """Add the products of the warp's weights of all queries, in the order of S, with rows of queries."""
    if cutlass.const_expr(ctx.plan.is_float32):
        left, right = warp_tf32.InRegisters(weights), warp_tf32.Columns(rows, Int32(0))
        warp_tf32.accumulate((sums,), (), (left,), right, ctx.lane, ctx.plan.tf32_method)
    else:
        operand = warp_mma.operand_of(weights, ctx.plan.own_queries)
        warp_mma.accumulate((sums,), (operand,), swapped(rows), ctx.lane)


@cute.jit
def _accumulate_shared(ctx: Context, sums: cute.Tensor, weights: cute.Tensor, rows: cute.Tensor) -> None:
    """Add the products of the warp's keys' weights, in SMEM, with the warp's columns of rows of queries."""
    plan = ctx.plan
    if cutlass.const_expr(plan.is_float32):
        left = warp_tf32.from_columns(weights, ctx.key_warp * warp_mma.ROWS, ctx.lane)
        columns = cute.size(rows, mode=[1]) // 2 // plan.column_warps
        right = warp_tf32.Columns(rows, ctx.column_warp * columns)
        warp_tf32.accumulate((sums,), (), (left,), right, ctx.lane, plan.tf32_method)
    else:
        columns = cute.size(rows, mode=[1]) // plan.column_warps
        part = cute.local_tile(swapped(rows), (columns, plan.queries), (ctx.column_warp, 0))
        warp_mma.accumulate_from_smem(sums, _own_keys(ctx, weights), part, ctx.lane, False)


def _own_keys(ctx: Context, x: cute.Tensor) -> cute.Tensor:
    """The rows of the warp's 16 keys."""
    return cute.local_tile(x, (warp_mma.ROWS, cute.size(x, mode=[1])), (ctx.key_warp, 0))


def _own_queries(ctx: Context, x: cute.Tensor) -> cute.Tensor:
    """The rows of the queries for which the warp computes scores."""
    return cute.local_tile(x, (ctx.plan.own_queries, cute.size(x, mode=[1])), (ctx.column_warp, 0))


@cute.jit
def _work(ctx: Context, tile: Tile) -> TileState:
    plan = ctx.plan
    band, span = tiles.band_of(ctx, tile), tiles.span_of(ctx, tile)
    first = tile.index * plan.keys + ctx.key_warp * warp_mma.ROWS + ctx.lane // warp_mma.LANES
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
