"""The end of a tile: dK and dV leave, those of 16 bits through the memory of K and V."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common import warp_mma, warp_tf32
from ...common.bwd.stores import store_rows
from ...common.bwd.tiles import Tile
from ...common.rounding import round_to
from ...common.warps import WARP
from .context import Context
from .state import Thread


@cute.jit
def epilogue(ctx: Context, t: Thread, tile: Tile) -> None:
    plan = ctx.plan
    # K and V have been read for the last time.
    cute.arch.sync_threads()
    keep_scale = ctx.params.keep_scale if plan.features.dropout else Float32(1.0)
    if cutlass.const_expr(plan.is_float32):
        for m in cutlass.range_constexpr(plan.key_mmas):
            place = ctx.key_warp * plan.key_mmas + m
            _store_vectors(ctx, t.dV[m], place, keep_scale, ctx.dv, plan.features.Dv, tile)
            _store_vectors(ctx, t.dK[m], place, ctx.params.scale, ctx.dk, plan.features.D, tile)
    else:
        _store_staged(ctx, t, keep_scale, tile)


@cute.jit
def _store_vectors(
    ctx: Context,
    gradient: cute.Tensor,
    place: Int32,
    scale: Float32,
    target: cute.Tensor,
    D: cutlass.Constexpr,
    tile: Tile,
) -> None:
    """Scale a gradient of the place-th 16 keys, and store the lane's eight columns of every 32, of both
    keys.
    """
    plan = ctx.plan
    for i in cutlass.range_constexpr(cute.size(gradient)):
        gradient[i] = gradient[i] * scale
    first_column = ctx.column_warp * (cute.size(gradient) * WARP // warp_mma.ROWS)
    for half in cutlass.range_constexpr(2):
        row = place * warp_mma.ROWS + ctx.lane // warp_mma.LANES + 8 * half
        j = tile.index * plan.keys + row
        if j < tile.Sk:
            own = target
            if cutlass.const_expr(plan.features.varlen):
                own = own[tile.k_offset + j, tile.kv_head, None]
            else:
                own = own[tile.batch, j, tile.kv_head, None]
            warp_tf32.store_row(gradient, half, own, D, ctx.lane, first_column)


@cute.jit
def _store_staged(ctx: Context, t: Thread, keep_scale: Float32, tile: Tile) -> None:
    """Store 16-bit gradients through the memory of K and V."""
    plan = ctx.plan
    for m in cutlass.range_constexpr(plan.key_mmas):
        place = ctx.key_warp * plan.key_mmas + m
        _stage(ctx, t.dV[m], keep_scale, ctx.sV, place)
        _stage(ctx, t.dK[m], ctx.params.scale, ctx.sK, place)
    if cutlass.const_expr(plan.column_warps > 1):
        cute.arch.sync_threads()
    else:
        cute.arch.sync_warp()
    rows = plan.warp_keys // plan.column_warps
    store_rows(ctx, ctx.dv, plan.features.Dv, ctx.sV, tile, ctx.warp, rows, ctx.lane)
    store_rows(ctx, ctx.dk, plan.features.D, ctx.sK, tile, ctx.warp, rows, ctx.lane)


@cute.jit
def _stage(ctx: Context, gradient: cute.Tensor, scale: Float32, stage: cute.Tensor, place: Int32) -> None:
    """Scale and round a gradient of 16 keys, and write it to the place-th 16 rows."""
    for i in cutlass.range_constexpr(cute.size(gradient)):
        gradient[i] = gradient[i] * scale
    rounded = cute.make_rmem_tensor(gradient.layout, ctx.plan.dtype)
    round_to(gradient, rounded)
    row = place * warp_mma.ROWS
    warp_mma.target(stage, row, ctx.lane, share=ctx.column_share).write(rounded, 0)
