"""Which blocks of rows a tile visits, in which order, and which of them have to be masked."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import band as bands
from ...common.bwd import tiles
from ...common.bwd.tiles import Place, Tile
from ...common.ring import Cursor
from ..warps import ROWS
from .context import Context
from .state import Cursors, Thread, Work, at_any_stage, at_stage


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
    """`block` for all blocks of all heads of the group; the very last one has no successor to begin with."""
    at, work, n, started = all_but_the_last(ctx, t, tile, kv_at, at, block, masks)
    return block(ctx, t, work, n, started, masks, True, at)


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
    """`each_block` without the last one; returns which it is, and whether there were others.

    `masks`: whether `block` has to know which blocks are masked.
    """
    if cutlass.const_expr(ctx.plan.heads_inside):
        return _blocks_of_all_heads(ctx, t, tile, kv_at, at, block, masks)
    heads = tiles.group(ctx)
    started = Boolean(False)
    for h in cutlass.range(heads, unroll=1):
        work = _work(ctx, t, tile, kv_at, h)
        last = work.blocks.span.last - 1 if h == heads - 1 else work.blocks.span.last
        if cutlass.const_expr(not masks):
            at, started = _blocks_uncut(ctx, t, work, last, started, at, block)
        elif cutlass.const_expr(ctx.plan.features.mask):
            at, started = _blocks_cut_anywhere(ctx, t, work, last, started, at, block)
        else:
            at, started = _blocks_cut_at_the_ends(ctx, t, work, last, started, at, block)
    work = _work(ctx, t, tile, kv_at, heads - 1)
    n, _ = tiles.block_at(ctx, work.blocks, work.blocks.span.last - 1)
    return at, work, n, started


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
    """The same from the last block to the first one, each of all heads: one loop for all plain blocks."""
    plan, heads = ctx.plan, tiles.group(ctx)
    work = _work(ctx, t, tile, kv_at, Int32(0))
    span, started = work.span, Boolean(False)
    place, count = tiles.first_place(ctx, tile, span), (span.last - span.first) * heads - 1
    first_plain, first_cut = Int32(0), count
    if cutlass.const_expr(masks):
        # Both may lie behind the last block.
        start, end = _whole(ctx, work)
        first_plain = cutlass.min(cutlass.max(span.last - end, 0) * heads, count)
        first_cut = cutlass.min(cutlass.max(span.last - start, 0) * heads, count)
    if cutlass.const_expr(masks and plan.cuts_at_the_end):
        at, place, started = _blocks_down(ctx, t, work, first_plain, place, started, at, block, True)
    at, place, started = _blocks_down(ctx, t, work, first_cut - first_plain, place, started, at, block, False)
    if cutlass.const_expr(masks and plan.cuts_at_the_start):
        at, place, started = _blocks_down(ctx, t, work, count - first_cut, place, started, at, block, True)
    return at, _of_head(ctx, work, heads - 1), tiles.last_block(ctx, tile, span), started


@cute.jit
def _blocks_down(
    ctx: Context,
    t: Thread,
    work: Work,
    count: Int32,
    place: Place,
    started: Boolean,
    at: Cursors,
    block: cutlass.Constexpr,
    masked: cutlass.Constexpr,
) -> tuple:
    """So many blocks, from a place on."""
    for _ in cutlass.range(count, unroll=1):
        own = _of_head(ctx, work, place.h)
        if cutlass.const_expr(masked):
            at = block(ctx, t, own, place.n, started, True, False, at)
        else:
            at = _plain_block(ctx, t, own, place.n, started, at, block)
        place, started = tiles.next_place(ctx, work.tile, place), Boolean(True)
    return at, place, started


@cute.jit
def _of_head(ctx: Context, work: Work, h: Int32) -> Work:
    """The tile's work for another head of the group."""
    head = work.tile.kv_head * tiles.group(ctx) + h
    return Work(work.tile, work.kv, work.band, work.span, work.turn, work.positions, head, work.blocks)


