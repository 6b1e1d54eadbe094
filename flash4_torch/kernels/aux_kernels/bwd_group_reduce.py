"""dK and dV of KV heads, summed up from those of each query head of a group.

Heads of a group lie side by side, so that a sum takes one vector of each head, D or Dv apart. A thread has
one vector of dK or dV: it loads four of its terms at a time and adds them up in their order.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..common import dependent_launch, host
from ..common.attn_mask import vector_at
from ..common.bwd.row_blocks import GroupReducePlan
from ..common.rounding import round_to, widened

THREADS = 256
VECTOR = 8
"""Elements of a load, 16 bytes."""
DEPTH = 4
"""Loads of a lane in flight."""


@cute.jit
def group_reduce(
    dk_parts: cute.Tensor,
    dv_parts: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    heads_first: Int32,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch dk[..., h, :] = the sum of dk_parts[..., h * group + i, :] over i < group, and dv alike.

    dk_parts (B, Sk, Hq, D), dv_parts (B, Sk, Hq, Dv), dk (B, Sk, Hk, D), dv (B, Sk, Hk, Dv), or packed
    (T, H, D), bases on 16 bytes. The parts are contiguous; of dk and dv the last stride is 1, and the others
    are multiples of 8 elements. If `heads_first` is not 0, dense ones are (B, H, Sk, D), and the parts are
    contiguous with their heads behind positions. group = Hq / Hk. No size is 0.
    """
    dk_parts, dv_parts, dk, dv = host.in_order(heads_first, dk_parts, dv_parts, dk, dv)
    at = cute.rank(dk) - 2
    group = dk_parts.shape[at] // dk.shape[at]
    rows = Int64(1)
    for size in dk.shape[:-1]:
        rows *= size
    blocks = cute.ceil_div(rows * (max(plan.D, plan.Dv) // VECTOR), THREADS)
    group_reduce_kernel(dk_parts, dv_parts, dk, dv, rows, Int32(group), plan).launch(
        grid=(blocks, 2, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=dependent_launch.is_possible()
    )


@cute.kernel
def group_reduce_kernel(
    dk_parts: cute.Tensor,
    dv_parts: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    rows: Int64,
    group: Int32,
    plan: cutlass.Constexpr,
) -> None:
    dependent_launch.wait_for_previous_kernel()
    thread, _, _ = cute.arch.thread_idx()
    block, which, _ = cute.arch.block_idx()
    number = Int64(block) * THREADS + thread
    if which == 0:
        _sum_up(dk_parts, dk, rows, group, number, plan.D)
    else:
        _sum_up(dv_parts, dv, rows, group, number, plan.Dv)


@cute.jit
def _sum_up(
    parts: cute.Tensor, target: cute.Tensor, rows: Int64, group: Int32, number: Int64, D: cutlass.Constexpr
) -> None:
    """Sum up the number-th vector of all rows."""
    dtype, row = target.element_type, number // (D // VECTOR)
    if row < rows:
        # The group's first vector: each row before it has had `group` times as many vectors.
        source = parts.iterator + (number + row * (group - 1) * (D // VECTOR)) * VECTOR
        sums = cute.make_rmem_tensor(VECTOR, Float32)
        sums.fill(0.0)
        for first in cutlass.range(0, group, DEPTH, unroll=1):
            terms = cute.make_rmem_tensor((VECTOR, DEPTH), dtype)
            terms.fill(0.0)
            for i in cutlass.range_constexpr(DEPTH):
                if first + i < group:
                    cute.autovec_copy(vector_at(source + (first + i) * D, VECTOR), terms[None, i])
            for i in cutlass.range_constexpr(DEPTH):
                term = widened(terms[None, i])
                for j in cutlass.range_constexpr(VECTOR):
                    sums[j] = sums[j] + term[j]
        rounded = cute.make_rmem_tensor(VECTOR, dtype)
        round_to(sums, rounded)
        column = number % (D // VECTOR) * VECTOR
        cute.autovec_copy(rounded, vector_at(_row_of(target, row).iterator + column, VECTOR))


def _row_of(target: cute.Tensor, row: Int64) -> cute.Tensor:
    """The row-th one of (B, S, H, D), or of packed (T, H, D), wherever it lies."""
    *_, H, _ = target.shape
    position, head = row // H, row % H
    if cute.rank(target) == 3:
        return target[position, head, None]
    S = target.shape[1]
    return target[position // S, position % S, head, None]


def compile_group_reduce(plan: GroupReducePlan) -> Any:
    """`group_reduce` compiled for any sizes; call it with its arguments except `plan` and `stream`."""
    modes = 2 if plan.varlen else 3
    dk_parts, dv_parts, dk, dv = (
        host.rows(host.NUMERIC[plan.dtype], (*host.any_sizes(modes), D)) for D in (plan.D, plan.Dv) * 2
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = dk_parts, dv_parts, dk, dv
    return cute.compile(group_reduce, *tensors, Int32(0), plan, stream, options="--enable-tvm-ffi")
