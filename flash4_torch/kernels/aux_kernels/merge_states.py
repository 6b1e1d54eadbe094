"""Partial results of attention over disjoint keys, merged into the result over all of them.

A thread has 16 bytes of a row: it finds the largest lse of the parts, and then adds up their numbers, each
with its weight, in the order of the parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..common import host
from ..common.attn_mask import vector_at
from ..common.kvcache import MergePlan
from ..common.rounding import round_to, widened
from ..common.scores import LOG2E
from ..common.softmax import LN2, larger

THREADS = 128
DEPTH = 4
"""Loads of a thread in flight."""


class Sums(NamedTuple):
    """What the parts so far add up to, relative to the largest lse."""

    total: cute.Tensor
    """(1,), the sum of weights."""
    values: cute.Tensor
    reference: Float32


@cute.jit
def merge(
    outs: tuple,
    lses: tuple,
    out: cute.Tensor,
    lse: cute.Tensor,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch lse = log(sum of exp(part's lse)) and out = the sum of exp(part's lse - lse) * part.

    outs: tensors (N, B, Sq, Hq, Dv), each with parts of its own; lses, one for each of them: (N, B, Hq, Sq),
    float32, natural logarithm, any strides. out (B, Sq, Hq, Dv) is contiguous; of the parts the last stride
    is 1, the others are multiples of 16 bytes, as are bases. lse (B, Hq, Sq), float32, contiguous. A part
    whose lse is -inf has no weight, whatever it holds; without others out is 0 and lse -inf. If one part has
    all keys, it is the result. B * Sq * Hq is below 2**31, and no size is 0 but N.
    """
    vectors = plan.Dv // _vector_size(out.element_type)
    rows = Int64(out.shape[0]) * out.shape[1] * out.shape[2]
    merge_kernel(outs, lses, out, lse, Int32(rows), plan).launch(
        grid=(cute.ceil_div(rows * vectors, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def _vector_size(numeric: Any) -> int:
    return 128 // numeric.width


@cute.kernel
def merge_kernel(
    outs: tuple,
    lses: tuple,
    out: cute.Tensor,
    lse: cute.Tensor,
    rows: Int32,
    plan: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    size = _vector_size(out.element_type)
    vectors = plan.Dv // size
    number = Int64(block) * THREADS + thread
    row, vector = Int32(number // vectors), Int32(number % vectors)
    if row < rows:
        Hq, Sq = out.shape[2], out.shape[1]
        token, head = row // Hq, row % Hq
        batch, position = token // Sq, token % Sq
        row_max = -Float32.inf
        for part_lses in lses:
            for n in cutlass.range(part_lses.shape[0], unroll=DEPTH):
                row_max = larger(row_max, part_lses[n, batch, head, position])
        reference = Float32(0.0) if row_max == -Float32.inf else row_max
        sums = Sums(cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(size, Float32), reference)
        sums.total[0] = 0.0
        sums.values.fill(0.0)
        for parts, part_lses in zip(outs, lses, strict=True):
            for n in cutlass.range(parts.shape[0], unroll=DEPTH):
                start = parts[n, batch, position, head, None].iterator + vector * size
                _add(sums, start, part_lses[n, batch, head, position], size)
        total = sums.total[0]
        # One part alone has weight 1, whose inverse and logarithm are exact.
        inverse = Float32(1.0) / total
        for i in cutlass.range_constexpr(size):
            product = sums.values[i] * inverse
            sums.values[i] = product if total != 0.0 else Float32(0.0)
        target = vector_at(out[batch, position, head, None].iterator + vector * size, size)
        _store(sums.values, target)
        if vector == 0:
            lse[batch, head, position] = reference + cute.math.log2(total, fastmath=True) * LN2


@cute.jit
def _add(sums: Sums, start: cute.Pointer, lse: Float32, size: cutlass.Constexpr) -> None:
    """Add a part's numbers, unless it has no weight."""
    weight = cute.math.exp2((lse - sums.reference) * LOG2E, fastmath=True)
    sums.total[0] = sums.total[0] + weight
    numbers = cute.make_rmem_tensor(size, start.dtype)
    cute.autovec_copy(vector_at(start, size), numbers)
    wide = numbers
    if cutlass.const_expr(start.dtype is not Float32):
        wide = widened(numbers)
    for i in cutlass.range_constexpr(size):
        x = wide[i] if lse != -Float32.inf else Float32(0.0)
        sums.values[i] = sums.values[i] + weight * x


@cute.jit
def _store(values: cute.Tensor, target: cute.Tensor) -> None:
    if cutlass.const_expr(target.element_type is Float32):
        cute.autovec_copy(values, target)
    else:
        rounded = cute.make_rmem_tensor(cute.size(values), target.element_type)
        round_to(values, rounded)
        cute.autovec_copy(rounded, target)


def compile_merge(plan: MergePlan) -> Any:
    """`merge` compiled for any sizes; call it with its arguments except `plan` and `stream`."""
    dtype = host.NUMERIC[plan.dtype]
    B, Sq, Hq = host.any_sizes(3)
    counts = host.any_sizes(plan.tensors)
    outs = tuple(_parts(dtype, (n, B, Sq, Hq, plan.Dv)) for n in counts)
    lses = tuple(_strided((n, B, Hq, Sq)) for n in counts)
    out, lse = host.compact(dtype, (B, Sq, Hq, plan.Dv)), host.compact(Float32, (B, Hq, Sq))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(merge, outs, lses, out, lse, plan, stream, options="--enable-tvm-ffi")


def _parts(dtype: type, shape: tuple[Any, ...]) -> cute.Tensor:
    stride = (*(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16)


def _strided(shape: tuple[Any, ...]) -> cute.Tensor:
    stride = tuple(cute.sym_int64() for _ in shape)
    return cute.runtime.make_fake_tensor(Float32, shape, stride, assumed_align=4)
