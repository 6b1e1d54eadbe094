"""dQ of a block: each warp's share is added to the sums in global memory, number by number."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...common import warp_mma, warp_tf32
from ...common.bwd import dq_semaphore, tiles
from ...common.bwd.dq_blocks import THREADS
from ...common.warps import WARP
from .context import Context
from .state import BlockState, TileState, make_sums

_STRIPS = THREADS // WARP
"""Strips of 16 rows in a piece."""
_FLOAT = 4
"""Bytes of a float."""


@cute.jit
def add_dq(ctx: Context, work: TileState, own: BlockState) -> None:
    """dQ += dS K, of which the warp has 16 rows, or some columns of them."""
    plan, block = ctx.plan, _block_index(ctx, own)
    strip, part = ctx.warp % plan.dq_strips, ctx.warp // plan.dq_strips
    if cutlass.const_expr(plan.features.deterministic):
        dQ = _products(ctx, strip, part * plan.dq_columns, plan.dq_columns)
        step = dq_semaphore.step_of(ctx, work.order, own.n, block, True)
        if (ctx.warp == 0) & (ctx.lane == 0):
            dq_semaphore.spin(step.address, step.awaited)
        cute.arch.sync_threads()
        _add(ctx, dQ, block, strip, part * plan.dq_columns)
        cute.arch.sync_threads()
        if (ctx.warp == 0) & (ctx.lane == 0):
            # All pieces at once.
            dq_semaphore.release(step.address, step.count + (plan.config.dq_pieces - 1))
    else:
        each = plan.dq_columns_at_once
        # A loop, so that ptxas does not compute all columns before it adds the first ones.
        for k in cutlass.range(plan.dq_columns // each, unroll=1):
            column = part * plan.dq_columns + k * each
            _add(ctx, _products(ctx, strip, column, each), block, strip, column)


def _products(ctx: Context, strip: Int32, column: Int32, columns: int) -> cute.Tensor:
    """dS K: 16 rows of dQ, and so many columns from one on."""
    plan = ctx.plan
    dQ = make_sums(plan, columns)
    if plan.is_float32:
        dS = warp_tf32.from_rows(warp_tf32.Rows(ctx.sdS, strip * warp_mma.ROWS), ctx.lane)
        keys = warp_tf32.Columns(ctx.sK, column)
        warp_tf32.accumulate(dQ, (), (dS,), keys, ctx.lane, plan.tf32_method)
    else:
        _accumulate(ctx, dQ, strip, column)
    return dQ[0]


@cute.jit
def _accumulate(ctx: Context, dQ: tuple[cute.Tensor, ...], strip: Int32, column: Int32) -> None:
    """Add all keys' products, of 16 bits; those of half of the keys at a time, where ptxas would read all
    operands ahead.
    """
    plan = ctx.plan
    row, each, part = strip * warp_mma.ROWS, plan.part_queries, plan.column_parts[0]
    turns = plan.dq_turns
    for i in cutlass.range(turns, unroll=1):
        first = i * (plan.keys // turns)
        dS = warp_mma.left(ctx.sdS, first, ctx.lane, column=row, part=each, transposed=True)
        keys = warp_mma.right(ctx.sK, first, ctx.lane, column=column, part=part, transposed=True)
        warp_mma.accumulate(dQ, warp_mma.from_smem(dS, 1), keys, plan.keys // turns)


@cute.jit
def _block_index(ctx: Context, own: BlockState) -> Int64:
    """Number of the block in the workspaces."""
    row, count = tiles.row_of_workspace(ctx, own.tile, own.head), ctx.dq_acc.shape[-2]
    return Int64(row) * count + tiles.first_block(ctx, own.tile) + own.n


@cute.jit
def _add(ctx: Context, dQ: cute.Tensor, block: Int64, strip: Int32, column: Int32) -> None:
    """Add the warp's registers, from a column on, in the layout of `dq_blocks`: each to 128 neighbouring
    bytes.
    """
    blocks = ctx.plan.blocks
    band, chunk = strip // _STRIPS, column // 8
    first = (band * (blocks.columns // 8) + chunk) * (4 * THREADS) + strip % _STRIPS * WARP + ctx.lane
    place = (ctx.dq_acc.iterator + (block * blocks.floats + first)).toint()
    for i in cutlass.range_constexpr(cute.size(dQ)):
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.f32 [{{$r0}}+{i * THREADS * _FLOAT}], {{$r1}};",
            read_only_args=[place, dQ[i]],
        )
