"""The end of a tile: normalise O, store O and lse."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common import scores, softmax, warp_mma, warp_tf32
from ...common.fwd import running, tiles
from ...common.fwd.stores import store_lse, store_rows
from ...common.fwd.tiles import Tile
from ...common.rounding import round_to
from .context import Context
from .mainloop import row_pair
from .state import Thread


@cute.jit
def epilogue(ctx: Context, t: Thread, tile: Tile) -> None:
    """Normalise and store O. Every warp stores its rows by itself.

    16-bit numbers go through the memory of Q: the mainloop's last barrier came after the last read of it. Of
    float32 numbers lanes have whole vectors.
    """
    plan = ctx.plan
    first = tiles.first_query(ctx, tile)
    scale = scores.max_scale(ctx.params, plan.features)
    keep_scale = ctx.params.keep_scale if plan.features.dropout else Float32(1.0)
    for m in cutlass.range_constexpr(plan.row_mmas):
        rows = row_pair(ctx, m)
        sinks = tiles.sinks_of(ctx, tile, rows)
        ends = softmax.finalize(t.rows[m], scale, keep_scale, plan.softmax, sinks)
        tiles.hide_empty_split(ctx, tile, ends.lse)
        factors = running.join(ctx, ends, tile, first, rows)
        if cutlass.const_expr(factors is not None):
            # All that share a row have read its lse.
            if cutlass.const_expr(plan.shares_rows):
                cute.arch.sync_threads()
            else:
                cute.arch.sync_warp()
        if ctx.column_warp == 0:
            store_lse(ctx, ends, tile, first, rows, ctx.lane)
        softmax.normalize(warp_mma.rows_of(t.O[m]), ends.inverse, plan.rows_may_be_masked)
        if cutlass.const_expr(plan.is_float32):
            _store_vectors(ctx, t.O[m], factors, tile, first, rows)
        elif cutlass.const_expr(not plan.stages_o):
            running.write_fragment(ctx, warp_mma.rows_of(t.O[m]), factors, tile, first, rows, ctx.lane)
        else:
            _stage(ctx, t.O[m], m)
    if cutlass.const_expr(plan.stages_o):
        if cutlass.const_expr(plan.shares_rows):
            cute.arch.sync_threads()
        else:
            cute.arch.sync_warp()
        tiler = (plan.warp_rows // plan.column_warps, plan.Dv)
        piece = cute.local_tile(ctx.sO[None, None, ctx.row_warp], tiler, (ctx.column_warp, 0))
        store_rows(ctx, piece, tile, first, ctx.warp, ctx.lane)


@cute.jit
def _stage(ctx: Context, O: cute.Tensor, m: cutlass.Constexpr) -> None:
    """Round 16 rows of O, and write them to SMEM."""
    rounded = cute.make_rmem_tensor(O.layout, ctx.plan.dtype)
    round_to(O, rounded)
    tiler = (warp_mma.ROWS, ctx.plan.own_columns)
    target = cute.local_tile(ctx.sO[None, None, ctx.row_warp], tiler, (m, ctx.column_warp))
    warp_mma.store_to_smem(rounded, target, ctx.lane)


@cute.jit
def _store_vectors(
    ctx: Context, O: cute.Tensor, factors: tuple | None, tile: Tile, first: Int32, rows: tuple[Int32, Int32]
) -> None:
    """Store the lane's eight columns of every 32, of both of its rows; see `running.join` for `factors`."""
    plan = ctx.plan
    for half in cutlass.range_constexpr(2):
        i, h = running.place(ctx, tile, first, rows[half])
        if running.has(ctx, tile, i, h):
            target = running.out_row(ctx, tile, i, h)
            place = ctx.lane, ctx.column_warp * plan.own_columns
            factor = None if factors is None else factors[half]
            warp_tf32.store_row(O, half, target, plan.features.Dv, *place, factor)
