"""Blocks of keys that the tiles of a CTA visit: all of them together, and each by itself."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.band import Span
from ...common.fwd import tiles
from ...common.fwd.tiles import Blocks, Tile
from .context import Context


class Spans(NamedTuple):
    """Positions of blocks, which every role counts down."""

    whole: Span
    own: tuple[Span, ...]
    """Span of each tile: at least one block."""


@cute.jit
def spans_of(ctx: Context, tile: Tile) -> Spans:
    blocks = tiles.blocks_of(ctx, tile)
    if cutlass.const_expr(ctx.plan.spans_differ):
        own = tuple(own_span(ctx, tile, blocks, Int32(t)) for t in range(ctx.plan.q_tiles))
        return Spans(blocks.span, own)
    return Spans(blocks.span, (blocks.span,) * ctx.plan.q_tiles)


@cute.jit
def own_span(ctx: Context, tile: Tile, blocks: Blocks, t: Int32) -> Span:
    """Span of the t-th tile of 128 rows."""
    if cutlass.const_expr(not ctx.plan.spans_differ):
        return blocks.span
    first = first_query(ctx, tile, t)
    return tiles.own_span(ctx, tile, blocks, first, last_query(ctx, tile, first))


@cute.jit
def of(ctx: Context, visited: Spans, t: Int32) -> Span:
    """Span of one of the two tiles."""
    if cutlass.const_expr(not ctx.plan.spans_differ):
        return visited.whole
    first, second = visited.own
    return Span(
        second.first if t == 1 else first.first,
        second.last if t == 1 else first.last,
    )


def first_query(ctx: Context, tile: Tile, t: Int32) -> Int32:
    return (tile.index * ctx.plan.q_tiles + t) * ctx.plan.tokens


def last_query(ctx: Context, tile: Tile, first: Int32) -> Int32:
    return cutlass.min(first + ctx.plan.tokens, tile.Sq) - 1


def visits(ctx: Context, own: Span, position: Int32) -> Boolean | bool:
    """Whether a tile visits a position of the whole span."""
    if not ctx.plan.spans_differ:
        return True
    return (position >= own.first) & (position < own.last)
