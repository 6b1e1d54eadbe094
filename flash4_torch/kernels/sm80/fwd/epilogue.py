"""The end of a tile: normalise O, store O and lse."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...common import scores, softmax, warp_mma
from ...common.fwd import tiles
from ...common.fwd.stores import store_lse, store_rows
from ...common.fwd.tiles import Tile
from ...common.rounding import round_to
from .context import Context
from .mainloop import row_pair
from .state import Thread


@cute.jit
def epilogue(ctx: Context, t: Thread, tile: Tile) -> None:
    """Normalise and store O. Every warp stores its rows by itself, through its own piece of SMEM.

    The mainloop's last barrier came after the last read of Q, whose memory that is.
    """
    plan = ctx.plan
    first, piece = tiles.first_query(ctx, tile), ctx.sO[None, None, ctx.warp]
    scale = scores.softmax_scale(ctx.params, plan.features)
    keep_scale = ctx.params.keep_scale if plan.features.dropout else Float32(1.0)
    for m in cutlass.range_constexpr(plan.row_mmas):
        rows = row_pair(ctx, m)
        sinks = tiles.sinks_of(ctx, tile, rows)
        ends = softmax.finalize(t.rows[m], scale, keep_scale, plan.softmax, sinks)
        store_lse(ctx, ends, tile, first, rows, ctx.lane)
        softmax.normalize(warp_mma.rows_of(t.O[m]), ends.inverse, plan.rows_may_be_masked)
        rounded = cute.make_rmem_tensor(t.O[m].layout, plan.dtype)
        round_to(t.O[m], rounded)
        target = cute.local_tile(piece, (warp_mma.ROWS, plan.Dv), (m, 0))
        warp_mma.store_to_smem(rounded, target, ctx.lane)
    cute.arch.sync_warp()
    store_rows(ctx, piece, tile, first, ctx.warp, ctx.lane)
