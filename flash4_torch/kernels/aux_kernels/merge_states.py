"""Partial results of attention over disjoint keys, merged into the result over all of them.

A thread has 16 bytes of a row: it finds the largest lse of the parts, and then adds up their numbers, each
with its weight, in the order of the parts. Where many parts have few rows, several threads divide the parts,
and add up what each has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..common import dependent_launch, host
from ..common.attn_mask import vector_at
from ..common.kvcache import MergePlan
from ..common.rounding import round_to, widened
from ..common.scores import LOG2E
from ..common.sequences import TokenPlaces, sequence_of
from ..common.softmax import LN2, larger, sum_and_error
from ..common.warps import WARP

THREADS = 128
DEPTH = 4
"""Parts that a thread loads at a time."""


class Sequences(NamedTuple):
    """The rows of packed sequences."""

    cu_seqlens: cute.Tensor
    """(B + 1,) int32, contiguous"""
    min_seqlen: Int32
    """Shorter sequences are left alone."""


class Lse(NamedTuple):
    """lse of each row, and what rounding took from it, or None."""

    lse: cute.Tensor
    low: cute.Tensor | None


class Row(NamedTuple):
    """A row of the result."""

    is_there: Boolean
    place: tuple[Int32, ...]
    """Its indices in out: batch, unless packed, position and head."""
    lse_place: tuple[Int32, ...]


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
    lse_lows: tuple | None,
    out: cute.Tensor,
    lse: cute.Tensor,
    lse_low: cute.Tensor | None,
    sequences: Sequences | None,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch lse = log(sum of exp(part's lse)) and out = the sum of exp(part's lse - lse) * part.

    outs: tensors (N, B, Sq, Hq, Dv), each with parts of its own; lses, one for each of them: (N, B, Hq, Sq),
    float32, natural logarithm, any strides; lse_lows, only with `plan.has_low`: their rounding errors. Of out
    (B, Sq, Hq, Dv) and the parts the last stride is 1, the others are multiples of 16 bytes, as are bases.
    lse (B, Hq, Sq), float32, contiguous, as is lse_low. A part whose lse is -inf has no weight, whatever it
    holds; without others out is 0 and lse -inf. If one part has all keys, it is the result. B * Sq * Hq is
    below 2**31, and no size is 0 but N.

    With `plan.varlen` dimensions B and Sq are one, T: the rows of `sequences`.
    """
    threads = plan.Dv // _vector_size(out.element_type) * plan.lanes
    if cutlass.const_expr(plan.varlen):
        tokens, rows = out.shape[0], Int64(out.shape[1])
    else:
        tokens, rows = Int32(1), Int64(out.shape[0]) * out.shape[1] * out.shape[2]
    blocks = cute.ceil_div(rows * threads, THREADS)
    grid = (tokens, blocks, 1) if plan.varlen else (blocks, 1, 1)
    kernel = merge_kernel(outs, lses, lse_lows, out, Lse(lse, lse_low), sequences, Int32(rows), plan)
    kernel.launch(grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=dependent_launch.is_possible())


def _vector_size(numeric: Any) -> int:
    return 128 // numeric.width


