"""A tile of keys, of the backward: in which order tiles are drawn, and how the loading warp tells others.

`k` is what every role of a kernel may use: its plan, rule, maps, message and edges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from . import attn_mask, persistent, ring
from .band import Band, Span, make_band, visible_span
from .ring import Cursor

MESSAGE = 8
"""Words that describe a tile to the others."""
_TOLD = 3
"""Of them, what is not known without, unless sequences are packed."""


class Tile(NamedTuple):
    """Which keys, of whom. `block` is -1 where there is no further tile."""

    block: Int32
    """Position of the keys, in tiles."""
    key_head: Int32
    """With heads apart the query head, whose own dK and dV are made: see `head_of_keys`."""
    batch: Int32
    first_q: Int32
    """Where the sequence begins in packed rows; 0 if not varlen."""
    Sq: Int32
    first_k: Int32
    Sk: Int32


class Shape(NamedTuple):
    """How many tiles there are of a head, and are drawn in all; in clusters pairs of tiles."""

    blocks: Uint32
    key_heads: Uint32
    tiles: Uint32
    """With whole heads of each head one."""


@cute.jit
def shape(k: Any) -> Shape:
    _, _, Hk, B = k.maps.mQ.shape if k.plan.heads_apart else k.maps.mK.shape
    if cutlass.const_expr(k.plan.features.varlen):
        B = k.cu_seqlens_k.shape[0] - 1
    blocks, heads = Uint32(cute.ceil_div(k.rule.longest, k.plan.ticket_keys)), Uint32(Hk) * Uint32(B)
    return Shape(blocks, Uint32(Hk), heads if k.plan.whole_heads else blocks * heads)


@cute.jit
def decode(k: Any, shape: Shape, ticket: Uint32) -> Tile:
    """Sections of heads one after another; within one, the first block of keys of every head comes first.

    With a causal mask the first block takes longest, so that what is left at the end is short. Where dQ is
    summed up in order, tiles wait only for such as were drawn before: see `Plan.descends`.
    """
    step, head = persistent.step_and_head(k, shape.blocks, shape.tiles, ticket)
    return tile_of(k, shape, step, head)


@cute.jit
def tile_of(k: Any, shape: Shape, step: Uint32, head: Uint32) -> Tile:
    """A key head's tile, of all batch entries' key heads, by when it is drawn among the head's."""
    batch = head // shape.key_heads
    b = Int32(batch)
    first_q, first_k = Int32(0), Int32(0)
    Sq, Sk = k.maps.mQ.shape[0], k.maps.mK.shape[0]
    if cutlass.const_expr(k.plan.features.varlen):
        first_q, first_k = k.cu_seqlens_q[b], k.cu_seqlens_k[b]
        Sq, Sk = k.cu_seqlens_q[b + 1] - first_q, k.cu_seqlens_k[b + 1] - first_k
    block = Int32(step)
    if cutlass.const_expr(k.plan.descends):
        block = Int32(shape.blocks) - 1 - block
    if cutlass.const_expr(k.plan.ctas > 1):
        block = block * k.plan.ctas + k.pair.rank
    return Tile(block, Int32(head - batch * shape.key_heads), b, first_q, Sq, first_k, Sk)


@cute.jit
def write(k: Any, at: Cursor, tile: Tile) -> None:
    """By one lane; the arrival at the stage's barrier makes it visible."""
    message = k.message + at.stage * MESSAGE
    for i in cutlass.range_constexpr(len(tile)):
        cute.arch.store(message + i, tile[i])


@cute.jit
def read(k: Any, at: Cursor) -> Tile:
    """Waits for the tile's K, too."""
    tile = read_by_one_lane(k, at)
    told = len(tile) if k.plan.features.varlen else _TOLD
    return Tile(*map(cute.arch.make_warp_uniform, tile[:told]), *tile[told:])


@cute.jit
def read_by_one_lane(k: Any, at: Cursor) -> Tile:
    """`read` where the others of the warp are not there."""
    ring.wait_full(k.load_k, at)
    message = k.message + at.stage * MESSAGE
    words = [cute.arch.load(message + i, Int32) for i in range(len(Tile._fields))]
    if cutlass.const_expr(not k.plan.features.varlen):
        words[_TOLD:] = [Int32(0), k.maps.mQ.shape[0], Int32(0), k.maps.mK.shape[0]]
    return Tile(*words)


@cute.jit
def band_of(k: Any, tile: Tile) -> Band:
    """Turned round: rows are keys, and what they see are queries."""
    band = make_band(tile.Sq, tile.Sk, k.rule.left, k.rule.right)
    return Band(tile.Sq, -band.highest, -band.lowest)


@cute.jit
def span_of(k: Any, tile: Tile) -> Span:
    """The blocks of rows that the tile, or its pair, visits, of each query head: at least one."""
    first = first_key(k, tile)
    last = cutlass.min(first + k.plan.ticket_keys, tile.Sk) - 1
    span = visible_span(band_of(k, tile), k.plan.band, first, last)
    if cutlass.const_expr(k.plan.whole_heads):
        # Which stores dQ of rows that see nothing, too.
        return Span(Int32(0) if tile.block == 0 else span.first, span.last)
    return span


class Turn(NamedTuple):
    """When a tile, or pair, adds to its head's dQ, where sums have an order."""

    number: Int32
    """How many of the sequence's tiles, or pairs, have their turn before."""
    before: Span
    """What the one just before visits; nothing if there is none."""


