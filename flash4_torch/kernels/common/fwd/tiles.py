"""Tiles of query rows: in which order they are fetched, and how the load warp passes them on.

`ctx` is the context of a forward kernel's roles.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from .. import attn_mask, mods, ring, tile_scheduler
from ..band import Band, Span, make_band, visible_span
from ..ring import Cursor, Ring
from ..warps import WARP
from .context import ForwardContext
from .plan import ForwardPlan

WORK_TILE_WORDS = 8
"""Words of a work tile, by which the load warp describes a tile to the other roles."""


def work_tile_words(plan: ForwardPlan) -> int:
    """Words of a work tile, with those for its split where tiles have splits."""
    return WORK_TILE_WORDS + 2 * plan.features.splits


class Tile(NamedTuple):
    """A tile's rows, and whose they are. `index` is -1 where there is no further tile."""

    index: Int32
    """Position of the rows, in tiles."""
    q_head_group: Int32
    """Index of a group of `pack_gqa` query heads, among those of KV head `kv_head`."""
    kv_head: Int32
    batch: Int32
    q_offset: Int32
    """The row at which the sequence begins, packed or in its batch entry; 0 if not varlen."""
    Sq: Int32
    k_offset: Int32
    Sk: Int32
    split: Int32
    """Index of a split of its keys; 0 without splits."""
    is_empty: Int32
    """1 if the tile has fewer blocks than splits, and none for this one; else 0. It is found when the tile is
    fetched: at its end a mask's tables have no registers (ptxas.md, P15)."""


class Shape(NamedTuple):
    """The number of tiles of each kind; in clusters, of pairs of tiles. Each split of a tile is work."""

    tiles_per_head: Uint32
    q_head_groups: Uint32
    kv_heads: Uint32
    num_work: Uint32
    splits: Uint32


@cute.jit
def shape(ctx: ForwardContext) -> Shape:
    (group, _), _, Hk, B = ctx.maps.mQ.shape
    if cutlass.const_expr(ctx.plan.paged):
        B = _count_served(ctx)
    elif cutlass.const_expr(ctx.plan.features.varlen):
        B = ctx.cu_seqlens_q.shape[0] - 1
    blocks = Uint32(cute.ceil_div(ctx.params.max_seqlen, ctx.plan.queries))
    head_blocks = Uint32(cute.ceil_div(group, ctx.plan.pack_gqa))
    splits = Uint32(num_splits(ctx))
    num_work = blocks * head_blocks * Uint32(Hk) * Uint32(B) * splits
    return Shape(blocks, head_blocks, Uint32(Hk), num_work, splits)


def num_splits(ctx: ForwardContext) -> Int32:
    """Splits of every tile."""
    return Int32(ctx.out.shape[0] if ctx.plan.features.splits else 1)


@cute.jit
def decode(ctx: ForwardContext, shape: Shape, work_idx: Uint32, at: Cursor) -> Tile:
    """The tile of a work index.

    Sections of heads follow one another; within one, the last block of rows of every head comes first. With a
    causal mask this block takes longest, so that what is left at the end is short. The second tile of a pair
    takes longer than the first, so the CTAs of a cluster alternate between them.
    """
    step, head = tile_scheduler.decode_work(ctx, shape.tiles_per_head, shape.num_work, work_idx)
    split = Int32(0)
    if cutlass.const_expr(ctx.plan.features.splits):
        of_tile = head // shape.splits
        split, head = Int32(head - of_tile * shape.splits), of_tile
    owner = head // shape.q_head_groups
    batch = owner // shape.kv_heads
    block = Int32(shape.tiles_per_head - 1 - step)
    if cutlass.const_expr(ctx.plan.cluster_size > 1):
        block = block * ctx.plan.cluster_size + (ctx.cta_pair.rank ^ at.phase)
    b = Int32(batch)
    q_offset, k_offset = Int32(0), Int32(0)
    Sq, Sk = ctx.maps.mQ.shape[0][1], ctx.maps.mK.shape[0]
    if cutlass.const_expr(ctx.plan.paged):
        b = _served_sequence(ctx, b)
        q_offset = ctx.cu_seqlens_q[b]
        Sq, Sk = ctx.cu_seqlens_q[b + 1] - q_offset, _keys_in_pages(ctx, b)
    elif cutlass.const_expr(ctx.plan.features.varlen):
        q_offset, k_offset = ctx.cu_seqlens_q[b], ctx.cu_seqlens_k[b]
        Sq, Sk = ctx.cu_seqlens_q[b + 1] - q_offset, ctx.cu_seqlens_k[b + 1] - k_offset
        if cutlass.const_expr(ctx.plan.features.segments):
            rows = ctx.maps.mQ.shape[0][1]
            b = q_offset // rows
            q_offset = k_offset = q_offset - b * rows
    group, kv_head = Int32(head - owner * shape.q_head_groups), Int32(owner - batch * shape.kv_heads)
    tile = Tile(block, group, kv_head, b, q_offset, Sq, k_offset, Sk, split, Int32(0))
    if cutlass.const_expr(not ctx.plan.features.splits):
        return tile
    own = _split_of(_of_all_splits(ctx, tile).span, split, num_splits(ctx))
    return tile._replace(is_empty=Int32(own.is_empty))


