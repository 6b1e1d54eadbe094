"""Loads: rows of Q, and keys and values from wherever the block table says that they are."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...configs.decode import KEYS, MMA_ROWS
from ..common import copies
from .context import Context


class Place(NamedTuple):
    """The place in the cache of a lane's key of a block; lanes l and l + 16 have the same one."""

    page: Int32
    row: Int32


@cute.jit
def load_q(ctx: Context) -> None:
    """Start to copy the tile's rows of Q, 16 rows a warp; rows after the last one are 0."""
    plan, tile, q = ctx.plan, ctx.tile, ctx.tensors.q
    if ctx.warp * MMA_ROWS < plan.rows:
        first = tile.first_row + ctx.warp * MMA_ROWS
        row = cutlass.min(first + ctx.lane % MMA_ROWS, tile.num_rows - 1)
        start = _address(q, *ctx.place_of(row))
        rows = Int32(0), tile.num_rows - first
        copies.gather_rows(ctx.sQ, ctx.warp * MMA_ROWS, start, rows, plan.features.D)


@cute.jit
def locate(ctx: Context, n: Int32) -> Place:
    """Look up the lane's key of block n, some time before it is loaded."""
    tile, key = ctx.tile, n * KEYS + ctx.copied_keys + ctx.lane % MMA_ROWS
    if cutlass.const_expr(not ctx.plan.form.paged):
        return Place(tile.batch, key)
    table, page = ctx.tensors.block_table, Int32(0)
    block, row = divmod(key, ctx.divisors.page_size)
    if (tile.keys[0] <= key) & (key < tile.keys[1]):
        page = table[tile.batch, block]
    page = cutlass.max(cutlass.min(page, ctx.tensors.k.shape[0] - 1), 0)
    return Place(page, row)


@cute.jit
def load_block(ctx: Context, n: Int32, place: Place, stage: Int32) -> None:
    """Start to copy block n of K and V; keys that no row sees are 0, whatever the cache has there."""
    load_k(ctx, n, place, stage)
    load_v(ctx, n, place, stage)


@cute.jit
def load_k(ctx: Context, n: Int32, place: Place, stage: Int32) -> None:
    """Start to copy the warp's keys of K's block n."""
    _load(ctx, ctx.tensors.k, ctx.sK[None, None, stage], ctx.plan.features.D, n, place)


@cute.jit
def load_v(ctx: Context, n: Int32, place: Place, stage: Int32) -> None:
    """Start to copy the warp's keys of V's block n."""
    values = ctx.sV[None, None, stage]
    by_key = cute.make_tensor(values.iterator, cute.select(values.layout, [1, 0]))
    _load(ctx, ctx.tensors.v, by_key, ctx.plan.features.Dv, n, place)


@cute.jit
def _load(
    ctx: Context, cache: cute.Tensor, staged: cute.Tensor, columns: cutlass.Constexpr, n: Int32, place: Place
) -> None:
    plan, tile = ctx.plan, ctx.tile
    first = n * KEYS + ctx.copied_keys
    keys = tile.keys[0] - first, tile.keys[1] - first
    start = _address(cache, place.page, place.row, tile.kv_head)
    copies.gather_rows(staged, ctx.copied_keys, start, keys, columns * plan.cache_dtype.width // 16)


def _address(x: cute.Tensor, *place: Int32) -> Int64:
    """Address of the row of `x` at a place, which may be more than 2**31 elements away."""
    offset = Int64(0)
    for i, stride in zip(place, x.stride, strict=False):
        offset += Int64(i) * Int64(stride)
    return Int64(x.iterator.toint()) + offset * (x.element_type.width // 8)