@cute.kernel
def merge_kernel(
    outs: tuple,
    lses: tuple,
    lse_lows: tuple | None,
    out: cute.Tensor,
    lse: Lse,
    sequences: Sequences | None,
    rows: Int32,
    plan: cutlass.Constexpr,
) -> None:
    dependent_launch.wait_for_previous_kernel()
    thread, _, _ = cute.arch.thread_idx()
    block, block_of_token, _ = cute.arch.block_idx()
    token = block
    if cutlass.const_expr(plan.varlen):
        block = block_of_token
    vectors = plan.Dv // _vector_size(out.element_type)
    # Neighbouring threads have neighbouring vectors; the lanes of a vector are in one warp.
    each = WARP // plan.lanes
    number = Int64(block * (THREADS // WARP) + thread // WARP) * each + thread % each
    index, vector = Int32(number // vectors), Int32(number % vectors)
    if cutlass.const_expr(plan.varlen):
        row = Row((index < rows) & _is_served(sequences, token), (token, index), (index, token))
    else:
        row = _row_of_batch(out, index, rows)
    lows = (None,) * len(lses) if lse_lows is None else lse_lows
    parts = tuple(Lse(*pair) for pair in zip(lses, lows, strict=True))
    _merge_vector(outs, parts, out, lse, row, vector, thread % WARP // each, plan.lanes)


def _row_of_batch(out: cute.Tensor, index: Int32, rows: Int32) -> Row:
    """Row `index` of all; there are `rows`."""
    Sq, Hq = out.shape[1], out.shape[2]
    token, head = index // Hq, index % Hq
    batch, position = token // Sq, token % Sq
    return Row(index < rows, (batch, position, head), (batch, head, position))


@cute.jit
def _is_served(sequences: Sequences, token: Int32) -> Boolean:
    """Whether the token is one of a sequence that is not left alone; all lanes have the same."""
    cu_seqlens = sequences.cu_seqlens
    b = sequence_of(token, cu_seqlens, TokenPlaces())
    start, end = cu_seqlens[b], cu_seqlens[b + 1]
    return (start <= token) & (token < end) & (end - start >= sequences.min_seqlen)


@cute.jit
def _merge_vector(
    outs: Sequence[cute.Tensor],
    lses: Sequence[Lse],
    out: cute.Tensor,
    lse: Lse,
    row: Row,
    vector: Int32,
    lane: Int32,
    lanes: cutlass.Constexpr,
) -> None:
    """Merge 16 bytes of the result; each lane has the parts from `lane` on, in steps of `lanes`."""
    size = _vector_size(out.element_type)
    row_max = -Float32.inf
    for part in lses:
        end = part.lse.shape[0] if row.is_there else Int32(0)
        for n in cutlass.range(lane, end, lanes, unroll=DEPTH):
            row_max = larger(row_max, part.lse[(n, *row.lse_place)])
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        row_max = larger(row_max, cute.arch.shuffle_sync_bfly(row_max, WARP // lanes << step))
    reference = Float32(0.0) if row_max == -Float32.inf else row_max
    sums = Sums(cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(size, Float32), reference)
    sums.total[0] = 0.0
    sums.values.fill(0.0)
    for parts, part in zip(outs, lses, strict=True):
        end = parts.shape[0] if row.is_there else Int32(0)
        for n in cutlass.range(lane, end, lanes, unroll=DEPTH):
            start = parts[(n, *row.place, None)].iterator + vector * size
            low = None
            if cutlass.const_expr(part.low is not None):
                low = part.low[(n, *row.lse_place)]
            _add(sums, start, part.lse[(n, *row.lse_place)], low, size)
    for x in (sums.total, sums.values):
        for i in cutlass.range_constexpr(cute.size(x)):
            for step in cutlass.range_constexpr(lanes.bit_length() - 1):
                x[i] = x[i] + cute.arch.shuffle_sync_bfly(x[i], WARP // lanes << step)
    if row.is_there & (lane == 0):
        total = sums.total[0]
        # One part alone has weight 1, whose inverse and logarithm are exact.
        inverse = Float32(1.0) / total
        for i in cutlass.range_constexpr(size):
            product = sums.values[i] * inverse
            sums.values[i] = product if total != 0.0 else Float32(0.0)
        _store(sums.values, vector_at(out[(*row.place, None)].iterator + vector * size, size))
        if vector == 0:
            rest = cute.math.log2(total, fastmath=True) * LN2
            if cutlass.const_expr(lse.low is None):
                lse.lse[row.lse_place] = reference + rest
            else:
                joined, low = sum_and_error(reference, rest)
                lse.lse[row.lse_place] = joined
                lse.low[row.lse_place] = low if total != 0.0 else Float32(0.0)


@cute.jit
def _add(sums: Sums, start: cute.Pointer, lse: Float32, low: Float32 | None, size: cutlass.Constexpr) -> None:
    """Add a part's numbers, unless it has no weight."""
    above = lse - sums.reference
    if cutlass.const_expr(low is not None):
        above = above + low
    weight = cute.math.exp2(above * LOG2E, fastmath=True)
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
    dtype, out_dtype = host.NUMERIC[plan.dtype], host.NUMERIC[plan.out_dtype or plan.dtype]
    *sizes, Hq = host.any_sizes(2 if plan.varlen else 3)
    of_lse = (*sizes[:-1], Hq, sizes[-1])
    counts = host.any_sizes(plan.tensors)
    outs = tuple(_rows(dtype, (n, *sizes, Hq, plan.Dv)) for n in counts)
    lses = tuple(_strided((n, *of_lse)) for n in counts)
    out, lse = _rows(out_dtype, (*sizes, Hq, plan.Dv)), host.compact(Float32, of_lse)
    lows, low = None, None
    if plan.has_low:
        lows, low = tuple(_strided((n, *of_lse)) for n in counts), host.compact(Float32, of_lse)
    sequences = None
    if plan.varlen:
        sequences = Sequences(host.compact(Int32, host.any_sizes(1)), Int32(0))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = (outs, lses, lows, out, lse, low, sequences)
    return cute.compile(merge, *tensors, plan, stream, options="--enable-tvm-ffi")


def _rows(dtype: type, shape: tuple[Any, ...]) -> cute.Tensor:
    stride = (*(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16)


def _strided(shape: tuple[Any, ...]) -> cute.Tensor:
    stride = tuple(cute.sym_int64() for _ in shape)
    return cute.runtime.make_fake_tensor(Float32, shape, stride, assumed_align=4)
