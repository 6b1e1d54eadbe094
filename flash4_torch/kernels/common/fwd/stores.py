"""Stores of lse, and of O from a warp's rows in shared memory to global memory: by TMA, or row by row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..copies import VECTOR, copy_box, copy_vector
from ..softmax import Final
from ..warps import WARP
from .context import ForwardContext
from .tiles import Tile, results_of


@cute.jit
def store_box(ctx: ForwardContext, piece: cute.Tensor, tile: Tile, first: Int32, warp: Int32) -> None:
    """One TMA store, which leaves out rows beyond the end. `first`: query position of row 0 of the MMA."""
    plan = ctx.plan
    box_heads, box_positions = plan.store_box
    row = warp * plan.warp_rows
    heads = tile.q_head_group * (plan.pack_gqa // box_heads) + row % plan.pack_gqa // box_heads
    position = (first + row // plan.pack_gqa) // box_positions
    mO = ctx.maps.mO[None, None, tile.kv_head, tile.batch]
    gO = cute.local_tile(mO, (plan.store_box, plan.Dv), ((heads, position), 0))
    copy_box(ctx.maps.store_o, piece, gO)


@cute.jit
def store_rows(
    ctx: ForwardContext, piece: cute.Tensor, tile: Tile, first: Int32, warp: Int32, lane: Int32
) -> None:
    """Store 16 bytes a lane, of the sequence's rows only: those of a next packed sequence may follow.

    piece: the warp's rows; all warps have as many. first: query position of row 0 of warp 0.
    """
    plan, rows = ctx.plan, cute.size(piece, mode=[0])
    chunks = plan.features.Dv // VECTOR
    group = ctx.maps.mQ.shape[0][0]
    for e in cutlass.range(lane, rows * chunks, WARP, unroll=1):
        own_row, chunk = e // chunks, e % chunks
        row = warp * rows + own_row
        i = first + row // plan.pack_gqa
        h = tile.q_head_group * plan.pack_gqa + row % plan.pack_gqa
        if (i < tile.Sq) & (h < group):
            target = ctx.out
            if cutlass.const_expr(plan.features.is_packed):
                target = target[tile.q_offset + i, tile.kv_head * group + h, None]
            else:
                target = target[tile.batch, tile.q_offset + i, tile.kv_head * group + h, None]
            copy_vector(piece, own_row, target, chunk)


@cute.jit
def store_lse(
    ctx: ForwardContext, ends: Final, tile: Tile, first: Int32, rows: tuple[Int32, ...], lane: Int32
) -> None:
    """Store the lse of a thread's rows, which `lanes` neighbouring lanes share.

    first: query position of row 0. rows: numbers of the thread's rows, counted from there.
    """
    plan, (_, lse, low) = ctx.plan, results_of(ctx, tile)
    group = ctx.maps.mQ.shape[0][0]
    for r in cutlass.range_constexpr(len(rows)):
        row = rows[r]
        i = first + row // plan.pack_gqa
        h = tile.q_head_group * plan.pack_gqa + row % plan.pack_gqa
        if (lane % plan.softmax.lanes == 0) & (i < tile.Sq) & (h < group):
            head = tile.kv_head * group + h
            if cutlass.const_expr(plan.features.is_packed):
                lse[head, tile.q_offset + i] = ends.lse[r]
                if cutlass.const_expr(low is not None):
                    low[head, tile.q_offset + i] = ends.lse_low[r]
            else:
                lse[tile.batch, head, tile.q_offset + i] = ends.lse[r]
                if cutlass.const_expr(low is not None):
                    low[tile.batch, head, tile.q_offset + i] = ends.lse_low[r]
