"""Copies of Q, K and V to shared memory by cp.async; every warp has some of the rows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...common.fwd import tiles
from ...common.fwd.tiles import Tile
from ...common.run_copies import Source, Wanted, copy_block, copy_row, lane_of, own_row, rows_at_once
from ...common.smem_layouts import vector_address
from .context import Context

_BYTES = 16
"""Bytes of a vector."""


def load_q(ctx: Context, tile: Tile) -> None:
    """Start to copy the tile's rows of Q; rows after the last one become 0."""
    plan, mQ, stage = ctx.plan, ctx.maps.mQ, ctx.sQ
    group, first, pack = mQ.shape[0][0], tiles.first_query(ctx, tile), plan.pack_gqa
    lane, step = lane_of(stage), plan.warps * rows_at_once(stage)
    start = _address(mQ, ((0, tile.q_offset), 0, tile.kv_head, _batch(ctx, tile)))
    (head_bytes, token_bytes) = (_bytes(mQ, (0, i)) for i in range(2))
    for row in range(0, plan.rows, step):
        own = own_row(stage, ctx.warp) + row
        position, head = first + own // pack, tile.q_head_group * pack + own % pack
        place = start + Int64(position) * token_bytes + Int64(head) * head_bytes + Int64(lane.vector * _BYTES)
        # Of a row that stands for no head nothing is read: -1 is not below Sq.
        known = position if pack == 1 else cutlass.select_(head < group, position, Int32(-1))
        wanted = Wanted(known, tile.Sq, own, Int32(plan.rows))
        copy_row(stage, vector_address(stage, own, lane.vector), place, wanted, plan.features.D)


def load_k(ctx: Context, tile: Tile, n: Int32, i: Int32, count: Int32, stage: Int32) -> None:
    """Start to copy K's block n, the i-th, if there are more than i; keys after the last one become 0."""
    _load(ctx, tile, ctx.maps.mK, ctx.sK[None, None, stage], ctx.plan.features.D, n, i, count)


def load_v(ctx: Context, tile: Tile, n: Int32, i: Int32, count: Int32, stage: Int32) -> None:
    """Start to copy V's block n in the same way."""
    staged, mV = (cute.make_tensor(x.iterator, _swapped(x)) for x in (ctx.sV[None, None, stage], ctx.maps.mV))
    _load(ctx, tile, mV, staged, ctx.plan.features.Dv, n, i, count)


def _load(
    ctx: Context,
    tile: Tile,
    source: cute.Tensor,
    stage: cute.Tensor,
    columns: int,
    n: Int32,
    i: Int32,
    count: Int32,
) -> None:
    """source: (S, D, Hk, B)"""
    pitch = _bytes(source, 0)
    own = own_row(stage, ctx.warp)
    # What does not change from block to block comes first in the sum.
    start = _address(source, (tile.k_offset, 0, tile.kv_head, _batch(ctx, tile)))
    start += Int64(own) * pitch + Int64(lane_of(stage).vector * _BYTES)
    first = n * ctx.plan.keys
    start += Int64(first) * pitch
    wanted = Wanted(Int32(0), cutlass.max(tile.Sk - first, 0), i, count)
    copy_block(stage, ctx.warp, ctx.plan.warps, Source(start, pitch), wanted, columns)


def _swapped(x: cute.Tensor) -> cute.Layout:
    """The layout with its first two modes exchanged."""
    return cute.select(x.layout, [1, 0, *range(2, cute.rank(x))])


def _address(x: cute.Tensor, index: tuple) -> Int64:
    """The address of an element."""
    return Int64(x[(*index[:-1], None)].iterator.toint()) + Int64(index[-1]) * _bytes(x, 3)


def _bytes(x: cute.Tensor, *modes) -> Int64:
    """The stride of a mode in bytes."""
    stride = x.stride
    for mode in modes:
        for i in mode if isinstance(mode, tuple) else (mode,):
            stride = stride[i]
    return Int64(stride) * (x.element_type.width // 8)


def _batch(ctx: Context, tile: Tile) -> Int32:
    """The index along the batch dimension: packed sequences are a batch of one."""
    return Int32(0) if ctx.plan.features.varlen else tile.batch
