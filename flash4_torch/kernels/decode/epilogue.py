"""The end of a split: its rows are finished and stored, as results or for the merge."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...configs.decode import MMA_ROWS
from ..common import scores, softmax
from ..common.attn_mask import vector_at
from ..common.rounding import round_to
from ..common.softmax import Final, Rows
from .context import Context
from .mainloop import Thread, sync_rows, values_of
from .plan import DecodePlan


@cute.jit
def epilogue(ctx: Context, t: Thread) -> None:
    """Store results if the tile has one split, else this split's part of them in float32."""
    final, values = _finalize(ctx, t), values_of(t.O)
    for r in cutlass.range_constexpr(2):
        factor = final.inverse[r]
        if cutlass.const_expr(ctx.plan.is_fp8):
            factor = factor * ctx.tile.v_scale
        for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
            # O of a row that sees nothing may be anything, NaN too.
            product = values[r, c] * factor
            values[r, c] = product if final.inverse[r] != 0.0 else Float32(0.0)
    for r in cutlass.range_constexpr(2):
        row, own = t.rows[r], values[r, None]
        if row < ctx.tile.num_rows:
            if cutlass.const_expr(ctx.plan.form.splits):
                if ctx.tile.num_splits > 1:
                    _store_partial(ctx, own, final.lse[r], row)
                else:
                    _store(ctx, own, final.lse[r], row)
            else:
                _store(ctx, own, final.lse[r], row)


@cute.jit
def _finalize(ctx: Context, t: Thread) -> Final:
    """Sums of all parts of the keys, and what follows from them; sinks come last of all."""
    plan, row_max = ctx.plan, t.parts[0].row_max
    total = cute.make_rmem_tensor(2, Float32)
    lane, row = ctx.lane % 4, ctx.row_warp * MMA_ROWS + ctx.lane // 4
    sums = [[part.row_sum[r] for part in t.parts] for r in range(2)]
    if cutlass.const_expr(plan.key_warps > 1):
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(plan.parts):
                ctx.sSum[lane, row + 8 * r, ctx.key_warp * plan.parts + i] = sums[r][i]
        sync_rows(ctx)
        sums = [[ctx.sSum[lane, row + 8 * r, i] for i in range(4)] for r in range(2)]
    for r in cutlass.range_constexpr(2):
        total[r] = sums[r][0]
        if cutlass.const_expr(len(sums[r]) > 1):
            total[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3])
    scale = scores.softmax_scale(ctx.params, plan.features)
    return softmax.finalize(Rows(row_max, total), scale, Float32(1.0), plan.softmax)


@cute.jit
def _store(ctx: Context, values: cute.Tensor, lse: Float32, row: Int32) -> None:
    """Store the thread's columns of a row, and the row's lse."""
    plan, (token, head) = ctx.plan, ctx.place_of(row)
    share, lse = with_sink(ctx, lse, head)
    rounded = cute.make_rmem_tensor(cute.size(values), plan.dtype)
    for c in cutlass.range_constexpr(cute.size(values)):
        values[c] = values[c] * share
    round_to(_side_by_side(values, plan), rounded)
    start, width = ctx.tensors.out[token, head, None].iterator, _width(plan)
    for j in cutlass.range_constexpr(cute.size(values) // width):
        column = _column(ctx, j)
        if column < plan.features.Dv:
            part = cute.make_tensor(rounded.iterator + width * j, cute.make_layout(width))
            cute.autovec_copy(part, vector_at(start + column, width))
    target = ctx.tensors.lse
    if (ctx.key_warp == 0) & (ctx.lane % 4 == 0):
        target[head, token] = lse


@cute.jit
def _store_partial(ctx: Context, values: cute.Tensor, lse: Float32, row: Int32) -> None:
    plan, split, (token, head) = ctx.plan, ctx.tile.split, ctx.place_of(row)
    start, width = ctx.tensors.partial_out[split, token, head, None].iterator, _width(plan)
    ordered = _side_by_side(values, plan)
    for j in cutlass.range_constexpr(cute.size(values) // width):
        column = _column(ctx, j)
        if column < plan.features.Dv:
            part = cute.make_rmem_tensor(width, Float32)
            for c in cutlass.range_constexpr(width):
                part[c] = ordered[width * j + c]
            cute.autovec_copy(part, vector_at(start + column, width))
    target = ctx.tensors.partial_lse
    if (ctx.key_warp == 0) & (ctx.lane % 4 == 0):
        target[split, head, token] = lse


def _width(plan: DecodePlan) -> int:
    """Columns side by side that a thread has of O; lanes of a row have the next ones."""
    return 4 if plan.is_fp8 else 2


@cute.jit
def _side_by_side(values: cute.Tensor, plan: cutlass.Constexpr) -> cute.Tensor:
    """The thread's columns of a row in their order, where even and odd ones alternate as operands."""
    ordered = values
    if cutlass.const_expr(plan.is_fp8):
        ordered = cute.make_rmem_tensor(cute.size(values), Float32)
        for c in cutlass.range_constexpr(cute.size(values)):
            ordered[c] = values[c // 4 * 4 + (0, 2, 1, 3)[c % 4]]
    return ordered


def _column(ctx: Context, j: int) -> Int32:
    """The column of O that the first of the thread's j-th columns side by side is."""
    plan, width = ctx.plan, _width(ctx.plan)
    strip, inside = divmod(4 * width * j, plan.strip)
    first = (strip * plan.key_warps + ctx.key_warp) * plan.strip
    return first + inside + width * (ctx.lane % 4)


@cute.jit
def with_sink(ctx: Context, lse: Float32, head: Int32) -> tuple[Float32, Float32]:
    """The share of a row's weights that keys have next to its sink, and its lse with it."""
    share = Float32(1.0)
    if cutlass.const_expr(ctx.tensors.sinks is not None):
        share, lse = softmax.join_sink(lse, ctx.tensors.sinks[head].to(Float32))
    return share, lse