@cute.jit
def _served_among(ctx: ForwardContext, first: Int32) -> Int32:
    """A bit for each of 32 sequences from `first` on: whether this launch serves it. Others have no tiles."""
    b, serves = first + cute.arch.lane_idx(), Boolean(False)
    if b < ctx.cu_seqlens_q.shape[0] - 1:
        queries = ctx.cu_seqlens_q[b + 1] - ctx.cu_seqlens_q[b]
        serves = queries >= cutlass.max(ctx.pages.min_seqlen_q, 1)
    return Int32(cute.arch.vote_ballot_sync(serves))


@cute.jit
def _count_served(ctx: ForwardContext) -> Int32:
    count = Int32(0)
    for first in cutlass.range(0, ctx.cu_seqlens_q.shape[0] - 1, WARP, unroll=1):
        count = count + cute.arch.popc(_served_among(ctx, first))
    return count


@cute.jit
def _served_sequence(ctx: ForwardContext, number: Int32) -> Int32:
    """The index of a sequence among all, by its number among those that are served."""
    first, served = Int32(0), _served_among(ctx, Int32(0))
    count = cute.arch.popc(served)
    while number >= count:
        number, first = number - count, first + WARP
        served = _served_among(ctx, first)
        count = cute.arch.popc(served)
    before = cute.arch.popc(served & Int32(cute.arch.lanemask_lt()))
    is_it = (served >> cute.arch.lane_idx() & 1 == 1) & (before == number)
    return first + cute.arch.popc(Int32(cute.arch.vote_ballot_sync(is_it)) - 1)


@cute.jit
def _keys_in_pages(ctx: ForwardContext, batch: Int32) -> Int32:
    """The keys of a sequence, at most those that its row of the table has room for."""
    return cutlass.min(cutlass.max(ctx.pages.seqused_k[batch], 0), ctx.pages.room)


@cute.jit
def write(ctx: ForwardContext, cursor: Cursor, tile: Tile) -> None:
    """Write the work tile, by one lane; the arrival at the stage's barrier makes it visible."""
    words = work_tile_words(ctx.plan)
    work_tile = ctx.work_tile + cursor.stage * words
    for i in cutlass.range_constexpr(words):
        cute.arch.store(work_tile + i, tile[i])


@cute.jit
def write_end(ctx: ForwardContext, cursor: Cursor) -> None:
    """Write, instead of a work tile, that there is none left."""
    cute.arch.store(ctx.work_tile + cursor.stage * work_tile_words(ctx.plan), Int32(-1))


@cute.jit
def read(ctx: ForwardContext, edge: Ring, cursor: Cursor) -> Tile:
    """Read the work tile; waits for whatever else arrives at the edge, too."""
    ring.wait_full(edge, cursor)
    return read_again(ctx, cursor)


@cute.jit
def read_again(ctx: ForwardContext, cursor: Cursor) -> Tile:
    """Read a work tile that is known to be there."""
    count = work_tile_words(ctx.plan)
    work_tile = ctx.work_tile + cursor.stage * count
    words = [cute.arch.make_warp_uniform(cute.arch.load(work_tile + i, Int32)) for i in range(count)]
    if cutlass.const_expr(not ctx.plan.features.varlen):
        words[4:8] = [Int32(0), ctx.maps.mQ.shape[0][1], Int32(0), ctx.maps.mK.shape[0]]
    if cutlass.const_expr(not ctx.plan.features.splits):
        words += [Int32(0), Int32(0)]
    return Tile(*words)


@cute.jit
def band_of(ctx: ForwardContext, tile: Tile) -> Band:
    params = ctx.params
    if cutlass.const_expr(ctx.plan.features.is_stacked):
        stack = ctx.mods.bounds
        band = make_band(stack.rows, stack.columns, params.left, params.right)
        return band._replace(Sk=tile.Sk, stack=stack)
    if cutlass.const_expr(ctx.plan.features.mods.bounds):
        return mods.band_of(ctx.mods, tile.batch, tile.Sk)
    return make_band(tile.Sq, tile.Sk, params.left, params.right)


@cute.jit
def first_query(ctx: ForwardContext, tile: Tile) -> Int32:
    """The first query of the tile, or of its pair, which may have a second tile without rows."""
    return tile.index // ctx.plan.cluster_size * ctx.plan.queries


class Blocks(NamedTuple):
    """The blocks of keys that a tile visits, by position: `span.first <= position < span.last`, at least one.

    Without a mask a block's position is its number; a mask has a list of the blocks that it leaves visible.
    """

    span: Span
    first_key_block: Int32
    visible: attn_mask.BlockList | None = None


