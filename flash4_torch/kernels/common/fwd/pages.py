"""Loads of a block of keys from the pages of a cache.

A block comes in boxes of `features.page_box` keys, each of them inside of one page. The load warp looks up
where the boxes are, one lane each, while it still loads the block before. A box takes a copy for each chunk
of columns or, with `plan.whole_rows`, one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from .. import copies
from ..smem_layouts import chunk_of
from .context import ForwardContext
from .launch import HeadStride
from .tiles import Tile


class Places(NamedTuple):
    """Places of the boxes of a block of keys: lane i knows that of box i."""

    page: Int32
    """Number of the page as the table has it, which may be that of no page."""
    box: Int32
    """Number of the box in its page."""


@cute.jit
def look_up(ctx: ForwardContext, tile: Tile, n: Int32) -> Places:
    """Look up block n, some time before it is loaded; of keys that the sequence lacks nothing is read."""
    keys, page_box = ctx.plan.keys, ctx.plan.features.page_box
    table, page_size = ctx.pages.block_table, Uint32(ctx.pages.page_size)
    own_box = cutlass.min(cute.arch.lane_idx(), keys // page_box - 1)
    key, page = n * keys + own_box * page_box, Int32(0)
    block = Int32(Uint32(key) // page_size)
    if (key >= 0) & (key < tile.Sk):
        page = table[tile.batch, block]
    return Places(page, (key - block * Int32(page_size)) // page_box)


@cute.jit
def copy_block(
    ctx: ForwardContext,
    atom,
    cache: cute.Tensor,
    stage: cute.Tensor,
    kv_head: Int32,
    places: Places,
    full: cute.Pointer,
    key_mode: cutlass.Constexpr,
) -> None:
    """Copy a block's boxes to a stage (keys, columns), or (columns, keys) where `key_mode` is 1.

    cache: mK (page_size, D, Hk, pages) or mV (Dv, page_size, Hk, pages), or what `whole_row_map` makes.
    """
    keys, columns = (cute.size(stage, mode=[m]) for m in (key_mode, 1 - key_mode))
    page_box = ctx.plan.features.page_box
    page = cutlass.max(cutlass.min(places.page, cache.shape[cute.rank(cache) - 1] - 1), 0)
    for i in cutlass.range(keys // page_box, unroll=ctx.plan.boxes_at_once):
        own_page, own_box = cute.arch.shuffle_sync(page, i), cute.arch.shuffle_sync(places.box, i)
        if cutlass.const_expr(ctx.plan.whole_rows):
            head = ctx.pages.v_head if cutlass.const_expr(key_mode == 1) else ctx.pages.k_head
            source = _whole_rows(cache, head, kv_head, own_page, own_box, page_box, columns)
            place = stage.iterator + i * (page_box * columns)
            target = cute.make_tensor(place, _box_layout(page_box, columns))
        else:
            tile = _in_order(page_box, columns, key_mode)
            source = cute.local_tile(
                cache[None, None, kv_head, own_page], tile, _in_order(own_box, 0, key_mode)
            )
            target = cute.local_tile(stage, tile, _in_order(i, 0, key_mode))
        copies.copy(atom, source, target, full)


@cute.jit
def _whole_rows(
    cache: cute.Tensor,
    head: HeadStride,
    kv_head: Int32,
    page: Int32,
    box: Int32,
    page_box: cutlass.Constexpr,
    columns: cutlass.Constexpr,
) -> cute.Tensor:
    """A box of a page."""
    chunk = chunk_of(columns)
    rest = kv_head * head.columns
    first = (0, box * (page_box // 8), rest % chunk, kv_head * head.chunks + rest // chunk)
    rows = cute.domain_offset(first, cache[None, None, None, None, page])
    return cute.local_tile(rows, _box_layout(page_box, columns).shape, (0, 0, 0, 0))


def _box_layout(page_box: int, columns: int) -> cute.Layout:
    """(8, groups of 8 keys, columns of a chunk, chunks) of a box in shared memory, before its swizzle."""
    chunk = chunk_of(columns)
    shape, stride = (8, page_box // 8, chunk, columns // chunk), (chunk, 8 * columns, 1, 8 * chunk)
    return cute.make_layout(shape, stride=stride)


def whole_row_map(
    op, cache: cute.Tensor, layout: cute.ComposedLayout, page_box: int, columns: int
) -> tuple[Any, cute.Tensor]:
    """The TMA atom of boxes with all of a head's columns, and the cache as it copies from it.

    cache: (pages, page_size, Hk, D). Result: (8, page_size / 8, columns, chunks, pages), of five dimensions
    as a tensor map has at most: of heads, every one begins at some column of some chunk. layout: a stage's,
    with `whole_rows`.
    """
    pages, page_size, Hk, D = cache.shape
    of_page, of_key, of_head, _ = cache.stride
    chunk = chunk_of(columns)
    chunks = Int32((Int64(Hk - 1) * of_head + D) // chunk + 1)
    view = cute.make_layout(
        (8, page_size // 8, 2 * chunk, chunks, pages), stride=(of_key, of_key * 8, 1, chunk, of_page)
    )
    box = _box_layout(page_box, columns)
    stage = cute.make_composed_layout(layout.inner, 0, box)
    atom, tensor, *_ = cpasync.make_tiled_tma_atom(
        op, cute.make_tensor(cache.iterator, view), stage, box.shape
    )
    return atom, tensor


def _in_order(of_keys, of_columns, key_mode: int) -> tuple:
    return (of_keys, of_columns) if key_mode == 0 else (of_columns, of_keys)