@cute.jit
def turn_of(k: Any, tile: Tile) -> Turn:
    index, ctas = tile.block // k.plan.ctas, k.plan.ctas
    number, step = index, -1
    if cutlass.const_expr(k.plan.descends):
        number, step = cute.ceil_div(tile.Sk, k.plan.ticket_keys) - 1 - index, 1
    before = span_of(k, tile._replace(block=tile.block + step * ctas))
    return Turn(number, Span(before.first, Int32(0) if number == 0 else before.last))


@cute.jit
def write_turn(k: Any, at: Cursor, tile: Tile) -> None:
    """By the lane that has written the tile: over words of its message that nobody reads if not varlen."""
    turn, message = turn_of(k, tile), k.message + (at.stage * MESSAGE + _TOLD)
    for i, word in enumerate((turn.number, *turn.before)):
        cute.arch.store(message + i, word)


@cute.jit
def read_turn(k: Any, at: Cursor) -> Turn:
    """While the tile's K is held: `turn_of`, without its numbers in registers, nor the tile's."""
    message = k.message + (at.stage * MESSAGE + _TOLD)
    number, first, last = (cute.arch.load(message + i, Int32) for i in range(3))
    return Turn(number, Span(first, last))


class Place(NamedTuple):
    """Block n of one of the group's heads, where a tile visits the block of all heads before the next one."""

    n: Int32
    h: Int32


@cute.jit
def first_place(k: Any, tile: Tile, span: Span) -> Place:
    """Where such a tile begins: rows that all tiles of a head see, if a mask bounds their first ones."""
    return Place(span.last - 1 if _goes_down(k, tile) else span.first, Int32(0))


@cute.jit
def last_block(k: Any, tile: Tile, span: Span) -> Int32:
    """Where it ends."""
    return span.first if _goes_down(k, tile) else span.last - 1


@cute.jit
def next_place(k: Any, tile: Tile, place: Place) -> Place:
    h = place.h + 1
    done = h == group(k)
    n = place.n - 1 if _goes_down(k, tile) else place.n + 1
    return Place(n if done else place.n, Int32(0) if done else h)


def _goes_down(k: Any, tile: Tile) -> Any:
    """From the last block to the first one; or every second tile of whole heads the other way.

    Then a tile begins with the rows and sums that the one before has used last, which are still in the cache
    where there is no room for all of them.
    """
    return tile.block % 2 == 0 if k.plan.turns_back else True


class Blocks(NamedTuple):
    """The blocks of one head's rows that a tile visits, by position: at least one.

    Without a mask a block's position is its number; a mask has a list of the blocks that it leaves visible.
    """

    span: Span
    first_block: Int32
    visible: Any = None


@cute.jit
def blocks_of(k: Any, tile: Tile, span: Span, head: Int32) -> Blocks:
    """What the loading warp loads, and every consumer takes."""
    if cutlass.const_expr(not k.plan.lists_blocks):
        return Blocks(span, span.first)
    visible = attn_mask.visible_blocks(
        k.mask, tile.batch, head, tile.block // k.plan.ctas, span.first, span.last
    )
    bottom = visible.last + 1 - visible.count
    # If none is visible, one is visited all the same; its scores will be hidden.
    return Blocks(Span(bottom, bottom + cutlass.max(visible.count, 1)), span.first, visible)


@cute.jit
def block_at(k: Any, blocks: Blocks, position: Int32) -> tuple:
    """The number of the block at a position, and whether the mask changes it."""
    if cutlass.const_expr(not k.plan.lists_blocks):
        return position, Boolean(k.mask is not None)
    n, mixed = attn_mask.block_at(blocks.visible, blocks.visible.last - position)
    nothing = blocks.visible.count <= 0
    return blocks.first_block if nothing else n, mixed | nothing


@cute.jit
def count_blocks(k: Any, tile: Tile) -> Int32:
    """That a tile visits, of all heads of the group."""
    span, heads = span_of(k, tile), group(k)
    count = (span.last - span.first) * heads
    if cutlass.const_expr(k.plan.lists_blocks):
        count = Int32(0)
        for h in cutlass.range(heads, unroll=1):
            blocks = blocks_of(k, tile, span, tile.key_head * heads + h)
            count += blocks.span.last - blocks.span.first
    return count


@cute.jit
def first_key(k: Any, tile: Tile) -> Int32:
    """Of the tile, or of its pair, which may have a second tile without keys."""
    return tile.block // k.plan.ctas * k.plan.ticket_keys


@cute.jit
def group(k: Any) -> Int32:
    """Query heads of a tile."""
    if cutlass.const_expr(k.plan.heads_apart):
        return Int32(1)
    return _group(k)


@cute.jit
def head_of_keys(k: Any, tile: Tile) -> Int32:
    """Whose K and V the tile has."""
    if cutlass.const_expr(k.plan.heads_apart):
        return tile.key_head // _group(k)
    return tile.key_head


def _group(k: Any) -> Int32:
    """Query heads of a key head."""
    return k.maps.mQ.shape[2] // k.maps.mK.shape[2]


@cute.jit
def first_block(k: Any, tile: Tile) -> Int32:
    """Where the sequence's rows begin in the workspaces, in blocks."""
    if cutlass.const_expr(k.plan.features.varlen):
        return tile.first_q // k.plan.queries + tile.batch
    return Int32(0)


@cute.jit
def row_of_workspace(k: Any, tile: Tile, head: Int32) -> Int32:
    """Of workspaces (B, Hq, ...), or (Hq, ...) where sequences are packed."""
    if cutlass.const_expr(k.plan.features.varlen):
        return head
    return tile.batch * k.maps.mQ.shape[2] + head
