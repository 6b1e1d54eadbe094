"""Gradients of the sinks, from the statistics of the query rows that the preprocess kernel has written.

A CTA has one query head. Its threads go through the head's rows in all batch entries, side by side, and their
sums are added up in an order that depends on nothing but the number of rows.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ..common import dependent_launch, host
from ..common.bwd.row_blocks import SinksPlan
from ..common.scores import LOG2E

WARP = 32
THREADS = 512
WARPS = THREADS // WARP
DEPTH = 4
"""Rows of a thread in flight."""


@cute.jit
def sinks_gradient(
    stats: cute.Tensor,
    sinks: cute.Tensor,
    dsinks: cute.Tensor,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch dsinks[h] = -sum over the rows of 2^(log2(e) sinks[h] - stats[0]) stats[1].

    stats (2 or 4, B, Hq, rows), packed (2, Hq, rows), float32: lse in base 2 and delta, as the preprocess
    kernel leaves them, also where no row is. sinks and dsinks (Hq,); all of them contiguous.
    """
    sinks_kernel(stats, sinks, dsinks, plan).launch(
        grid=(sinks.shape[0], 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        use_pdl=dependent_launch.is_possible(),
    )


@cute.kernel
def sinks_kernel(
    stats: cute.Tensor, sinks: cute.Tensor, dsinks: cute.Tensor, plan: cutlass.Constexpr
) -> None:
    dependent_launch.wait_for_previous_kernel()
    thread, _, _ = cute.arch.thread_idx()
    head, _, _ = cute.arch.block_idx()
    sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
    sink, total = sinks[head].to(Float32) * LOG2E, Float32(0.0)
    batch = Int32(1) if cutlass.const_expr(plan.varlen) else stats.shape[1]
    for b in cutlass.range(batch, unroll=1):
        if cutlass.const_expr(plan.varlen):
            lse, delta = stats[0, head, None], stats[1, head, None]
        else:
            lse, delta = stats[0, b, head, None], stats[1, b, head, None]
        for row in cutlass.range(thread, lse.shape[0], THREADS, unroll=DEPTH):
            total = total + _term(sink, lse[row], delta[row], plan)
    for step in cutlass.range_constexpr(5):
        total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
    if thread % WARP == 0:
        sums[thread // WARP] = total
    cute.arch.sync_threads()
    if thread == 0:
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(WARPS):
            total = total + sums[warp]
        dsinks[head] = (-total).to(dsinks.element_type)


def _term(sink: Float32, lse: Float32, delta: Float32, plan: SinksPlan) -> Float32:
    if plan.negated:
        lse, delta = -lse, -delta
    return cute.math.exp2(sink - lse, fastmath=True) * delta


def compile_sinks_gradient(plan: SinksPlan) -> Any:
    """`sinks_gradient` compiled for any sizes; call it with its arguments except `plan` and `stream`."""
    stats = host.compact(Float32, host.any_sizes(3 if plan.varlen else 4))
    sinks, dsinks = (host.compact(host.NUMERIC[plan.dtype], host.any_sizes(1)) for _ in range(2))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(sinks_gradient, stats, sinks, dsinks, plan, stream, options="--enable-tvm-ffi")
