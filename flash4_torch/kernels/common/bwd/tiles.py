"""Tiles of keys, in the backward: in which order they are fetched, and how the load warp passes them on.

`ctx` is the context of a kernel's roles.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from ....configs.types import Scope
from .. import attn_mask, mods, ring, tile_scheduler
from .. import band as bands
from ..band import Band, Span, make_band, transposed, visible_span
from ..ring import Cursor
from .context import BackwardContext

WORK_TILE_WORDS = 8
"""Words of a work tile, by which the load warp describes a tile to the other roles."""
_ESSENTIAL_WORDS = 3
"""Leading words of a work tile that are always needed; the others only with varlen."""


class Tile(NamedTuple):
    """A tile's keys, and whose they are. `index` is -1 where there is no further tile."""

    index: Int32
    """Position of the keys, in tiles."""
    kv_head: Int32
    """KV head; with scope `q_head` the query head, which has a dK and dV of its own: see `kv_head_of`."""
    batch: Int32
    q_offset: Int32
    """The row at which the sequence begins, packed or in its batch entry; 0 if not varlen."""
    Sq: Int32
    k_offset: Int32
    Sk: Int32
    first_block: Int32
    """Segments only: the block of the workspaces at which the sequence begins; else see `first_block`."""


def _num_words(ctx: BackwardContext) -> int:
    """The words of a tile that are written; without varlen those after the essential ones are not read."""
    return len(Tile._fields) - (0 if ctx.plan.features.segments else 1)


class Shape(NamedTuple):
    """The tiles of a head, and all work items; in clusters, pairs of tiles."""

    tiles_per_head: Uint32
    kv_heads: Uint32
    num_work: Uint32
    """Work items; with scope `kv_head`, one for each head."""


@cute.jit
def shape(ctx: BackwardContext) -> Shape:
    _, _, Hk, B = ctx.maps.mQ.shape if ctx.plan.scope == Scope.Q_HEAD else ctx.maps.mK.shape
    if cutlass.const_expr(ctx.plan.features.varlen):
        B = ctx.cu_seqlens_k.shape[0] - 1
    blocks, heads = (
        Uint32(cute.ceil_div(ctx.params.max_seqlen, ctx.plan.cluster_keys)),
        Uint32(Hk) * Uint32(B),
    )
    return Shape(blocks, Uint32(Hk), heads if ctx.plan.scope == Scope.KV_HEAD else blocks * heads)


@cute.jit
def decode(ctx: BackwardContext, shape: Shape, work_idx: Uint32) -> Tile:
    """The tile of a work index.

    Sections of heads follow one another; within one, the first block of keys of every head comes first. With
    a causal mask this block takes longest, so that what is left at the end is short. Where dQ is summed up in
    order, tiles wait only for tiles that were fetched earlier: see `Plan.last_tile_first`.
    """
    step, head = tile_scheduler.decode_work(ctx, shape.tiles_per_head, shape.num_work, work_idx)
    return tile_of(ctx, shape, step, head)


@cute.jit
def tile_of(ctx: BackwardContext, shape: Shape, step: Uint32, head: Uint32) -> Tile:
    """The `step`-th tile to be fetched of a KV head; `head` counts the KV heads of all batch entries."""
    batch = head // shape.kv_heads
    b = Int32(batch)
    q_offset, k_offset, begin = Int32(0), Int32(0), Int32(0)
    Sq, Sk = ctx.maps.mQ.shape[0], ctx.maps.mK.shape[0]
    if cutlass.const_expr(ctx.plan.features.varlen):
        q_offset, k_offset = ctx.cu_seqlens_q[b], ctx.cu_seqlens_k[b]
        Sq, Sk = ctx.cu_seqlens_q[b + 1] - q_offset, ctx.cu_seqlens_k[b + 1] - k_offset
        if cutlass.const_expr(ctx.plan.features.segments):
            begin, rows = q_offset // ctx.plan.queries + b, ctx.maps.mK.shape[0]
            b = q_offset // rows
            q_offset = k_offset = q_offset - b * rows
    block = Int32(step)
    if cutlass.const_expr(ctx.plan.last_tile_first):
        block = Int32(shape.tiles_per_head) - 1 - block
    if cutlass.const_expr(ctx.plan.cluster_size > 1):
        block = block * ctx.plan.cluster_size + ctx.cta_pair.rank
    return Tile(block, Int32(head - batch * shape.kv_heads), b, q_offset, Sq, k_offset, Sk, begin)


