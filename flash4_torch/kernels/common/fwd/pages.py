"""Loads of a block of keys from the pages of a cache.

A block comes in boxes of `features.page_box` keys, each of them inside of one page. The load warp looks up
where the boxes are, one lane each, while it still loads the block before.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from .. import copies
from .context import ForwardContext
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
    table, page_size = ctx.pages.block_table, Uint32(ctx.maps.mK.shape[0])
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

    cache: mK (page_size, D, Hk, pages) or mV (Dv, page_size, Hk, pages).
    """
    keys, page_box = cute.size(stage, mode=[key_mode]), ctx.plan.features.page_box
    tile = _in_order(page_box, cute.size(stage, mode=[1 - key_mode]), key_mode)
    page = cutlass.max(cutlass.min(places.page, cache.shape[3] - 1), 0)
    for i in cutlass.range(keys // page_box, unroll=ctx.plan.boxes_at_once):
        own_page, own_box = cute.arch.shuffle_sync(page, i), cute.arch.shuffle_sync(places.box, i)
        source = cute.local_tile(cache[None, None, kv_head, own_page], tile, _in_order(own_box, 0, key_mode))
        target = cute.local_tile(stage, tile, _in_order(i, 0, key_mode))
        copies.copy(atom, source, target, full)


def _in_order(of_keys, of_columns, key_mode: int) -> tuple:
    return (of_keys, of_columns) if key_mode == 0 else (of_columns, of_keys)
