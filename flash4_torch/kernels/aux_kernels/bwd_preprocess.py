"""Statistics of each query row that the backward needs before it starts, and cleared sums of dQ.

A CTA has a block of rows of one head, see `row_stats`, and clears the block's sums of dQ while its loads are
under way.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common import host
from ..common.attn_mask import vector_at
from ..common.bwd import row_stats
from ..common.bwd.query_blocks import QueryBlock, heads_and_blocks, own_block
from ..common.bwd.row_blocks import VECTOR, PreprocessPlan
from ..common.bwd.row_stats import RowInputs
from ..common.warps import WARP

THREADS = row_stats.NUM_WARPS * WARP


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
    None where it does not ask for them. No size is 0. If the plan says `stacked`, B is smaller there, and
    batch entries of the others follow one another in theirs.
    """
    out, dout = host.in_order(heads_first, out, dout)
    if cutlass.const_expr(plan.stacked):
        entries = out.shape[0] // stats.shape[1]
        out, dout = host.stacked(entries, out, dout)
        lse = host.stacked_rows(entries, lse)
        if cutlass.const_expr(plan.dlse):
            dlse = host.stacked_rows(entries, dlse)
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
    inputs = RowInputs(out, dout, lse, lse_low, dlse)
    for i in cutlass.range_constexpr(row_stats.shape_of(plan).parts):
        part = row_stats.load(inputs, own, i, warp, lane, plan)
        if cutlass.const_expr(i == 0 and plan.clears):
            _clear(dq_acc, own, thread, plan)
        row_stats.store(part, inputs, stats, own, lane, plan)
    if cutlass.const_expr(plan.is_ordered):
        flags = dq_semaphore.iterator
        if thread == 0:
            vector_at(flags + own.number, 1)[0] = Int32(0)


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
