"""Statistics of each query row that the backward needs before it starts, and cleared sums of dQ.

A CTA has a block of rows of one head. A few lanes share a row of O and dO, 16 bytes each at a time, and each
sums up its part of their dot product; meanwhile the CTA clears the block's sums of dQ. The kernel is as fast
as memory if enough loads are in flight: rows are taken together up to `DEPTH` loads a lane.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..common import host
from ..common.attn_mask import vector_at
from ..common.bwd.query_blocks import QueryBlock, heads_and_blocks, own_block
from ..common.bwd.row_blocks import VECTOR, PreprocessPlan
from ..common.scores import LOG2E

WARP = 32
THREADS = 256
WARPS = THREADS // WARP
LOAD = 16
"""Bytes of a load."""
DEPTH = 8
"""Loads of a lane in flight."""


class Shape(NamedTuple):
    """How warps are laid over rows."""

    lanes: int
    """Neighbouring lanes on a row."""
    turns: int
    """Loads of each lane to cover a row."""
    rows: int
    """Rows of a lane in a part."""
    parts: int
    """Parts of a block."""

    def row(self, part: int, r: int, warp: Int32, lane: Int32) -> Int32:
        return ((part * self.rows + r) * WARPS + warp) * (WARP // self.lanes) + lane // self.lanes


def shape_of(plan: PreprocessPlan) -> Shape:
    vectors = plan.Dv // step_of(plan)
    lanes = 4 if vectors <= 4 or vectors % 8 == 4 else 8
    turns = -(-vectors // lanes)
    at_once = WARPS * WARP // lanes
    rows = max(1, min(DEPTH // (2 * turns), plan.blocks.queries // at_once))
    return Shape(lanes, turns, rows, plan.blocks.queries // (at_once * rows))


def step_of(plan: PreprocessPlan) -> int:
    """Elements of a load."""
    return LOAD * 8 // host.NUMERIC[plan.dtype].width


@cute.jit
def preprocess(
    out: cute.Tensor,
    dout: cute.Tensor,
    lse: cute.Tensor,
    lse_low: cute.Tensor | None,
    dlse: cute.Tensor | None,
    stats: cute.Tensor,
    dq_acc: cute.Tensor | None,
    dq_semaphore: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    heads_first: Int32,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch stats[0] = lse in base 2, stats[1] = rowsum(out * dout) - dlse, dq_acc = 0, dq_semaphore = 0.

    With a floating mask also stats[2] = lse, and stats[3] = lse_low in base 2: whatever size the mask has, a
    weight is 2^(log2(e) (score - lse) - lse_low).

    out, dout (B, Sq, Hq, Dv), segments if cu_seqlens_q is there, or packed (T, Hq, Dv); last stride 1, the
    others multiples of 8 elements, bases on 16 bytes. If `heads_first` is not 0, the former are (B, Hq, Sq,
    Dv). lse, lse_low, dlse (B, Hq, Sq) or (Hq, T) float32, contiguous. With n blocks of m rows a head, as
    `row_blocks` lays them out: stats float32 (2 or 4, B, Hq, n * m), dq_acc float32 (B, Hq, n, m * columns),
    dq_semaphore int32 (B, Hq, n); packed and segments: without B. stats is (inf, 0, inf, 0) where no row is,
    and for rows that see nothing; all of it is `negated` where the plan says so. dq_acc and dq_semaphore are
    None where it does not ask for them. No size is 0.
    """
    out, dout = host.in_order(heads_first, out, dout)
    B, Hq, count = heads_and_blocks(out, cu_seqlens_q, plan.blocks)
    preprocess_kernel(out, dout, lse, lse_low, dlse, stats, dq_acc, dq_semaphore, cu_seqlens_q, plan).launch(
        grid=(B * Hq * count, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def preprocess_kernel(
    out: cute.Tensor,
    dout: cute.Tensor,
    lse: cute.Tensor,
    lse_low: cute.Tensor | None,
    dlse: cute.Tensor | None,
    stats: cute.Tensor,
    dq_acc: cute.Tensor | None,
    dq_semaphore: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    plan: cutlass.Constexpr,
) -> None:
    own = own_block(out, cu_seqlens_q, plan.blocks)
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    shape = shape_of(plan)
    base2, delta, *exact = _own_stats(stats, own, plan)
    sign = -1.0 if plan.negated else 1.0

    for part in cutlass.range_constexpr(shape.parts):
        rows = [shape.row(part, r, warp, lane) for r in range(shape.rows)]
        loaded = [_load(x, own, rows, lane % shape.lanes, plan) for x in (out, dout)]
        lses = [lse[_per_row(own, r, plan)] for r in rows]
        dlses = [dlse[_per_row(own, r, plan)] if plan.dlse else Float32(0.0) for r in rows]
        if cutlass.const_expr(part == 0 and plan.clears):
            _clear(dq_acc, own, thread, plan)
        for r in cutlass.range_constexpr(shape.rows):
            total = _product(loaded[0][None, None, r], loaded[1][None, None, r], lane, plan)
            sees = own.has(rows[r]) & (lses[r] != -Float32.inf)
            if lane % shape.lanes == 0:
                nothing = Float32(sign * math.inf)
                base2[rows[r]] = cutlass.select_(sees, lses[r] * (sign * LOG2E), nothing)
                if cutlass.const_expr(plan.large_scores):
                    low = lse_low[_per_row(own, rows[r], plan)]
                    exact[0][rows[r]] = cutlass.select_(sees, sign * lses[r], nothing)
                    exact[1][rows[r]] = cutlass.select_(sees, low * (sign * LOG2E), Float32(0.0))
                delta[rows[r]] = cutlass.select_(sees, _signed(total, dlses[r], plan), Float32(0.0))
    if cutlass.const_expr(plan.is_ordered):
        flags = dq_semaphore.iterator
        if thread == 0:
            vector_at(flags + own.number, 1)[0] = Int32(0)


def _signed(total: Float32, dlse: Float32, plan: PreprocessPlan) -> Float32:
    return dlse - total if plan.negated else total - dlse


def _own_stats(stats: cute.Tensor, own: QueryBlock, plan: PreprocessPlan) -> tuple[cute.Tensor, ...]:
    """The block's numbers, (m,) each: lse in base 2 and delta; with a floating mask also lse and lse_low."""
    each = Int64(1)
    for n in stats.shape[1:]:
        each = each * n
    layout = cute.make_layout(plan.blocks.queries)
    start = own.number * plan.blocks.queries
    return tuple(cute.make_tensor(stats.iterator + (i * each + start), layout) for i in range(plan.stats))


def _per_row(own: QueryBlock, r: Int32, plan: PreprocessPlan) -> tuple:
    row = own.row(r)
    return (own.head, row) if plan.is_packed else (own.batch, own.head, row)


def _load(x: cute.Tensor, own: QueryBlock, rows: list, lane: Int32, plan: PreprocessPlan) -> cute.Tensor:
    """The lane's numbers, (step, turns, rows); in the last turn one with nothing of a row loads its end."""
    shape, step = shape_of(plan), step_of(plan)
    loaded = cute.make_rmem_tensor((step, shape.turns, shape.rows), x.element_type)
    for r, row in enumerate(rows):
        at = (own.row(row), own.head) if plan.is_packed else (own.batch, own.row(row), own.head)
        source = x[(*at, None)].iterator
        for t in range(shape.turns):
            column = cutlass.min((t * shape.lanes + lane) * step, plan.Dv - step)
            cute.autovec_copy(vector_at(source + column, step), loaded[None, t, r])
    return loaded


def _product(o: cute.Tensor, do: cute.Tensor, lane: Int32, plan: PreprocessPlan) -> Float32:
    """The row's rowsum(O * dO), in all of its lanes."""
    shape, step = shape_of(plan), step_of(plan)
    total = Float32(0.0)
    for t in range(shape.turns):
        products = Float32(0.0)
        for i in range(step):
            products = products + o[i, t].to(Float32) * do[i, t].to(Float32)
        if (t + 1) * shape.lanes * step > plan.Dv:
            inside = (t * shape.lanes + lane % shape.lanes) * step < plan.Dv
            products = cutlass.select_(inside, products, Float32(0.0))
        total = total + products
    distance = shape.lanes // 2
    while distance:
        total = total + cute.arch.shuffle_sync_bfly(total, distance)
        distance //= 2
    return total


def _clear(dq_acc: cute.Tensor, own: QueryBlock, thread: Int32, plan: PreprocessPlan) -> None:
    zeros = cute.make_rmem_tensor(VECTOR, Float32)
    zeros.fill(0.0)
    start = dq_acc.iterator + own.number * plan.blocks.floats + thread * VECTOR
    for i in range(plan.blocks.floats // (THREADS * VECTOR)):
        cute.autovec_copy(zeros, vector_at(start + i * THREADS * VECTOR, VECTOR))


def compile_preprocess(plan: PreprocessPlan) -> Any:
    """`preprocess` compiled for any sizes and strides; call it without its arguments `plan` and `stream`."""
    modes, dims = (3 if plan.varlen else 4), (2 if plan.is_packed else 3)
    dtype = host.NUMERIC[plan.dtype]
    rows = [host.rows(dtype, (*host.any_sizes(dims), plan.Dv)) for _ in range(2)]
    lse, lse_low, dlse = (host.compact(Float32, host.any_sizes(dims)) for _ in range(3))
    stats = host.rows(Float32, (plan.stats, *host.any_sizes(modes - 1)))
    dq_acc = host.rows(Float32, host.any_sizes(modes)) if plan.clears else None
    dq_semaphore = host.compact(Int32, host.any_sizes(modes - 1)) if plan.is_ordered else None
    cu_seqlens = host.compact(Int32, host.any_sizes(1)) if plan.varlen else None
    tensors = (
        *rows,
        lse,
        lse_low if plan.large_scores else None,
        dlse if plan.dlse else None,
        stats,
        dq_acc,
        dq_semaphore,
        cu_seqlens,
        Int32(0),
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(preprocess, *tensors, plan, stream, options="--enable-tvm-ffi")
