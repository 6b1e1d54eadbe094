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
from ..common.warp_mma import rows_of
from ..common.warps import WARP
from .context import Context
from .mainloop import Thread, sync_rows
from .plan import VECTOR, DecodePlan


@cute.jit
def epilogue(ctx: Context, t: Thread) -> None:
    """Store results if the tile has one split, else keep this split's part of them for the merge: in shared
    memory for the CTA's cluster, or in global memory if there is no cluster.
    """
    lse, values = normalise(ctx, t), rows_of(t.O)
    if cutlass.const_expr(ctx.plan.form.cluster > 1):
        if ctx.tile.merges:
            # Every warp has read the last block, whose place O takes.
            ctx.sync()
            for r in cutlass.range_constexpr(2):
                share(ctx, values[r, None], lse[r], r, 0)
        else:
            _store_rows(ctx, t, values, lse)
    elif cutlass.const_expr(ctx.plan.shares_keys):
        if ctx.tile.merges:
            for r in cutlass.range_constexpr(2):
                if t.rows[r] < ctx.tile.num_rows:
                    store_parts(ctx, values[r, None], lse[r], r, t.rows[r], ctx.tile.split, Int32(0))
        else:
            _store_rows(ctx, t, values, lse)
    else:
        _store_rows(ctx, t, values, lse)


@cute.jit
def normalise(ctx: Context, t: Thread) -> cute.Tensor:
    """Finish the rows of O, and return their lse (2,)."""
    final, values = _finalize(ctx, t), rows_of(t.O)
    for r in cutlass.range_constexpr(2):
        factor = final.inverse[r]
        if cutlass.const_expr(ctx.plan.is_fp8):
            factor = factor * ctx.tile.v_scale
        for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
            # O of a row that sees nothing may be anything, NaN too.
            product = values[r, c] * factor
            values[r, c] = product if final.inverse[r] != 0.0 else Float32(0.0)
    return final.lse


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
def _store_rows(ctx: Context, t: Thread, values: cute.Tensor, lse: cute.Tensor) -> None:
    for r in cutlass.range_constexpr(2):
        if t.rows[r] < ctx.tile.num_rows:
            store_row(ctx, values[r, None], lse[r], t.rows[r])


