"""The walk over a tile's blocks of rows: which it visits, in which order, and which have to be masked."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import band as bands
from ...common.bwd import tiles
from ...common.bwd.tiles import Place, Tile
from ...common.ring import Cursor
from ..warps import ROWS
from . import block_entries
from .context import Context
from .state import Cursors, Thread, TileState, at_any_stage, at_stage
from .weights import fetch_words


@cute.jit
def each_block(
    ctx: Context,
    t: Thread,
    tile: Tile,
    kv_at: Cursor,
    at: Cursors,
    block: cutlass.Constexpr,
    masks: cutlass.Constexpr,
) -> Cursors:
    """Call `block` for all blocks of all heads of the group; the very last one has no next block to begin."""
    at, work, n, accumulate = all_but_the_last(ctx, t, tile, kv_at, at, block, masks)
    return block(ctx, t, work, n, accumulate, masks, True, at)


@cute.jit
def all_but_the_last(
    ctx: Context,
    t: Thread,
    tile: Tile,
    kv_at: Cursor,
    at: Cursors,
    block: cutlass.Constexpr,
    masks: cutlass.Constexpr,
) -> tuple:
    """Do as `each_block` does, without the last block; returns that block, and whether there were others.

    `masks`: whether `block` has to know which blocks are masked.
    """
    if cutlass.const_expr(ctx.plan.heads_inner):
        return _blocks_of_all_heads(ctx, t, tile, kv_at, at, block, masks)
    heads = tiles.group(ctx)
    accumulate = Boolean(False)
    for h in cutlass.range(heads, unroll=1):
        work = _work(ctx, t, tile, kv_at, h)
        at = fetch_words(ctx, t, work, at)
        last = work.blocks.span.last - 1 if h == heads - 1 else work.blocks.span.last
        if cutlass.const_expr(not masks):
            at, accumulate = _blocks_full(ctx, t, work, last, accumulate, at, block)
        elif cutlass.const_expr(ctx.plan.features.lists_blocks):
            at, accumulate = _blocks_partial_anywhere(ctx, t, work, last, accumulate, at, block)
        else:
            at, accumulate = _blocks_partial_at_ends(ctx, t, work, last, accumulate, at, block)
    work = _work(ctx, t, tile, kv_at, heads - 1)
    n, _ = _block_at(ctx, work, work.blocks.span.last - 1, at)
    return at, work, n, accumulate


@cute.jit
def _blocks_of_all_heads(
    ctx: Context,
    t: Thread,
    tile: Tile,
    kv_at: Cursor,
    at: Cursors,
    block: cutlass.Constexpr,
    masks: cutlass.Constexpr,
) -> tuple:
    """The same with `heads_inner`: each block for all heads before the next, one loop for all full blocks."""
    plan, heads = ctx.plan, tiles.group(ctx)
    work = _work(ctx, t, tile, kv_at, Int32(0))
    span, accumulate = work.span, Boolean(False)
    place, count = tiles.first_place(ctx, tile, span), (span.last - span.first) * heads - 1
    first_full, first_partial = Int32(0), count
    if cutlass.const_expr(masks):
        # Both may lie after the last block.
        start, end = tiles.full_span(ctx, work.tile, work.band, work.span)
        first_full = cutlass.min(cutlass.max(span.last - end, 0) * heads, count)
        first_partial = cutlass.min(cutlass.max(span.last - start, 0) * heads, count)
    if cutlass.const_expr(masks and plan.partial_at_end):
        at, place, accumulate = _blocks_down(ctx, t, work, first_full, place, accumulate, at, block, True)
    at, place, accumulate = _blocks_down(
        ctx, t, work, first_partial - first_full, place, accumulate, at, block, False
    )
    if cutlass.const_expr(masks and plan.partial_at_start):
        at, place, accumulate = _blocks_down(
            ctx, t, work, count - first_partial, place, accumulate, at, block, True
        )
    return at, _of_head(ctx, work, heads - 1), tiles.last_block(ctx, tile, span), accumulate


@cute.jit
def _blocks_down(
    ctx: Context,
    t: Thread,
    work: TileState,
    count: Int32,
    place: Place,
    accumulate: Boolean,
    at: Cursors,
    block: cutlass.Constexpr,
    masked: cutlass.Constexpr,
) -> tuple:
    """Process `count` blocks, from `place` on."""
    for _ in cutlass.range(count, unroll=1):
        own = _of_head(ctx, work, place.h)
        if cutlass.const_expr(masked):
            at = block(ctx, t, own, place.n, accumulate, True, False, at)
        else:
            at = _full_block(ctx, t, own, place.n, accumulate, at, block)
        place, accumulate = tiles.next_place(ctx, work.tile, place), Boolean(True)
    return at, place, accumulate


@cute.jit
def _of_head(ctx: Context, work: TileState, h: Int32) -> TileState:
    """The tile's state for another head of the group."""
    head = work.tile.kv_head * tiles.group(ctx) + h
    return TileState(work.tile, work.kv, work.band, work.span, work.order, work.positions, head, work.blocks)


