"""Copies of Q, K and V to shared memory by cp.async; every warp has some of the rows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...common.fwd import tiles
from ...common.fwd.tiles import Tile
from ...common.run_copies import Wanted, copy_row, lane_of, own_row, rows_at_once
from ...common.smem_layouts import vector_address
from ..rows import BYTES, Sequence, Visit, address, load_block, load_parts, stride_bytes, swapped
from .context import Context


def load_q(ctx: Context, tile: Tile) -> None:
    """Start to copy the tile's rows of Q; rows after the last one become 0."""
    plan, mQ, stage = ctx.plan, ctx.maps.mQ, ctx.sQ
    group, first, pack = mQ.shape[0][0], tiles.first_query(ctx, tile), plan.pack_gqa
    lane, step = lane_of(stage), plan.warps * rows_at_once(stage)
    start = address(mQ, ((0, tile.q_offset), 0, tile.kv_head, _batch(ctx, tile)))
    (head_bytes, token_bytes) = (stride_bytes(mQ, (0, i)) for i in range(2))
    for row in range(0, plan.rows, step):
        own = own_row(stage, ctx.warp) + row
        position, head = first + own // pack, tile.q_head_group * pack + own % pack
        place = start + Int64(position) * token_bytes + Int64(head) * head_bytes + Int64(lane.vector * BYTES)
        # Of a row that stands for no head nothing is read: -1 is not below Sq.
        known = position if pack == 1 else cutlass.select_(head < group, position, Int32(-1))
        wanted = Wanted(known, tile.Sq, own, Int32(plan.rows))
        copy_row(stage, vector_address(stage, own, lane.vector), place, wanted, plan.halves(plan.features.D))


def load_k(ctx: Context, tile: Tile, n: Int32, i: Int32, count: Int32, stage: Int32) -> None:
    """Start to copy K's block n, the i-th, if there are more than i; keys after the last one become 0."""
    plan, keys = ctx.plan, _keys(ctx, tile, ctx.maps.mK)
    D = plan.halves(plan.features.D)
    load_block(keys, n, ctx.sK[None, None, stage], D, ctx.warp, plan.warps, Visit(i, count))


def load_v(ctx: Context, tile: Tile, n: Int32, i: Int32, count: Int32, stage: Int32) -> None:
    """Start to copy V's block n in the same way."""
    plan, values = ctx.plan, _keys(ctx, tile, swapped(ctx.maps.mV))
    staged = swapped(ctx.sV[None, None, stage])
    Dv = plan.halves(plan.features.Dv)
    parts = 1 if plan.is_float32 else plan.column_warps
    load_parts(values, n, staged, Dv, parts, ctx.warp, plan.warps, Visit(i, count))


def _keys(ctx: Context, tile: Tile, rows: cute.Tensor) -> Sequence:
    where = tile.k_offset, tile.Sk, tile.kv_head, _batch(ctx, tile)
    # ptxas has registers to spare for one MMA of rows, but not for two.
    return Sequence(rows, *where, reads_stride_anew=ctx.plan.row_mmas > 1 and not ctx.plan.is_float32)


def _batch(ctx: Context, tile: Tile) -> Int32:
    """The index along the batch dimension: packed sequences are a batch of one."""
    return Int32(0) if ctx.plan.features.varlen else tile.batch