@cute.jit
def write(ctx: BackwardContext, at: Cursor, tile: Tile) -> None:
    """Write the work tile, by one lane; the arrival at the stage's barrier makes it visible."""
    work_tile = ctx.work_tile + at.stage * WORK_TILE_WORDS
    for i in cutlass.range_constexpr(_num_words(ctx)):
        cute.arch.store(work_tile + i, tile[i])


@cute.jit
def read(ctx: BackwardContext, at: Cursor) -> Tile:
    """Read the work tile; waits for the tile's K, too."""
    tile = read_by_one_lane(ctx, at)
    num_words = _num_words(ctx) if ctx.plan.features.varlen else _ESSENTIAL_WORDS
    return Tile(*map(cute.arch.make_warp_uniform, tile[:num_words]), *tile[num_words:])


@cute.jit
def read_by_one_lane(ctx: BackwardContext, at: Cursor) -> Tile:
    """`read` by one lane, without the others of its warp."""
    ring.wait_full(ctx.load_k, at)
    work_tile = ctx.work_tile + at.stage * WORK_TILE_WORDS
    words = [cute.arch.load(work_tile + i, Int32) for i in range(_num_words(ctx))]
    if cutlass.const_expr(not ctx.plan.features.varlen):
        words[_ESSENTIAL_WORDS:] = [Int32(0), ctx.maps.mQ.shape[0], Int32(0), ctx.maps.mK.shape[0]]
    if cutlass.const_expr(not ctx.plan.features.segments):
        words.append(Int32(0))
    return Tile(*words)


@cute.jit
def band_of(ctx: BackwardContext, tile: Tile) -> Band:
    """The band of the transposed problem: rows are keys, and they see queries."""
    params = ctx.params
    if cutlass.const_expr(ctx.plan.features.is_stacked):
        stack = ctx.mods.bounds
        band = make_band(stack.columns, stack.rows, params.left, params.right)
        return transposed(band, tile.Sq)._replace(stack=stack)
    if cutlass.const_expr(ctx.plan.features.mods.bounds):
        return mods.band_of(ctx.mods, tile.batch, tile.Sq)
    return transposed(make_band(tile.Sq, tile.Sk, params.left, params.right), tile.Sq)


@cute.jit
def span_of(ctx: BackwardContext, tile: Tile) -> Span:
    """The blocks of rows that the tile, or its pair, visits, of each query head: at least one."""
    first = first_key(ctx, tile)
    last = cutlass.min(first + ctx.plan.cluster_keys, tile.Sk) - 1
    span = visible_span(band_of(ctx, tile), ctx.plan.band, first, last)
    if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
        # The first tile, which rounds and stores dQ, does so for rows that see nothing, too.
        last = span.last
        if cutlass.const_expr(ctx.plan.band.right):
            last = cute.ceil_div(tile.Sq, ctx.plan.queries) if tile.index == 0 else span.last
        return Span(Int32(0) if tile.index == 0 else span.first, last)
    return span