@cute.jit
def _work(ctx: Context, t: Thread, tile: Tile, kv_at: Cursor, h: Int32) -> TileState:
    """The tile's state for the h-th query head of its group."""
    plan = ctx.plan
    first = tile.index * plan.keys + t.warpgroup * ROWS + t.row
    positions, head = (first, first + 8), tile.kv_head * tiles.group(ctx) + h
    span, order = tiles.span_of(ctx, tile), None
    if cutlass.const_expr(plan.features.deterministic and not plan.load_warp_sends_order):
        order = tiles.order_of(ctx, tile)
    blocks = tiles.blocks_of(ctx, tile, span, head)
    band = bands.with_own(tiles.band_of(ctx, tile), positions)
    return TileState(tile, kv_at, band, span, order, positions, head, blocks)


@cute.jit
def _block_at(ctx: Context, work: TileState, position: Int32, at: Cursors) -> tuple:
    """The number of the block at a position, whose Q has arrived, and whether the mask changes it."""
    if cutlass.const_expr(ctx.plan.features.lists_blocks):
        return block_entries.read(ctx, at.q)
    return tiles.block_at(ctx, work.blocks, position)


@cute.jit
def _full_block(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    accumulate: Boolean,
    at: Cursors,
    block: cutlass.Constexpr,
) -> Cursors:
    """Process a full block; with `unroll_stages` in one of two copies of the code (ptxas.md, P12)."""
    if cutlass.const_expr(not ctx.plan.config.unroll_stages or ctx.finishes):
        return block(ctx, t, work, n, accumulate, False, False, at)
    after = at
    if at.q.stage == 0:
        after = at_any_stage(block(ctx, t, work, n, accumulate, False, False, at_stage(at, 0)))
    else:
        after = at_any_stage(block(ctx, t, work, n, accumulate, False, False, at_stage(at, 1)))
    return after


@cute.jit
def _blocks_full(
    ctx: Context,
    t: Thread,
    work: TileState,
    last: Int32,
    accumulate: Boolean,
    at: Cursors,
    block: cutlass.Constexpr,
) -> tuple:
    """Process blocks up to position `last`, all of them as full blocks."""
    for position in cutlass.range(work.blocks.span.first, last, unroll=1):
        n, _ = _block_at(ctx, work, position, at)
        at = _full_block(ctx, t, work, n, accumulate, at, block)
        accumulate = Boolean(True)
    return at, accumulate


@cute.jit
def _blocks_partial_at_ends(
    ctx: Context,
    t: Thread,
    work: TileState,
    last: Int32,
    accumulate: Boolean,
    at: Cursors,
    block: cutlass.Constexpr,
) -> tuple:
    """Process blocks up to `last`, where some of the first and of the last ones have to be masked."""
    plan = ctx.plan
    start, end = tiles.full_span(ctx, work.tile, work.band, work.span)
    start, end = cutlass.min(start, last), cutlass.min(end, last)
    if cutlass.const_expr(plan.partial_at_start):
        for n in cutlass.range(work.span.first, start, unroll=1):
            at = block(ctx, t, work, n, accumulate, True, False, at)
            accumulate = Boolean(True)
    for n in cutlass.range(start, end, unroll=1):
        at = _full_block(ctx, t, work, n, accumulate, at, block)
        accumulate = Boolean(True)
    if cutlass.const_expr(plan.partial_at_end):
        for n in cutlass.range(end, last, unroll=1):
            at = block(ctx, t, work, n, accumulate, True, False, at)
            accumulate = Boolean(True)
    return at, accumulate


@cute.jit
def _blocks_partial_anywhere(
    ctx: Context,
    t: Thread,
    work: TileState,
    last: Int32,
    accumulate: Boolean,
    at: Cursors,
    block: cutlass.Constexpr,
) -> tuple:
    """Process blocks up to position `last`, any of which may have to be masked."""
    start, end = tiles.full_span(ctx, work.tile, work.band, work.span)
    for position in cutlass.range(work.blocks.span.first, last, unroll=1):
        n, partial = _block_at(ctx, work, position, at)
        # ptxas knows a vote to be uniform, which keeps the wgmmas' addresses in uniform registers
        # (ptxas.md, P7).
        if cute.arch.vote_any_sync(partial | (n < start) | (n >= end)):
            at = block(ctx, t, work, n, accumulate, True, False, at)
        else:
            at = block(ctx, t, work, n, accumulate, False, False, at)
        accumulate = Boolean(True)
    return at, accumulate
