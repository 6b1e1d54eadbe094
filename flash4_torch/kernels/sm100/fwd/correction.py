"""The correction warps: rescale O where softmax asks for it, store it at a tile's end; 32 rows per warp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...common import ring
from ...common.fwd import tiles
from ...common.role import role
from ...common.warps import GROUP, WARP, WARPS
from .. import tmem
from ..signal import arrive
from . import spans
from .context import Context
from .epilogue import epilogue
from .plan import RESCALED, TILE_STAGES, NamedBarrier
from .spans import Spans
from .state import CorrectionThread


@role(produces=("s_p",), consumes=("tile", "o", "inverse", "load_q"))
@cute.jit
def correction(ctx: Context) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    own = CorrectionThread(thread % GROUP, warp, tmem.own_lanes(Int32(0), warp))
    at, end_at = ring.start(), ring.start()
    for t in cutlass.range_constexpr(ctx.plan.q_tiles):
        arrive(ctx.s_p.empty + t, ctx.plan.cluster_size)
    tile = tiles.read(ctx, ctx.tile, at)
    while tile.index >= 0:
        _rescale_blocks(ctx, own, spans.spans_of(ctx, tile))
        tile = tiles.read(ctx, ctx.tile, at)  # again: few registers in between (ptxas.md, P17)
        for t in cutlass.range(ctx.plan.q_tiles, unroll=1):
            epilogue(ctx, own, tile, t, end_at)
        ring.release(ctx.tile, at)
        at, end_at = ring.after(at, TILE_STAGES), ring.after(end_at, 1)
        tile = tiles.read(ctx, ctx.tile, at)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _rescale_blocks(ctx: Context, own: CorrectionThread, visited: Spans) -> None:
    """Rescale in the order in which MMAs are issued; the first block of a tile needs no rescaling."""
    whole = visited.whole
    for i in cutlass.range(1, whole.last - whole.first, unroll=1):
        position = whole.last - 1 - i
        for t in cutlass.range_constexpr(ctx.plan.q_tiles):
            if spans.visits(ctx, visited.own[t], position):
                if cutlass.const_expr(ctx.plan.spans_differ):
                    if position != visited.own[t].last - 1:
                        _rescale(ctx, own, t)
                else:
                    _rescale(ctx, own, t)


@cute.jit
def _rescale(ctx: Context, own: CorrectionThread, t: cutlass.Constexpr) -> None:
    """Rescale O of a tile. Few blocks need it: only where a row_max has grown by more than 8 in base 2."""
    cute.arch.barrier(barrier_id=NamedBarrier.RESCALE + t * WARPS + own.warp, number_of_threads=2 * WARP)
    factor = ctx.sScale[own.row, t]
    if cute.arch.vote_any_sync(factor < 1.0):
        # S is full, so the last PV is done.
        tmem.fence_after()
        for column in cutlass.range_constexpr(0, ctx.plan.Dv, RESCALED):
            at = own.lanes + ctx.plan.o_columns[t] + column
            values = cute.make_rmem_tensor(RESCALED, Float32)
            tmem.load(at, values)
            tmem.wait_loads()
            for i in cutlass.range_constexpr(0, RESCALED, 2):
                pair = (values[i], values[i + 1])
                values[i], values[i + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))
            tmem.store(at, values)
        tmem.wait_stores()
        tmem.fence_before()
    arrive(ctx.s_p.empty + t, ctx.plan.cluster_size)