@cute.jit
def full_span(ctx: BackwardContext, tile: Tile, band: Band, span: Span) -> Span:
    """The blocks of the tile's span that neither the band nor the end of Sk makes partial."""
    plan, first = ctx.plan, tile.index * ctx.plan.keys
    start, end = span.first, span.last
    if cutlass.const_expr(plan.band.left):
        lowest = cutlass.max(band.first_key(first + plan.keys - 1), 0)
        start = cutlass.max(start, cute.ceil_div(lowest, plan.queries))
    if cutlass.const_expr(plan.band.right):
        end = cutlass.min(end, bands.full_blocks(band, plan.band, first))
    if cutlass.const_expr(plan.config.ragged_k):
        # Every block of such a tile has to mask the keys beyond the end.
        start = span.last if first + plan.keys > tile.Sk else start
    return Span(start, cutlass.max(start, end))


class DqOrder(NamedTuple):
    """A tile's, or pair's, place in the order of its head's dQ sums, where these have one."""

    number: Int32
    """How many of the sequence's tiles, or pairs, come before it."""
    before: Span
    """Blocks that the tile just before visits; none if there is no such tile."""


@cute.jit
def order_of(ctx: BackwardContext, tile: Tile) -> DqOrder:
    index, cluster_size = tile.index // ctx.plan.cluster_size, ctx.plan.cluster_size
    number, step = index, -1
    if cutlass.const_expr(ctx.plan.last_tile_first):
        number, step = cute.ceil_div(tile.Sk, ctx.plan.cluster_keys) - 1 - index, 1
    before = span_of(ctx, tile._replace(index=tile.index + step * cluster_size))
    return DqOrder(number, Span(before.first, Int32(0) if number == 0 else before.last))


@cute.jit
def write_order(ctx: BackwardContext, at: Cursor, tile: Tile) -> None:
    """Write the dQ order, by the lane that wrote the tile, over words that nobody reads if not varlen."""
    order, work_tile = order_of(ctx, tile), ctx.work_tile + (at.stage * WORK_TILE_WORDS + _ESSENTIAL_WORDS)
    for i, word in enumerate((order.number, *order.before)):
        cute.arch.store(work_tile + i, word)


@cute.jit
def read_order(ctx: BackwardContext, at: Cursor) -> DqOrder:
    """`order_of`, read while the tile's K is held: neither its numbers nor the tile's stay in registers."""
    work_tile = ctx.work_tile + (at.stage * WORK_TILE_WORDS + _ESSENTIAL_WORDS)
    number, first, last = (cute.arch.load(work_tile + i, Int32) for i in range(3))
    return DqOrder(number, Span(first, last))


class Place(NamedTuple):
    """Block n of head h of the group, for tiles that visit a block of all heads before the next block."""

    n: Int32
    h: Int32


@cute.jit
def first_place(ctx: BackwardContext, tile: Tile, span: Span) -> Place:
    """The place where such a tile begins: rows that all tiles of a head see, if a mask bounds their first
    ones.
    """
    return Place(span.last - 1 if _goes_down(ctx, tile) else span.first, Int32(0))


@cute.jit
def last_block(ctx: BackwardContext, tile: Tile, span: Span) -> Int32:
    """The block where such a tile ends."""
    return span.first if _goes_down(ctx, tile) else span.last - 1


@cute.jit
def next_place(ctx: BackwardContext, tile: Tile, place: Place) -> Place:
    h = place.h + 1
    done = h == group(ctx)
    n = place.n - 1 if _goes_down(ctx, tile) else place.n + 1
    return Place(n if done else place.n, Int32(0) if done else h)


def _goes_down(ctx: BackwardContext, tile: Tile) -> Boolean | bool:
    """Whether a tile goes from its last block to its first; `alternates_direction`: every second one does.

    Then a tile begins with the rows and sums that the tile before has used last, which are still in the cache
    where there is no room for all of them.
    """
    return tile.index % 2 == 0 if ctx.plan.alternates_direction else True


class Blocks(NamedTuple):
    """The blocks of one head's rows that a tile visits, by position: at least one.

    Without a mask a block's position is its number; a mask has a list of the blocks that it leaves visible.
    """

    span: Span
    first_block: Int32
    visible: attn_mask.BlockList | None = None


