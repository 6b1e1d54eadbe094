"""End of a tile: dK and dV leave in 16 bits through the SMEM of their own K and V."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common import ring
from ...common.bwd.stores import store_box, store_rows
from ...common.bwd.tiles import Tile
from ...common.ring import Cursor, Ring
from ...common.rounding import round_to
from ...common.warps import WARP, WARPS
from .. import tmem
from .context import Context
from .plan import NamedBarrier
from .signal import arrive
from .stage import from_column, row_of, write

AT_ONCE = 32
"""Columns that a thread holds at a time."""


class Gradient(NamedTuple):
    """dK or dV: where it is, and where it goes."""

    at: int
    """First TMEM column."""
    scale: Float32
    made: cute.Pointer
    """`made` and `taken` are signals: MMAs have completed it; the warps have read it."""
    taken: cute.Pointer
    edge: Ring
    stage: cute.Tensor
    """Stage of K or V."""
    D: int
    atom: Any
    boxes: cute.Tensor
    rows: cute.Tensor


def dk_of(ctx: Context, at: Cursor) -> Gradient:
    signals, maps, stage = ctx.signals, ctx.maps, ctx.sK[None, None, at.stage]
    made, taken = signals.mma_dk, signals.epilogue_dk
    D, scale = ctx.plan.features.D, ctx.params.scale
    return Gradient(ctx.plan.dk_at, scale, made, taken, ctx.load_k, stage, D, maps.store_dk, maps.mdK, ctx.dk)


def dv_of(ctx: Context, at: Cursor) -> Gradient:
    signals, maps, stage = ctx.signals, ctx.maps, ctx.sV[None, None, at.stage]
    made, taken = signals.mma_dv, signals.epilogue_dv
    D, scale = ctx.plan.features.Dv, ctx.params.keep_scale if ctx.plan.features.dropout else Float32(1.0)
    return Gradient(ctx.plan.dv_at, scale, made, taken, ctx.load_v, stage, D, maps.store_dv, maps.mdV, ctx.dv)


@cute.jit
def store_gradient(
    ctx: Context, warp: Int32, gradient: Gradient, tile: Tile, at: Cursor, phase: Int32
) -> None:
    """Store a gradient by four warps, each its 32 keys. For wide heads two warps have them, one stores."""
    half, warp = warp // WARPS, warp % WARPS
    cute.arch.mbarrier_wait(gradient.made, phase)
    tmem.fence_after()
    _stage(ctx, warp, gradient)
    if cutlass.const_expr(ctx.plan.stores_by_tma):
        cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    if cutlass.const_expr(ctx.plan.wide):
        cute.arch.barrier(barrier_id=NamedBarrier.STAGED + half, number_of_threads=WARPS * WARP)
        if warp < ctx.plan.keys // WARP:
            _store(ctx, warp, gradient, tile)
        cute.arch.barrier(barrier_id=NamedBarrier.STAGED + half, number_of_threads=WARPS * WARP)
    else:
        _store(ctx, warp, gradient, tile)
    if cutlass.const_expr(not ctx.plan.stores_by_tma):
        cute.arch.fence_view_async_shared()  # the next K and V come by TMA
    ring.release(gradient.edge, at)


@cute.jit
def _stage(ctx: Context, warp: Int32, gradient: Gradient) -> None:
    """Scale and round the warp's rows, and write them to SMEM."""
    columns, lane = cute.size(gradient.stage, mode=[1]), warp * WARP + cute.arch.lane_idx()
    source = tmem.own_lanes(Int32(gradient.at), warp)
    row, wide, begin = row_of(gradient.stage, lane % ctx.plan.keys), ctx.plan.wide, Int32(0)
    if cutlass.const_expr(wide):
        columns = columns // 2
        begin = lane // ctx.plan.keys * columns
    for first in cutlass.range_constexpr(0, columns, AT_ONCE):
        width = min(AT_ONCE, columns - first)
        values = cute.make_rmem_tensor(width, Float32)
        tmem.load(source + first, values)
        tmem.wait_loads()
        if cutlass.const_expr(first + AT_ONCE >= columns):
            arrive(ctx, gradient.taken)
        for i in cutlass.range_constexpr(width):
            values[i] = values[i] * gradient.scale
        rounded = cute.make_rmem_tensor(width, ctx.plan.dtype)
        round_to(values, rounded)
        if cutlass.const_expr(wide):
            write(from_column(row, begin + first), 0, rounded)
        else:
            write(row, first, rounded)


@cute.jit
def _store(ctx: Context, warp: Int32, gradient: Gradient, tile: Tile) -> None:
    if cutlass.const_expr(ctx.plan.stores_by_tma):
        store_box(ctx, gradient.atom, gradient.boxes, gradient.stage, tile, warp, WARP)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    else:
        what = gradient.rows, gradient.D, gradient.stage
        store_rows(ctx, *what, tile, warp, WARP, cute.arch.lane_idx())
