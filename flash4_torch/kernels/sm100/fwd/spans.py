"""Which blocks of keys the tiles of a CTA visit: all of them together, and each by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import forward_tile as tiles
from ...common.band import Span
from ...common.forward_tile import Blocks, Tile

if TYPE_CHECKING:
    from .kernel import Kernel


class Spans(NamedTuple):
    """Positions of blocks, counted down by every role."""

    whole: Span
    own: tuple[Span, ...]
    """Of each tile; at least one block."""


@cute.jit
def spans_of(k: Kernel, tile: Tile) -> Spans:
    blocks = tiles.blocks_of(k, tile)
    if cutlass.const_expr(k.plan.spans_differ):
        own = tuple(own_span(k, tile, blocks, Int32(t)) for t in range(k.plan.q_tiles))
        return Spans(blocks.span, own)
    return Spans(blocks.span, (blocks.span,) * k.plan.q_tiles)


@cute.jit
def own_span(k: Kernel, tile: Tile, blocks: Blocks, t: Int32) -> Span:
    """Of the t-th tile of 128 rows."""
    if cutlass.const_expr(not k.plan.spans_differ):
        return blocks.span
    first = first_query(k, tile, t)
    return tiles.own_span(k, tile, blocks, first, last_query(k, tile, first))


@cute.jit
def of(k: Kernel, visited: Spans, t: Int32) -> Span:
    """Of one of two tiles."""
    if cutlass.const_expr(not k.plan.spans_differ):
        return visited.whole
    first, second = visited.own
    return Span(
        second.first if t == 1 else first.first,
        second.last if t == 1 else first.last,
    )


def first_query(k: Kernel, tile: Tile, t: Int32) -> Int32:
    return (tile.block * k.plan.q_tiles + t) * k.plan.tokens


def last_query(k: Kernel, tile: Tile, first: Int32) -> Int32:
    return cutlass.min(first + k.plan.tokens, tile.Sq) - 1


def visits(k: Kernel, own: Span, position: Int32) -> Boolean | bool:
    """Whether a tile visits a position of the whole span."""
    if not k.plan.spans_differ:
        return True
    return (position >= own.first) & (position < own.last)
