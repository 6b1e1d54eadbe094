"""A tile's end: every correction warp normalises its 32 rows of O and stores them, through shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ...common import ring, rounding
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
        _store_box(ctx, own, piece, tile, t)
    else:
        cute.arch.sync_warp()
        _store_rows(ctx, own, piece, tile, t)
        if cutlass.const_expr(plan.config.o_over_q):
            cute.arch.fence_view_async_shared()  # the next Q comes by the copy engine
    if cutlass.const_expr(plan.config.o_over_q):
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        ring.release(ctx.load_q, at)


def _piece(ctx: Context, own: CorrectionThread, t: Int32) -> cute.Tensor:
    """(32, Dv) in shared memory: the warp's rows."""
    layout = ctx.layouts.o
    start = cute.recast_ptr(ctx.sO[None, t].iterator, layout.inner)
    return cute.make_tensor(start, layout.outer)[None, None, own.warp]


def _row(ctx: Context, own: CorrectionThread, t: Int32) -> Int32:
    """Where the thread's row starts in shared memory, what the swizzle adds to it included.

    The swizzle flips bits from the fourth on by those from the seventh on; rows start where the former are 0.
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
    """Some columns of a row, normalised and rounded, 16 bytes at a time."""
    plan = ctx.plan
    for i in cutlass.range_constexpr(0, RESCALED, 2):
        pair = (values[i], values[i + 1])
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(pair, (inverse, inverse))
    if cutlass.const_expr(plan.rows_may_be_masked):
        if hidden:
            for i in cutlass.range_constexpr(RESCALED):
                # Hidden values may be anything, NaN too.
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


@cute.jit
def _store_box(ctx: Context, own: CorrectionThread, piece: cute.Tensor, tile: Tile, t: Int32) -> None:
    """The copy engine leaves out rows beyond the end."""
    plan = ctx.plan
    box_heads, box_positions = plan.store_box
    row = own.warp * WARP
    heads = tile.q_head_group * (plan.pack_gqa // box_heads) + row % plan.pack_gqa // box_heads
    position = (spans.first_query(ctx, tile, t) + row // plan.pack_gqa) // box_positions
    mO = ctx.maps.mO[None, None, tile.kv_head, tile.batch]
    gO = cute.local_tile(mO, (plan.store_box, plan.Dv), ((heads, position), 0))
    s, g = cpasync.tma_partition(
        ctx.maps.store_o, 0, cute.make_layout(1), cute.group_modes(piece, 0, 2), cute.group_modes(gO, 0, 2)
    )
    with cute.arch.elect_one():  # which the DSL does for loads, not for stores
        cute.copy(ctx.maps.store_o, s, g)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _store_rows(ctx: Context, own: CorrectionThread, piece: cute.Tensor, tile: Tile, t: Int32) -> None:
    """16 bytes a lane, rows of the sequence only; packed rows follow those of the sequence before."""
    plan = ctx.plan
    chunks = plan.features.Dv // 8
    group = ctx.maps.mQ.shape[0][0]
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), plan.dtype, num_bits_per_copy=128)
    for e in cutlass.range(cute.arch.lane_idx(), WARP * chunks, WARP, unroll=1):
        own_row, chunk = e // chunks, e % chunks
        row = own.warp * WARP + own_row
        i = spans.first_query(ctx, tile, t) + row // plan.pack_gqa
        h = tile.q_head_group * plan.pack_gqa + row % plan.pack_gqa
        if (i < tile.Sq) & (h < group):
            source = cute.local_tile(piece, (1, 8), (own_row, chunk))
            target = cute.local_tile(
                ctx.out[tile.q_offset + i, tile.kv_head * group + h, None], (8,), (chunk,)
            )
            registers = cute.make_rmem_tensor(8, plan.dtype)
            cute.copy(atom, cute.group_modes(source, 0, 2), registers)
            cute.copy(atom, registers, target)
    cute.arch.sync_warp()