@cute.jit
def store_row(ctx: Context, values: cute.Tensor, lse: Float32, row: Int32) -> None:
    """Store the thread's columns of a row, and the row's lse."""
    token, head = ctx.place_of(row)
    share, lse = with_sink(ctx, lse, head)
    for c in cutlass.range_constexpr(cute.size(values)):
        values[c] = values[c] * share
    ordered, width = ordered_row(values, ctx.plan), _width(ctx.plan)
    for j in cutlass.range_constexpr(cute.size(values) // width):
        store_columns(ctx, ordered, j, width * j, token, head)
    target = ctx.tensors.lse
    if (ctx.key_warp == 0) & (ctx.lane % 4 == 0):
        target[head, token] = lse


@cute.jit
def store_columns(
    ctx: Context, values: cute.Tensor, j: Int32, first: cutlass.Constexpr, token: Int32, head: Int32
) -> None:
    """Store the thread's j-th columns side by side of a row, which are those of `values` from `first` on."""
    plan, width, column = ctx.plan, _width(ctx.plan), _column(ctx, j)
    if column < plan.features.Dv:
        own, rounded = cute.make_rmem_tensor(width, Float32), cute.make_rmem_tensor(width, plan.dtype)
        for c in cutlass.range_constexpr(width):
            own[c] = values[first + c]
        round_to(own, rounded)
        cute.autovec_copy(rounded, vector_at(ctx.tensors.out[token, head, None].iterator + column, width))


@cute.jit
def store_vector(ctx: Context, values: cute.Tensor, m: Int32, token: Int32, head: Int32) -> None:
    """Store the thread's m-th vector of a row."""
    width = _width(ctx.plan)
    for i in cutlass.range_constexpr(VECTOR // width):
        store_columns(ctx, values, m * (VECTOR // width) + i, width * i, token, head)


@cute.jit
def share(ctx: Context, values: cute.Tensor, lse: Float32, r: cutlass.Constexpr, slot: int | Int32) -> None:
    """Keep the thread's columns of its row r of a split for the CTA's cluster, and the row's lse."""
    ordered, kept = ordered_row(values, ctx.plan), ctx.kept(ctx.warp * WARP + ctx.lane, slot)
    for m in cutlass.range_constexpr(cute.size(values) // VECTOR):
        vector = cute.make_rmem_tensor(VECTOR, Float32)
        for c in cutlass.range_constexpr(VECTOR):
            vector[c] = ordered[VECTOR * m + c]
        cute.autovec_copy(vector, kept[None, 2 * m + r])
    sLse = ctx.sLse
    if (ctx.key_warp == 0) & (ctx.lane % 4 == 0):
        sLse[slot * ctx.plan.rows + ctx.row_warp * MMA_ROWS + 8 * r + ctx.lane // 4] = lse


@cute.jit
def store_parts(
    ctx: Context,
    values: cute.Tensor,
    lse: Float32,
    r: cutlass.Constexpr,
    row: Int32,
    part: Int32,
    rank: Int32,
) -> None:
    """Store the thread's columns of its row r as parts. rank: the one that merges them, if several do."""
    ordered = ordered_row(values, ctx.plan)
    for m in cutlass.range_constexpr(cute.size(values) // VECTOR):
        vector = cute.make_rmem_tensor(VECTOR, Float32)
        for c in cutlass.range_constexpr(VECTOR):
            vector[c] = ordered[VECTOR * m + c]
        store_part(ctx, lse, vector, row, Int32(2 * m + r), part, rank)


@cute.jit
def store_part(
    ctx: Context, lse: Float32, values: cute.Tensor, row: Int32, number: Int32, part: Int32, rank: Int32
) -> None:
    """Store a part of a vector. In a cluster all vectors of a rank are of one row, else they are of two."""
    token, head = ctx.place_of(row)
    cute.autovec_copy(values, part_place(ctx, part, token, head, number))
    target, is_first = ctx.tensors.partial_lse, number < max(ctx.plan.form.cluster, 2)
    if is_first & (ctx.key_warp == 0) & (ctx.lane % 4 == 0):
        target[part, rank, head, token] = lse


def part_place(ctx: Context, part: Int32, token: Int32, head: Int32, number: Int32) -> cute.Tensor:
    """The place of a vector among the parts: of a row, lanes and warps follow one another."""
    lanes = 4 * ctx.plan.key_warps
    vector = number // 2 * lanes + ctx.key_warp * 4 + ctx.lane % 4
    return vector_at(ctx.tensors.partial_out[part, token, head, None].iterator + vector * VECTOR, VECTOR)


def _width(plan: DecodePlan) -> int:
    """Columns side by side that a thread has of O; lanes of a row have the next ones."""
    return 4 if plan.is_fp8 else 2


@cute.jit
def ordered_row(values: cute.Tensor, plan: cutlass.Constexpr) -> cute.Tensor:
    """The thread's columns of a row in their order, where even and odd ones alternate as operands."""
    ordered = values
    if cutlass.const_expr(plan.is_fp8):
        ordered = cute.make_rmem_tensor(cute.size(values), Float32)
        for c in cutlass.range_constexpr(cute.size(values)):
            ordered[c] = values[c // 4 * 4 + (0, 2, 1, 3)[c % 4]]
    return ordered


def _column(ctx: Context, j: Int32) -> Int32:
    """The column of O that the first of the thread's j-th columns side by side is."""
    plan, width = ctx.plan, _width(ctx.plan)
    strip, inside = 4 * width * j // plan.strip, 4 * width * j % plan.strip
    first = (strip * plan.key_warps + ctx.key_warp) * plan.strip
    return first + inside + width * (ctx.lane % 4)


@cute.jit
def with_sink(ctx: Context, lse: Float32, head: Int32) -> tuple[Float32, Float32]:
    """The share of a row's weights that keys have next to its sink, and its lse with it."""
    share = Float32(1.0)
    if cutlass.const_expr(ctx.tensors.sinks is not None):
        share, lse = softmax.join_sink(lse, ctx.tensors.sinks[head].to(Float32))
    return share, lse
