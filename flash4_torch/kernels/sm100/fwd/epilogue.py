"""End of a tile: each correction warp normalises its 32 rows of O and stores them through SMEM."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common import ring, rounding
from ...common.fwd import running
from ...common.fwd.running import VECTOR
from ...common.fwd.stores import store_box, store_rows
from ...common.fwd.tiles import Tile
from ...common.ring import Cursor
from ...common.smem_layouts import chunk_of
from ...common.warps import WARP
from .. import tmem, umma
from ..signal import arrive
from ..umma import UNIT
from . import spans
from .context import Context
from .plan import RESCALED, ROWS
from .state import CorrectionThread


@cute.jit
def epilogue(ctx: Context, own: CorrectionThread, tile: Tile, t: Int32, end_at: Cursor) -> None:
    plan, at = ctx.plan, Cursor(t, end_at.phase)
    ring.wait_full(ctx.inverse, at)
    inverse = ctx.sInverse[own.row, t]
    if cutlass.const_expr(plan.stores_float32):
        _write_running(ctx, own, tile, t, at, inverse)
    else:
        _store(ctx, own, tile, t, at, inverse)


@cute.jit
def _write_running(
    ctx: Context, own: CorrectionThread, tile: Tile, t: Int32, at: Cursor, inverse: Float32
) -> None:
    """Merge the thread's row with the running one, or write it as a split's, past SMEM."""
    plan, factor = ctx.plan, None
    if cutlass.const_expr(ctx.sRunning is not None):
        factor = ctx.sRunning[own.row, t]
    ring.release(ctx.inverse, at)
    i, h = running.place(ctx, tile, spans.first_query(ctx, tile, t), own.row)
    exists = running.has(ctx, tile, i, h)
    ring.wait_full(ctx.o, at)
    tmem.fence_after()
    for column in cutlass.range_constexpr(0, plan.Dv, RESCALED):
        values = cute.make_rmem_tensor(RESCALED, Float32)
        tmem.load(own.lanes + plan.o_columns[0] + t * plan.Dv + column, values)
        tmem.wait_loads()
        for j in cutlass.range_constexpr(RESCALED):
            # Masked values may be anything, also NaN.
            values[j] = values[j] * inverse if inverse != 0.0 else Float32(0.0)
        if exists:
            start = running.out_row(ctx, tile, i, h).iterator + column
            count = min(RESCALED, plan.features.Dv - column) // VECTOR
            running.write_vectors(values, factor, start, count)
    tmem.fence_before()
    arrive(ctx.s_p.empty + t, plan.cluster_size)
    if cutlass.const_expr(plan.config.o_over_q):
        ring.release(ctx.load_q, at)


@cute.jit
def _store(ctx: Context, own: CorrectionThread, tile: Tile, t: Int32, at: Cursor, inverse: Float32) -> None:
    """Round the thread's row, and store it through SMEM."""
    plan = ctx.plan
    ring.release(ctx.inverse, at)
    cute.arch.cp_async_bulk_wait_group(plan.q_tiles - 1, read=True)
    cute.arch.sync_warp()
    piece = _piece(ctx, own, t)
    rows = _row(ctx, own, t)
    hidden = Boolean(False)
    if cutlass.const_expr(plan.rows_may_be_masked):
        hidden = cute.arch.vote_any_sync(inverse == 0.0)
    ring.wait_full(ctx.o, at)
    tmem.fence_after()
    for column in cutlass.range_constexpr(0, plan.Dv, RESCALED):
        values = cute.make_rmem_tensor(RESCALED, Float32)
        tmem.load(own.lanes + plan.o_columns[0] + t * plan.Dv + column, values)
        tmem.wait_loads()
        _stage(ctx, values, inverse, hidden, rows, column)
    tmem.fence_before()
    arrive(ctx.s_p.empty + t, plan.cluster_size)
    if cutlass.const_expr(plan.stores_by_tma):
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        store_box(ctx, piece, tile, spans.first_query(ctx, tile, t), own.warp)
    else:
        cute.arch.sync_warp()
        first = spans.first_query(ctx, tile, t)
        store_rows(ctx, piece, tile, first, own.warp, cute.arch.lane_idx())
        cute.arch.sync_warp()
        if cutlass.const_expr(plan.config.o_over_q):
            cute.arch.fence_view_async_shared()  # the next Q comes by TMA
    if cutlass.const_expr(plan.config.o_over_q):
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        ring.release(ctx.load_q, at)


def _piece(ctx: Context, own: CorrectionThread, t: Int32) -> cute.Tensor:
    """The warp's rows in SMEM, (32, Dv)."""
    layout = ctx.layouts.o
    start = cute.recast_ptr(ctx.sO[None, t].iterator, layout.inner)
    return cute.make_tensor(start, layout.outer)[None, None, own.warp]


def _row(ctx: Context, own: CorrectionThread, t: Int32) -> Int32:
    """SMEM address at which the thread's row starts, including what the swizzle adds to it.

    The swizzle flips the bits from bit 4 on by those from bit 7 on; rows start where the former are 0.
    """
    pitch = umma.BYTES * chunk_of(ctx.plan.Dv)
    lane = cute.arch.lane_idx()
    start = ctx.sO.iterator.toint() + t * _tile_bytes(ctx) + own.warp * (WARP * ctx.plan.Dv * umma.BYTES)
    return start + lane * pitch + ((lane * pitch >> 7 & pitch // UNIT - 1) << 4)


def _tile_bytes(ctx: Context) -> int:
    return ROWS * umma.BYTES * (ctx.plan.D if ctx.plan.config.o_over_q else ctx.plan.Dv)


@cute.jit
def _stage(
    ctx: Context,
    values: cute.Tensor,
    inverse: Float32,
    hidden: Boolean,
    row: Int32,
    column: cutlass.Constexpr,
) -> None:
    """Normalise some columns of a row, round them, and write them to SMEM, 16 bytes at a time."""
    plan = ctx.plan
    for i in cutlass.range_constexpr(0, RESCALED, 2):
        pair = (values[i], values[i + 1])
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(pair, (inverse, inverse))
    if cutlass.const_expr(plan.rows_may_be_masked):
        if hidden:
            for i in cutlass.range_constexpr(RESCALED):
                # Masked values may be anything, also NaN.
                values[i] = values[i] if inverse != 0.0 else Float32(0.0)
    rounded = cute.make_rmem_tensor(RESCALED, plan.dtype)
    rounding.round_to(values, rounded)
    chunk = chunk_of(plan.Dv)
    for i in cutlass.range_constexpr(0, RESCALED, 8):
        number, inside = divmod(column + i, chunk)
        at = (row ^ inside * umma.BYTES) + number * (WARP * chunk * umma.BYTES)
        target = cute.make_ptr(plan.dtype, at, cute.AddressSpace.smem, assumed_align=UNIT)
        source = cute.make_tensor(rounded.iterator + i, cute.make_layout(8))
        cute.autovec_copy(source, cute.make_tensor(target, cute.make_layout(8)))