@cute.jit
def blocks_of(ctx: ForwardContext, tile: Tile) -> Blocks:
    """The blocks that the load warp loads, and every consumer takes or skips."""
    blocks = _of_all_splits(ctx, tile)
    if cutlass.const_expr(not ctx.plan.features.splits):
        return blocks
    own = _split_of(blocks.span, tile.split, num_splits(ctx)).span
    return Blocks(own, blocks.first_key_block, blocks.visible)


@cute.jit
def _of_all_splits(ctx: ForwardContext, tile: Tile) -> Blocks:
    first = first_query(ctx, tile)
    last = cutlass.min(first + ctx.plan.queries, tile.Sq) - 1
    span = visible_span(band_of(ctx, tile), ctx.plan.band, first, last)
    if cutlass.const_expr(ctx.mask is None):
        return Blocks(span, span.first)
    visible = attn_mask.visible_blocks(
        ctx.mask, tile.batch, query_head(ctx, tile), tile.index, span.first, span.last
    )
    bottom = visible.last + 1 - visible.count
    # If none is visible, one is visited all the same; all of its scores are masked.
    return Blocks(Span(bottom, bottom + cutlass.max(visible.count, 1)), span.first, visible)


class Split(NamedTuple):
    """The blocks of a split. An empty one visits its tile's last block, and has nothing of it."""

    span: Span
    is_empty: Boolean


@cute.jit
def _split_of(whole: Span, split: Int32, splits: Int32) -> Split:
    """The split of a tile's blocks: as many in each, and what is left in the last ones."""
    each = cute.ceil_div(whole.last - whole.first, splits)
    first = whole.first + split * each
    last = cutlass.min(first + each, whole.last)
    return Split(Span(cutlass.min(first, whole.last - 1), last), first >= whole.last)


@cute.jit
def hide_empty_split(ctx: ForwardContext, tile: Tile, lse: cute.Tensor) -> None:
    """Let lse say that nothing was seen."""
    if cutlass.const_expr(ctx.plan.features.splits):
        if tile.is_empty == 1:
            lse.fill(-Float32.inf)


def results_of(ctx: ForwardContext, tile: Tile) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor | None]:
    """out, lse and lse_low of the tile's split."""
    out, lse, low = ctx.out, ctx.lse, ctx.lse_low
    if not ctx.plan.features.splits:
        return out, lse, low
    own = tile.split, *(None,) * (cute.rank(lse) - 1)
    return out[(*own, None)], lse[own], None if low is None else low[own]


@cute.jit
def own_span(ctx: ForwardContext, tile: Tile, blocks: Blocks, first: Int32, last: Int32) -> Span:
    """Those of the tile's positions that some row of `first <= i <= last` sees; at least one."""
    span, whole = visible_span(band_of(ctx, tile), ctx.plan.band, first, last), blocks.span
    if cutlass.const_expr(ctx.mask is not None):
        span = attn_mask.positions(ctx.mask, tile.batch, query_head(ctx, tile), tile.index, span)
    top = cutlass.max(cutlass.min(span.last, whole.last), whole.first + 1)
    return Span(cutlass.min(cutlass.max(span.first, whole.first), top - 1), top)


@cute.jit
def block_at(ctx: ForwardContext, blocks: Blocks, position: Int32) -> tuple:
    """The number of the block at a position, and whether the mask changes it."""
    if cutlass.const_expr(ctx.mask is None):
        return position, Boolean(False)
    n, partial = attn_mask.block_at(blocks.visible, blocks.visible.last - position)
    nothing = blocks.visible.count <= 0
    return blocks.first_key_block if nothing else n, partial | nothing


@cute.jit
def sinks_of(ctx: ForwardContext, tile: Tile, rows: tuple[Int32, ...]) -> tuple[Float32, ...]:
    """The sinks of a tile's rows, by their position in the tile; none if there are no sinks."""
    if cutlass.const_expr(ctx.sinks is None):
        return ()
    group, head = ctx.maps.mQ.shape[0][0], tile.kv_head * ctx.maps.mQ.shape[0][0]
    h = (tile.q_head_group * ctx.plan.pack_gqa + row % ctx.plan.pack_gqa for row in rows)
    own = tuple(ctx.sinks[head + cutlass.min(i, group - 1)].to(Float32) for i in h)
    if cutlass.const_expr(ctx.plan.features.splits):
        # One split counts them.
        own = tuple(cutlass.select_(tile.split == 0, x, -Float32.inf) for x in own)
    return own


@cute.jit
def query_head(ctx: ForwardContext, tile: Tile) -> Int32:
    """The tile's first query head."""
    return tile.kv_head * ctx.maps.mQ.shape[0][0] + tile.q_head_group * ctx.plan.pack_gqa