@cute.jit
def blocks_of(ctx: BackwardContext, tile: Tile, span: Span, head: Int32) -> Blocks:
    """The blocks that the load warp loads, and every consumer takes."""
    if cutlass.const_expr(not ctx.plan.lists_blocks):
        return Blocks(span, span.first)
    visible = attn_mask.visible_blocks(
        ctx.mask, tile.batch, head, tile.index // ctx.plan.cluster_size, span.first, span.last
    )
    bottom = visible.last + 1 - visible.count
    # If none is visible, one is visited all the same; all of its scores are masked.
    return Blocks(Span(bottom, bottom + cutlass.max(visible.count, 1)), span.first, visible)


@cute.jit
def is_unseen(ctx: BackwardContext, tile: Tile, span: Span) -> Boolean:
    """Whether a mask hides all of a tile's keys from the queries of its band."""
    seen, heads = Int32(0), group(ctx)
    for h in cutlass.range(cutlass.min(heads, ctx.mask.blocks.shape[1]), unroll=1):
        head, row = tile.kv_head * heads + h, tile.index // ctx.plan.cluster_size
        visible = attn_mask.visible_blocks(ctx.mask, tile.batch, head, row, span.first, span.last)
        seen = seen | visible.count
    return seen == 0


@cute.jit
def block_at(ctx: BackwardContext, blocks: Blocks, position: Int32) -> tuple:
    """The number of the block at a position, and whether the mask changes it."""
    if cutlass.const_expr(not ctx.plan.lists_blocks):
        return position, Boolean(ctx.mask is not None)
    n, partial = attn_mask.block_at(blocks.visible, blocks.visible.last - position)
    nothing = blocks.visible.count <= 0
    return blocks.first_block if nothing else n, partial | nothing


@cute.jit
def count_blocks(ctx: BackwardContext, tile: Tile) -> Int32:
    """The number of blocks that a tile visits, over all heads of the group."""
    span, heads = span_of(ctx, tile), group(ctx)
    count = (span.last - span.first) * heads
    if cutlass.const_expr(ctx.plan.lists_blocks):
        count = Int32(0)
        for h in cutlass.range(heads, unroll=1):
            blocks = blocks_of(ctx, tile, span, tile.kv_head * heads + h)
            count += blocks.span.last - blocks.span.first
    return count


@cute.jit
def first_key(ctx: BackwardContext, tile: Tile) -> Int32:
    """The first key of the tile, or of its pair, which may have a second tile without keys."""
    return tile.index // ctx.plan.cluster_size * ctx.plan.cluster_keys


@cute.jit
def group(ctx: BackwardContext) -> Int32:
    """Query heads of a tile."""
    if cutlass.const_expr(ctx.plan.scope == Scope.Q_HEAD):
        return Int32(1)
    return _group(ctx)


@cute.jit
def kv_head_of(ctx: BackwardContext, tile: Tile) -> Int32:
    """The KV head whose K and V the tile has."""
    if cutlass.const_expr(ctx.plan.scope == Scope.Q_HEAD):
        return tile.kv_head // _group(ctx)
    return tile.kv_head


def _group(ctx: BackwardContext) -> Int32:
    """Query heads of a KV head."""
    return ctx.maps.mQ.shape[2] // ctx.maps.mK.shape[2]


@cute.jit
def first_block(ctx: BackwardContext, tile: Tile) -> Int32:
    """The block of the workspaces at which the sequence's rows begin."""
    if cutlass.const_expr(ctx.plan.features.segments):
        return tile.first_block
    if cutlass.const_expr(ctx.plan.features.varlen):
        return tile.q_offset // ctx.plan.queries + tile.batch
    return Int32(0)


@cute.jit
def row_of_workspace(ctx: BackwardContext, tile: Tile, head: Int32) -> Int32:
    """Row in workspaces (B, Hq, ...), or (Hq, ...) with varlen."""
    if cutlass.const_expr(ctx.plan.features.varlen):
        return head
    return tile.batch * ctx.maps.mQ.shape[2] + head
