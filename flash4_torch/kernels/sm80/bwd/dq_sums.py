"""dQ of a block: each warp's share is added to the sums in global memory, number by number."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...common import warp_mma, warp_tf32
from ...common.bwd import dq_semaphore, tiles
from ...common.warps import WARP
from . import empty
from .context import Context
from .state import BlockState, TileState, make_sums

_FLOAT = 4
"""Bytes of a float."""


@cute.jit
def add_dq(ctx: Context, work: TileState, own: BlockState) -> None:
    """dQ += dS K, of which the warp has some rows, or some columns of them."""
    plan, block = ctx.plan, _block_index(ctx, own)
    row_groups = plan.queries // plan.dq_rows
    strip, share = ctx.warp % row_groups * plan.dq_row_mmas, ctx.warp // row_groups
    each = plan.dq_columns_at_once
    turns = plan.dq_columns // each
    if cutlass.const_expr(plan.features.deterministic):
        dQ = None
        if cutlass.const_expr(turns == 1):
            dQ = _products(ctx, strip, share, Int32(0), each)
        if cutlass.const_expr(plan.overlaps_blocks):
            empty.release(ctx)
        step = dq_semaphore.step_of(ctx, work.order, own.n, block, True)
        if (ctx.warp == 0) & (ctx.lane == 0):
            dq_semaphore.spin(step.address, step.awaited)
        cute.arch.sync_threads()
        if cutlass.const_expr(turns == 1):
            _add_rows(ctx, dQ, block, strip, share, Int32(0))
        else:
            for k in cutlass.range(turns, unroll=1):
                _add_rows(ctx, _products(ctx, strip, share, k, each), block, strip, share, k)
        cute.arch.sync_threads()
        if (ctx.warp == 0) & (ctx.lane == 0):
            # All pieces at once.
            dq_semaphore.release(step.address, step.count + (plan.config.dq_pieces - 1))
    else:
        # A loop, so that ptxas does not compute all columns before it adds the first ones.
        for k in cutlass.range(turns, unroll=1):
            dQ = _products(ctx, strip, share, k, each)
            if cutlass.const_expr(plan.overlaps_blocks):
                # There is one turn. On sm_80 a release waits for what was added before it.
                empty.release(ctx)
            _add_rows(ctx, dQ, block, strip, share, k)


def _products(ctx: Context, strip: Int32, share: Int32, k: Int32, columns: int) -> tuple[cute.Tensor, ...]:
    """dS K: the warp's rows of dQ, and the k-th so many of its columns."""
    plan = ctx.plan
    dQ = make_sums(plan, columns, plan.dq_row_mmas)
    if plan.is_float32:
        dS = warp_tf32.from_rows(warp_tf32.Rows(ctx.sdS, strip * warp_mma.ROWS), ctx.lane)
        keys = warp_tf32.Columns(ctx.sK, share * plan.dq_columns + k * columns)
        warp_tf32.accumulate(dQ, (), (dS,), keys, ctx.lane, plan.tf32_method)
    else:
        _accumulate(ctx, dQ, strip, share, k)
    return dQ


@cute.jit
def _accumulate(ctx: Context, dQ: tuple[cute.Tensor, ...], strip: Int32, share: Int32, k: Int32) -> None:
    """Add all keys' products, of 16 bits; those of half of the keys at a time, where ptxas would read all
    operands ahead.
    """
    plan = ctx.plan
    row, each, turns = strip * warp_mma.ROWS, plan.chunk_queries, plan.dq_turns
    own = warp_mma.Share(share, plan.config.dq_warps)
    dS = warp_mma.left(ctx.sdS, Int32(0), ctx.lane, column=row, part=each, transposed=True)
    keys = warp_mma.right(ctx.sK, Int32(0), ctx.lane, share=own, transposed=True)
    keys = warp_mma.columns_from(keys, k, cute.size(dQ[0]) * WARP // warp_mma.ROWS)
    for i in cutlass.range(turns, unroll=1):
        _add_keys(dQ, dS, keys, i, plan.keys // turns)


def _add_keys(dQ: tuple, dS: warp_mma.Matrix, keys: warp_mma.Matrix, i: Int32, count: int) -> None:
    """Add the products of the i-th so many keys."""
    dS, keys = (x.below(i * count) for x in (dS, keys))
    warp_mma.accumulate(dQ, warp_mma.from_smem(dS, len(dQ)), keys, count)


@cute.jit
def _block_index(ctx: Context, own: BlockState) -> Int64:
    """Number of the block in the workspaces."""
    row, count = tiles.row_of_workspace(ctx, own.tile, own.head), ctx.dq_acc.shape[-2]
    return Int64(row) * count + tiles.first_block(ctx, own.tile) + own.n


def _add_rows(ctx: Context, dQ: tuple, block: Int64, strip: Int32, share: Int32, k: Int32) -> None:
    """Add all of the warp's strips."""
    for m in range(ctx.plan.dq_row_mmas):
        _add(ctx, dQ[m], block, strip + m, share, k)


@cute.jit
def _add(ctx: Context, dQ: cute.Tensor, block: Int64, strip: Int32, share: Int32, k: Int32) -> None:
    """Add the warp's registers, of the k-th of equal ranges of its columns, in the layout of `dq_blocks`:
    each to 128 neighbouring bytes.
    """
    plan, blocks = ctx.plan, ctx.plan.blocks
    # Eights of columns, which have four registers each: those of a chunk, the warp's, and those of dQ.
    of_chunk, own, count = plan.dq_chunk // 8, plan.dq_own // 8, cute.size(dQ) // 4
    step = count if count < own else count // own * of_chunk
    strips, threads = blocks.threads // WARP, blocks.threads  # strips of 16 rows in a piece
    band, eight = strip // strips, share * own + k * step
    first = (band * (blocks.columns // 8) + eight) * (4 * threads) + strip % strips * WARP + ctx.lane
    place = (ctx.dq_acc.iterator + (block * blocks.floats + first)).toint()
    for i in cutlass.range_constexpr(cute.size(dQ)):
        chunk, inside = divmod(i // 4, own)
        register = 4 * (chunk * of_chunk + inside) + i % 4
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.f32 [{{$r0}}+{register * threads * _FLOAT}], {{$r1}};",
            read_only_args=[place, dQ[i]],
        )
