"""The end of a tile: normalise O, store O and lse."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ...common import ring, scores, softmax
from ...common.fwd import running
from ...common.fwd.stores import store_box, store_lse, store_rows
from ...common.fwd.tiles import Tile, hide_empty_split, sinks_of
from ...common.ring import Cursor
from ...common.rounding import round_to
from ...common.warps import GROUP, WARP
from .. import wgmma
from .context import Context
from .plan import NamedBarrier
from .state import Thread


@cute.jit
def epilogue(ctx: Context, t: Thread, tile: Tile, q_at: Cursor) -> None:
    """Normalise and store O and lse. Every warp stores its 16 rows by itself."""
    plan = ctx.plan
    scale = scores.max_scale(ctx.params, plan.features)
    keep_scale = ctx.params.keep_scale if plan.features.dropout else Float32(1.0)
    sinks = sinks_of(ctx, tile, (t.row, t.row + 8))
    ends = softmax.finalize(t.rows, scale, keep_scale, plan.softmax, sinks)
    hide_empty_split(ctx, tile, ends.lse)
    if cutlass.const_expr(plan.stores_float32):
        _write_running(ctx, t, ends, tile, q_at)
    else:
        _store(ctx, t, ends, tile, q_at)


@cute.jit
def _write_running(ctx: Context, t: Thread, ends: softmax.Final, tile: Tile, q_at: Cursor) -> None:
    """Merge with running results, or write those of a split, past SMEM."""
    plan, first, rows = ctx.plan, _first_position(ctx, tile, t), (t.row, t.row + 8)
    factors = running.join(ctx, ends, tile, first, rows)
    if cutlass.const_expr(factors is not None):
        cute.arch.sync_warp()
    store_lse(ctx, ends, tile, first, rows, t.lane)
    O = wgmma.rows_of(t.O)
    softmax.normalize(O, ends.inverse, plan.rows_may_be_masked)
    running.write_fragment(ctx, O, factors, tile, first, rows, t.lane)
    if cutlass.const_expr(plan.config.o_over_q):
        ring.release(ctx.load_q, q_at)


@cute.jit
def _store(ctx: Context, t: Thread, ends: softmax.Final, tile: Tile, q_at: Cursor) -> None:
    """Round O, and store it through the warp's own piece of SMEM."""
    plan = ctx.plan
    store_lse(ctx, ends, tile, _first_position(ctx, tile, t), (t.row, t.row + 8), t.lane)
    softmax.normalize(wgmma.rows_of(t.O), ends.inverse, plan.rows_may_be_masked)
    rounded = cute.make_rmem_tensor(t.O.layout, plan.dtype)
    round_to(t.O, rounded)

    own_warp = cute.arch.make_warp_uniform(t.index // WARP)
    if cutlass.const_expr(plan.config.o_over_q):
        cute.arch.barrier(barrier_id=NamedBarrier.Q_READ + t.warpgroup, number_of_threads=GROUP)
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
        store_box(ctx, pieces[None, None, own_warp], tile, _first_position(ctx, tile, t), own_warp)
    else:
        cute.arch.sync_warp()
        first = _first_position(ctx, tile, t)
        store_rows(ctx, pieces[None, None, own_warp], tile, first, own_warp, t.lane)
        if cutlass.const_expr(plan.config.o_over_q):
            cute.arch.fence_view_async_shared()  # the next Q arrives by TMA
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


def _first_position(ctx: Context, tile: Tile, t: Thread) -> Int32:
    return (tile.index * ctx.plan.warpgroups + t.warpgroup) * ctx.plan.tokens
