"""Stores of dK and dV, from a warp's rows in shared memory to global memory: by TMA, or row by row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..copies import VECTOR, copy_box, copy_vector
from ..warps import WARP
from .context import BackwardContext
from .tiles import Tile


@cute.jit
def store_box(
    ctx: BackwardContext,
    atom,
    target: cute.Tensor,
    stage: cute.Tensor,
    tile: Tile,
    warp: Int32,
    rows: cutlass.Constexpr,
    **more,
) -> None:
    """One TMA store of a warp's `rows` keys; TMA leaves out rows beyond the end."""
    box = (rows, cute.size(stage, mode=[1]))
    place = tile.index * (ctx.plan.keys // rows) + warp
    own = cute.local_tile(target[None, None, tile.kv_head, tile.batch], box, (place, 0))
    copy_box(atom, cute.local_tile(stage, box, (warp, 0)), own, **more)


@cute.jit
def store_rows(
    ctx: BackwardContext,
    target: cute.Tensor,
    D: cutlass.Constexpr,
    stage: cute.Tensor,
    tile: Tile,
    warp: Int32,
    rows: cutlass.Constexpr,
    lane: Int32,
) -> None:
    """Store 16 bytes a lane, of the sequence's rows only: those of the next sequence follow."""
    chunks, first = D // VECTOR, warp * rows
    for e in cutlass.range(lane, rows * chunks, WARP, unroll=1):
        row, chunk = first + e // chunks, e % chunks
        j = tile.index * ctx.plan.keys + row
        if j < tile.Sk:
            own = target
            if cutlass.const_expr(ctx.plan.features.is_packed):
                own = own[tile.k_offset + j, tile.kv_head, None]
            else:
                own = own[tile.batch, tile.k_offset + j, tile.kv_head, None]
            copy_vector(stage, row, own, chunk)
