"""A tile's end: normalise O, store it and lse."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp

from ...common import ring, scores, softmax
from ...common.fwd.tiles import Tile
from ...common.ring import Cursor
from ...common.rounding import round_to
from ...common.warps import GROUP, WARP
from .. import wgmma
from ..warps import LANES, WARP_ROWS
from .context import Context
from .plan import DONE
from .state import Thread


@cute.jit
def epilogue(ctx: Context, t: Thread, tile: Tile, q_at: Cursor) -> None:
    """Every warp stores its 16 rows by itself, through its own piece of shared memory."""
    plan = ctx.plan
    scale = scores.softmax_scale(ctx.params, plan.features)
    keep_scale = ctx.params.keep_scale if plan.features.dropout else Float32(1.0)
    ends = softmax.finalize(t.rows, scale, keep_scale, plan.softmax)
    inverse = ends.inverse
    _store_lse(ctx, ends, tile, t)

    values = wgmma.rows_of(t.O)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
            values[r, c] = values[r, c] * inverse[r]
            if cutlass.const_expr(plan.rows_may_be_masked):
                # Hidden values may be anything, NaN too.
                values[r, c] = values[r, c] if inverse[r] != 0.0 else Float32(0.0)
    rounded = cute.make_rmem_tensor(t.O.layout, plan.dtype)
    round_to(t.O, rounded)

    own_warp = cute.arch.make_warp_uniform(t.index // WARP)
    if cutlass.const_expr(plan.config.o_over_q):
        cute.arch.barrier(barrier_id=DONE + t.warpgroup, number_of_threads=GROUP)
    else:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
    pieces = _pieces(ctx, t, q_at)
    staged = cute.make_tensor(pieces.iterator, cute.group_modes(cute.select(pieces.layout, [0, 2, 1]), 0, 2))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), plan.dtype)
    copy = cute.make_tiled_copy_C(atom, wgmma.output_mma(plan.dtype, plan.Dv)).get_slice(t.index)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(staged))
    if cutlass.const_expr(plan.stores_by_tma):
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        _store_box(ctx, pieces[None, None, own_warp], tile, t, own_warp)
    else:
        cute.arch.sync_warp()
        _store_rows(ctx, pieces[None, None, own_warp], tile, t, own_warp)
        if cutlass.const_expr(plan.config.o_over_q):
            cute.arch.fence_view_async_shared()  # the next Q comes by the copy engine
        cute.arch.sync_warp()
    if cutlass.const_expr(plan.config.o_over_q):
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        ring.release(ctx.load_q, q_at)


def _pieces(ctx: Context, t: Thread, q_at: Cursor) -> cute.Tensor:
    """(16, Dv, 4) in shared memory: a piece for each warp of the warpgroup."""
    layout = ctx.output_layout
    if ctx.plan.config.o_over_q:
        start = ctx.sQ[None, None, q_at.stage * ctx.plan.warpgroups + t.warpgroup].iterator
    else:
        start = ctx.sO[None, t.warpgroup].iterator
    return cute.make_tensor(cute.recast_ptr(start, layout.inner), layout.outer)


@cute.jit
def _store_lse(ctx: Context, ends: softmax.Final, tile: Tile, t: Thread) -> None:
    plan, lse, low = ctx.plan, ctx.lse, ctx.lse_low
    group = ctx.maps.mQ.shape[0][0]
    for r in cutlass.range_constexpr(2):
        row = t.row + 8 * r
        i = _first_position(ctx, tile, t) + row // plan.pack_gqa
        h = tile.q_head_group * plan.pack_gqa + row % plan.pack_gqa
        if (t.lane % LANES == 0) & (i < tile.Sq) & (h < group):
            head = tile.kv_head * group + h
            if cutlass.const_expr(plan.features.varlen):
                lse[head, tile.q_offset + i] = ends.lse[r]
            else:
                lse[tile.batch, head, i] = ends.lse[r]
                if cutlass.const_expr(low is not None):
                    low[tile.batch, head, i] = ends.lse_low[r]


@cute.jit
def _store_box(ctx: Context, piece: cute.Tensor, tile: Tile, t: Thread, own_warp: Int32) -> None:
    """The copy engine leaves out rows beyond the end."""
    plan = ctx.plan
    box_heads, box_positions = plan.store_box
    row = own_warp * WARP_ROWS
    heads = tile.q_head_group * (plan.pack_gqa // box_heads) + row % plan.pack_gqa // box_heads
    position = (_first_position(ctx, tile, t) + row // plan.pack_gqa) // box_positions
    mO = ctx.maps.mO[None, None, tile.kv_head, tile.batch]
    gO = cute.local_tile(mO, (plan.store_box, plan.Dv), ((heads, position), 0))
    s, g = cpasync.tma_partition(
        ctx.maps.store_o, 0, cute.make_layout(1), cute.group_modes(piece, 0, 2), cute.group_modes(gO, 0, 2)
    )
    with cute.arch.elect_one():  # which the DSL does for loads, not for stores
        cute.copy(ctx.maps.store_o, s, g)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _store_rows(ctx: Context, piece: cute.Tensor, tile: Tile, t: Thread, own_warp: Int32) -> None:
    """16 bytes a lane, rows of the sequence only; packed rows follow those of the sequence before."""
    plan = ctx.plan
    chunks = plan.features.Dv // 8
    group = ctx.maps.mQ.shape[0][0]
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), plan.dtype, num_bits_per_copy=128)
    for e in cutlass.range(t.lane, WARP_ROWS * chunks, WARP, unroll=1):
        own_row, chunk = e // chunks, e % chunks
        row = own_warp * WARP_ROWS + own_row
        i = _first_position(ctx, tile, t) + row // plan.pack_gqa
        h = tile.q_head_group * plan.pack_gqa + row % plan.pack_gqa
        if (i < tile.Sq) & (h < group):
            source = cute.local_tile(piece, (1, 8), (own_row, chunk))
            target = cute.local_tile(
                ctx.out[tile.q_offset + i, tile.kv_head * group + h, None], (8,), (chunk,)
            )
            registers = cute.make_rmem_tensor(8, plan.dtype)
            cute.copy(atom, cute.group_modes(source, 0, 2), registers)
            cute.copy(atom, registers, target)


def _first_position(ctx: Context, tile: Tile, t: Thread) -> Int32:
    return (tile.index * ctx.plan.warpgroups + t.warpgroup) * ctx.plan.tokens