@cute.jit
def _work(ctx: Context, t: Thread, tile: Tile, kv_at: Cursor, h: Int32) -> Work:
    """For the h-th query head of the tile's group."""
    plan = ctx.plan
    first = tile.index * plan.keys + t.warpgroup * ROWS + t.row
    positions, head = (first, first + 8), tile.kv_head * tiles.group(ctx) + h
    span, turn = tiles.span_of(ctx, tile), None
    if cutlass.const_expr(plan.features.deterministic and not plan.tells_turns):
        turn = tiles.turn_of(ctx, tile)
    blocks = tiles.blocks_of(ctx, tile, span, head)
    return Work(tile, kv_at, tiles.band_of(ctx, tile), span, turn, positions, head, blocks)


@cute.jit
def _plain_block(
    ctx: Context, t: Thread, work: Work, n: Int32, started: Boolean, at: Cursors, block: cutlass.Constexpr
) -> Cursors:
    """Of those that nothing cuts; with `static_stages` one of two copies of its code."""
    if cutlass.const_expr(not ctx.plan.config.static_stages or ctx.finishes):
        return block(ctx, t, work, n, started, False, False, at)
    after = at
    if at.q.stage == 0:
        after = at_any_stage(block(ctx, t, work, n, started, False, False, at_stage(at, 0)))
    else:
        after = at_any_stage(block(ctx, t, work, n, started, False, False, at_stage(at, 1)))
    return after


@cute.jit
def _blocks_uncut(
    ctx: Context, t: Thread, work: Work, last: Int32, started: Boolean, at: Cursors, block: cutlass.Constexpr
) -> tuple:
    """Blocks up to position `last`."""
    for position in cutlass.range(work.blocks.span.first, last, unroll=1):
        n, _ = tiles.block_at(ctx, work.blocks, position)
        at = _plain_block(ctx, t, work, n, started, at, block)
        started = Boolean(True)
    return at, started


@cute.jit
def _blocks_cut_at_the_ends(
    ctx: Context, t: Thread, work: Work, last: Int32, started: Boolean, at: Cursors, block: cutlass.Constexpr
) -> tuple:
    """Blocks up to `last`, of which some of the first and the last ones have to be masked."""
    plan = ctx.plan
    start, end = _whole(ctx, work)
    start, end = cutlass.min(start, last), cutlass.min(end, last)
    if cutlass.const_expr(plan.cuts_at_the_start):
        for n in cutlass.range(work.span.first, start, unroll=1):
            at = block(ctx, t, work, n, started, True, False, at)
            started = Boolean(True)
    for n in cutlass.range(start, end, unroll=1):
        at = _plain_block(ctx, t, work, n, started, at, block)
        started = Boolean(True)
    if cutlass.const_expr(plan.cuts_at_the_end):
        for n in cutlass.range(end, last, unroll=1):
            at = block(ctx, t, work, n, started, True, False, at)
            started = Boolean(True)
    return at, started


@cute.jit
def _blocks_cut_anywhere(
    ctx: Context, t: Thread, work: Work, last: Int32, started: Boolean, at: Cursors, block: cutlass.Constexpr
) -> tuple:
    """Blocks up to position `last`, any of which may have to be masked."""
    start, end = _whole(ctx, work)
    for position in cutlass.range(work.blocks.span.first, last, unroll=1):
        n, mixed = tiles.block_at(ctx, work.blocks, position)
        # A vote is known to be the same in all lanes, which keeps the products' addresses uniform.
        if cute.arch.vote_any_sync(mixed | (n < start) | (n >= end)):
            at = block(ctx, t, work, n, started, True, False, at)
        else:
            at = block(ctx, t, work, n, started, False, False, at)
        started = Boolean(True)
    return at, started


@cute.jit
def _whole(ctx: Context, work: Work) -> tuple:
    """The first block that neither the band nor the end of Sk cuts, and the first one after those."""
    plan, tile, span, band = ctx.plan, work.tile, work.span, work.band
    first = tile.index * plan.keys
    start, end = span.first, span.last
    if cutlass.const_expr(plan.band.left):
        lowest = cutlass.max(first + plan.keys - 1 + band.lowest, 0)
        start = cutlass.max(start, cute.ceil_div(lowest, plan.queries))
    if cutlass.const_expr(plan.band.right):
        end = cutlass.min(end, bands.whole_blocks(band, plan.band, first))
    if cutlass.const_expr(plan.config.tail):
        # All blocks have to hide keys beyond the end.
        ragged = first + plan.keys > tile.Sk
        start = span.last if ragged else start
    return start, cutlass.max(start, end)
