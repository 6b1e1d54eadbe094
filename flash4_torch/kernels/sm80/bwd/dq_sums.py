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
    plan = ctx.plan
    dQ = make_sums(plan, plan.dq_columns)
    strip, part = ctx.warp % plan.dq_strips, ctx.warp // plan.dq_strips
    if cutlass.const_expr(plan.is_float32):
        dS = warp_tf32.from_rows(warp_tf32.Rows(ctx.sdS, strip * warp_mma.ROWS), ctx.lane)
        keys = warp_tf32.Columns(ctx.sK, part * plan.dq_columns)
        warp_tf32.accumulate(dQ, (), (dS,), keys, ctx.lane, plan.tf32_method)
    else:
        dS = warp_mma.left(
            ctx.sdS,
            Int32(0),
            ctx.lane,
            column=strip * warp_mma.ROWS,
            part=plan.own_queries,
            transposed=True,
        )
        column = part * plan.dq_columns
        keys = warp_mma.right(
            ctx.sK, Int32(0), ctx.lane, column=column, part=plan.column_parts[0], transposed=True
        )
        warp_mma.accumulate(dQ, warp_mma.from_smem(dS, 1), keys, plan.keys)
    block = _block_index(ctx, own)
    if cutlass.const_expr(plan.features.deterministic):
        step = dq_semaphore.step_of(ctx, work.order, own.n, block, True)
        if (ctx.warp == 0) & (ctx.lane == 0):
            dq_semaphore.spin(step.address, step.awaited)
        cute.arch.sync_threads()
        _add(ctx, dQ[0], block, strip, part)
        cute.arch.sync_threads()
        if (ctx.warp == 0) & (ctx.lane == 0):
            # All pieces at once.
            dq_semaphore.release(step.address, step.count + (plan.config.dq_pieces - 1))
    else:
        _add(ctx, dQ[0], block, strip, part)


@cute.jit
def _block_index(ctx: Context, own: BlockState) -> Int64:
    """Number of the block in the workspaces."""
    row, count = tiles.row_of_workspace(ctx, own.tile, own.head), ctx.dq_acc.shape[-2]
    return Int64(row) * count + tiles.first_block(ctx, own.tile) + own.n


@cute.jit
def _add(ctx: Context, dQ: cute.Tensor, block: Int64, strip: Int32, part: Int32) -> None:
    """Add the warp's registers, in the layout of `dq_blocks`: each to 128 neighbouring bytes."""
    blocks = ctx.plan.blocks
    band, chunk = strip // _STRIPS, part * (ctx.plan.dq_columns // 8)
    first = (band * (blocks.columns // 8) + chunk) * (4 * THREADS) + strip % _STRIPS * WARP + ctx.lane
    place = (ctx.dq_acc.iterator + (block * blocks.floats + first)).toint()
    for i in cutlass.range_constexpr(cute.size(dQ)):
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.f32 [{{$r0}}+{i * THREADS * _FLOAT}], {{$r1}};",
            read_only_args=[place, dQ[i]],
        )
