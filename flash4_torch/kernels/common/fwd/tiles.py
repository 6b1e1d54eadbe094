"""A tile of query rows: in which order tiles are drawn, and how the loading warp tells the others.

`ctx` is what every role of a forward kernel may use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from .. import attn_mask, ring, tile_scheduler
from ..band import Band, Span, make_band, visible_span
from ..ring import Cursor, Ring

MESSAGE = 8
"""Words that describe a tile."""


class Tile(NamedTuple):
    """Which rows, of whom. `block` is -1 where there is no further tile."""

    block: Int32
    """Position of the rows, in tiles."""
    heads: Int32
    """Which `pack` of the query heads of key head `key_head`."""
    key_head: Int32
    batch: Int32
    first_q: Int32
    """Where the sequence begins in packed rows; 0 if not varlen."""
    Sq: Int32
    first_k: Int32
    Sk: Int32


class Shape(NamedTuple):
    """How many tiles of each kind there are; in clusters pairs of tiles."""

    blocks: Uint32
    head_blocks: Uint32
    key_heads: Uint32
    tiles: Uint32


@cute.jit
def shape(ctx: Any) -> Shape:
    (group, _), _, Hk, B = ctx.maps.mQ.shape
    if cutlass.const_expr(ctx.plan.features.varlen):
        B = ctx.cu_seqlens_q.shape[0] - 1
    blocks = Uint32(cute.ceil_div(ctx.rule.longest, ctx.plan.queries))
    head_blocks = Uint32(cute.ceil_div(group, ctx.plan.pack))
    return Shape(blocks, head_blocks, Uint32(Hk), blocks * head_blocks * Uint32(Hk) * Uint32(B))


@cute.jit
def decode(ctx: Any, shape: Shape, ticket: Uint32, at: Cursor) -> Tile:
    """Sections of heads one after another; within one, the last block of rows of every head comes first.

    With a causal mask the last block takes longest, so that what is left at the end is short. Of a pair the
    second tile takes longer, so the CTAs of a cluster take it in turns.
    """
    step, head = tile_scheduler.step_and_head(ctx, shape.blocks, shape.tiles, ticket)
    owner = head // shape.head_blocks
    batch = owner // shape.key_heads
    block = Int32(shape.blocks - 1 - step)
    if cutlass.const_expr(ctx.plan.ctas > 1):
        block = block * ctx.plan.ctas + (ctx.pair.rank ^ at.phase)
    b = Int32(batch)
    first_q, first_k = Int32(0), Int32(0)
    Sq, Sk = ctx.maps.mQ.shape[0][1], ctx.maps.mK.shape[0]
    if cutlass.const_expr(ctx.plan.features.varlen):
        first_q, first_k = ctx.cu_seqlens_q[b], ctx.cu_seqlens_k[b]
        Sq, Sk = ctx.cu_seqlens_q[b + 1] - first_q, ctx.cu_seqlens_k[b + 1] - first_k
    return Tile(
        block,
        Int32(head - owner * shape.head_blocks),
        Int32(owner - batch * shape.key_heads),
        b,
        first_q,
        Sq,
        first_k,
        Sk,
    )


@cute.jit
def write(ctx: Any, cursor: Cursor, tile: Tile) -> None:
    """By one lane; the arrival at the stage's barrier makes it visible."""
    message = ctx.message + cursor.stage * MESSAGE
    for i in cutlass.range_constexpr(MESSAGE):
        cute.arch.store(message + i, tile[i])


@cute.jit
def write_end(ctx: Any, cursor: Cursor) -> None:
    """Instead of a tile, where there is none left."""
    cute.arch.store(ctx.message + cursor.stage * MESSAGE, Int32(-1))


@cute.jit
def read(ctx: Any, edge: Ring, cursor: Cursor) -> Tile:
    """Waits for what else arrives at the edge, too."""
    ring.wait_full(edge, cursor)
    message = ctx.message + cursor.stage * MESSAGE
    words = [cute.arch.make_warp_uniform(cute.arch.load(message + i, Int32)) for i in range(MESSAGE)]
    if cutlass.const_expr(not ctx.plan.features.varlen):
        words[4:] = [Int32(0), ctx.maps.mQ.shape[0][1], Int32(0), ctx.maps.mK.shape[0]]
    return Tile(*words)


@cute.jit
def band_of(ctx: Any, tile: Tile) -> Band:
    return make_band(tile.Sq, tile.Sk, ctx.rule.left, ctx.rule.right)


@cute.jit
def first_query(ctx: Any, tile: Tile) -> Int32:
    """Of the tile, or of its pair, which may have a second tile without rows."""
    return tile.block // ctx.plan.ctas * ctx.plan.queries


class Blocks(NamedTuple):
    """The blocks of keys that a tile visits, by position: `span.first <= position < span.last`, at least one.

    Without a mask a block's position is its number; a mask has a list of the blocks that it leaves visible.
    """

    span: Span
    first_key_block: Int32
    visible: Any = None


@cute.jit
def blocks_of(ctx: Any, tile: Tile) -> Blocks:
    """What the loading warp loads, and every consumer takes or passes."""
    first = first_query(ctx, tile)
    last = cutlass.min(first + ctx.plan.queries, tile.Sq) - 1
    span = visible_span(band_of(ctx, tile), ctx.plan.band, first, last)
    if cutlass.const_expr(ctx.mask is None):
        return Blocks(span, span.first)
    visible = attn_mask.visible_blocks(
        ctx.mask, tile.batch, query_head(ctx, tile), tile.block, span.first, span.last
    )
    bottom = visible.last + 1 - visible.count
    # If none is visible, one is visited all the same; its scores will be hidden.
    return Blocks(Span(bottom, bottom + cutlass.max(visible.count, 1)), span.first, visible)


@cute.jit
def own_span(ctx: Any, tile: Tile, blocks: Blocks, first: Int32, last: Int32) -> Span:
    """Of the tile's positions, those that some row of `first <= i <= last` sees; at least one."""
    span, whole = visible_span(band_of(ctx, tile), ctx.plan.band, first, last), blocks.span
    if cutlass.const_expr(ctx.mask is not None):
        span = attn_mask.positions(ctx.mask, tile.batch, query_head(ctx, tile), tile.block, span)
    top = cutlass.max(cutlass.min(span.last, whole.last), whole.first + 1)
    return Span(cutlass.min(cutlass.max(span.first, whole.first), top - 1), top)


@cute.jit
def block_at(ctx: Any, blocks: Blocks, position: Int32) -> tuple:
    """The number of the block at a position, and whether the mask changes it."""
    if cutlass.const_expr(ctx.mask is None):
        return position, Boolean(False)
    n, mixed = attn_mask.block_at(blocks.visible, blocks.visible.last - position)
    nothing = blocks.visible.count <= 0
    return blocks.first_key_block if nothing else n, mixed | nothing


@cute.jit
def query_head(ctx: Any, tile: Tile) -> Int32:
    """The tile's first."""
    return tile.key_head * ctx.maps.mQ.shape[0][0] + tile.heads * ctx.plan.pack
