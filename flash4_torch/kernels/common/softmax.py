"""Online softmax over a thread's fragments of scores, in base 2.

With `scale` = softmax scale * log2(e), a row's attention weights are 2^(scale * (score - max)). `max` is the
maximum of the scores seen so far, so sums and the accumulated output are only multiplied when it moves. Any
reference in its place gives the same quotient, hence `lazy_rescale`: the maximum stays as it is until weights
would exceed 2^8, which costs no accuracy and leaves out nearly all multiplications.

A NaN among a row's scores becomes its maximum, and +inf makes NaN of the row: a row that attends to a
poisoned key is poisoned, whichever columns take the polynomial.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass._mlir.dialects import nvvm

from .exponent import Exponent

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)
CHAINS = 4
"""Independent chains of a row's maximum and sum: a single chain would wait for its own results."""
RESCALE_THRESHOLD_LOG2 = 8.0
"""log2 of how far a row may outgrow its reference before it is rescaled."""


class Method(NamedTuple):
    """The static part of a softmax."""

    lanes: int
    """Neighbouring lanes that share a row, a power of two."""
    may_be_fully_masked: bool = False
    """Whether all of a row's scores may be -inf."""
    lazy_rescale: bool = False
    exponent: Exponent = Exponent()
    packed: bool = False
    """Whether maxima are of three numbers, and weights come by `exp2_packed`, two to an instruction: from
    sm_100a on."""
    subtracts_max_first: bool = False
    """Whether the maximum is subtracted before scores are scaled: for scores so large that scaling rounds
    away what makes them differ, as with a floating mask."""


class Rows(NamedTuple):
    """The running state of a thread's rows, each (R,) float32 registers; sums are this thread's part only."""

    row_max: cute.Tensor
    row_sum: cute.Tensor


def make_rows(count: int) -> Rows:
    return Rows(cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32))


def reset(rows: Rows) -> None:
    """Nothing seen yet: the first block may then be treated as a further one."""
    rows.row_max.fill(-Float32.inf)
    rows.row_sum.fill(0.0)


class NextBlock(NamedTuple):
    """How a further block enters a softmax, each (R,)."""

    factors: cute.Tensor
    """Factors for what has been accumulated before it."""
    offsets: cute.Tensor
    """Numbers subtracted from its scores: in base 2, or with `subtracts_max_first` in the scores' own
    units."""


class MaxUpdate(NamedTuple):
    """How a block raises the references of rows, each (R,)."""

    delta_log2: cute.Tensor
    """The reference before the block minus the one from the block on, in base 2."""
    offsets: cute.Tensor
    """Numbers subtracted from its scores: in base 2, or with `subtracts_max_first` in the scores' own
    units."""


# Where a ramp is added to scores, `bases` (R,) have to be added to a thread's rows of a block, in base 2,
# after scaling. Maxima of rows are scaled ones then, in base 2.


@cute.jit
def first_block(
    scores: cute.Tensor, rows: Rows, scale: Float32, method: cutlass.Constexpr, bases: tuple = ()
) -> None:
    """Turn the first block's `scores` (R, C) into weights, in place."""
    max_scale = _max_scale(scale, bases)
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        row_max = _across(_own_max(scores, r, scale, method, bases), method.lanes)
        rows.row_max[r] = row_max
        offset = _without_base(_offset(_reference(row_max, method), max_scale, method), r, bases)
        rows.row_sum[r] = _exp2_row(scores, r, offset, scale, method, 0, cute.size(scores, mode=[1]))


@cute.jit
def next_block(
    scores: cute.Tensor, rows: Rows, scale: Float32, method: cutlass.Constexpr, bases: tuple = ()
) -> NextBlock:
    """Update the maxima for a further block and rescale the sums; its weights follow by `exp2_columns`."""
    update = update_max(scores, rows, scale, method, bases)
    return NextBlock(rescale_row_sum(rows, update), update.offsets)


@cute.jit
def update_max(
    scores: cute.Tensor, rows: Rows, scale: Float32, method: cutlass.Constexpr, bases: tuple = ()
) -> MaxUpdate:
    """Update the maxima for a block. If it is a further one, `rescale_row_sum` has to follow."""
    return raise_max(block_max(scores, scale, method, bases), rows, scale, method, bases)


@cute.jit
def block_max(
    scores: cute.Tensor, scale: Float32, method: cutlass.Constexpr, bases: tuple = ()
) -> cute.Tensor:
    """The maxima (R,) of a block's rows, or of the part of them that the row's lanes have."""
    maxima = cute.make_rmem_tensor(cute.size(scores, mode=[0]), Float32)
    for r in cutlass.range_constexpr(cute.size(maxima)):
        maxima[r] = _across(_own_max(scores, r, scale, method, bases), method.lanes)
    return maxima


@cute.jit
def raise_max(
    maxima: cute.Tensor, rows: Rows, scale: Float32, method: cutlass.Constexpr, bases: tuple = ()
) -> MaxUpdate:
    """`update_max` for a block whose maxima (R,) are known."""
    update = _make_update(cute.size(maxima))
    for r in cutlass.range_constexpr(cute.size(maxima)):
        _raise_max(rows, r, maxima[r], _max_scale(scale, bases), update, method)
        update.offsets[r] = _without_base(update.offsets[r], r, bases)
    return update


def _max_scale(scale: Float32, bases: tuple) -> Float32:
    return Float32(1.0) if bases else scale


def _own_max(scores: cute.Tensor, r: int, scale: Float32, method: Method, bases: tuple) -> Float32:
    """The maximum of a thread's scores of row r."""
    found = _maximum(scores, r, method)
    return found * scale + bases[r] if bases else found


def _without_base(offset: Float32, r: int, bases: tuple) -> Float32:
    return offset - bases[r] if bases else offset


def _make_update(count: int) -> MaxUpdate:
    return MaxUpdate(cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32))


@cute.jit
def normalize(accumulator: cute.Tensor, inverse: cute.Tensor, may_be_masked: cutlass.Constexpr) -> None:
    """Multiply the rows of `accumulator` (R, C) by `inverse` (R,).

    may_be_masked: rows may see nothing. Their O may be anything, NaN too, and becomes 0.
    """
    for r in cutlass.range_constexpr(cute.size(accumulator, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(accumulator, mode=[1])):
            accumulator[r, c] = accumulator[r, c] * inverse[r]
            if cutlass.const_expr(may_be_masked):
                accumulator[r, c] = accumulator[r, c] if inverse[r] != 0.0 else Float32(0.0)


@cute.jit
def _raise_max(
    rows: Rows,
    r: cutlass.Constexpr,
    row_max: Float32,
    scale: Float32,
    update: MaxUpdate,
    method: cutlass.Constexpr,
) -> None:
    """Update the reference of row r by a block's maximum."""
    before = rows.row_max[r]
    row_max = larger(before, row_max)
    if cutlass.const_expr(method.lazy_rescale):
        # A first maximum of -inf is always replaced: inf and NaN do not compare.
        row_max = before if (row_max - before) * scale <= RESCALE_THRESHOLD_LOG2 else row_max
    reference = _reference(row_max, method)
    update.delta_log2[r] = (before - reference) * scale
    update.offsets[r] = _offset(reference, scale, method)
    rows.row_max[r] = row_max


@cute.jit
def rescale_row_sum(rows: Rows, update: MaxUpdate) -> cute.Tensor:
    """Multiply the sums by factors for what was accumulated before the block, and return the factors."""
    factors = cute.make_rmem_tensor(cute.size(update.delta_log2), Float32)
    for r in cutlass.range_constexpr(cute.size(factors)):
        factors[r] = cute.math.exp2(update.delta_log2[r], fastmath=True)
        rows.row_sum[r] = rows.row_sum[r] * factors[r]
    return factors


@cute.jit
def exp2_columns(
    scores: cute.Tensor,
    rows: Rows,
    block: NextBlock,
    scale: Float32,
    method: cutlass.Constexpr,
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
) -> None:
    """Turn columns `first <= c < last` of a further block into weights."""
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        rows.row_sum[r] += _exp2_row(scores, r, block.offsets[r], scale, method, first, last)


@cute.jit
def rescale_output(accumulator: cute.Tensor, factors: cute.Tensor, method: cutlass.Constexpr) -> None:
    """Multiply the rows of `accumulator` (R, C); with `lazy_rescale` only if a row of the warp needs it."""
    needed = Boolean(True)
    if cutlass.const_expr(method.lazy_rescale):
        lowest = factors[0]
        for r in cutlass.range_constexpr(1, cute.size(factors)):
            lowest = cute.arch.fmin(lowest, factors[r])
        needed = cute.arch.vote_any_sync(lowest < 1.0)
    if needed:
        for r in cutlass.range_constexpr(cute.size(factors)):
            for c in cutlass.range_constexpr(cute.size(accumulator, mode=[1])):
                accumulator[r, c] = accumulator[r, c] * factors[r]


class Final(NamedTuple):
    """Results of finished rows, each (R,)."""

    inverse: cute.Tensor
    """Factors that normalise the output; 0 for rows that see nothing."""
    lse: cute.Tensor
    """Natural logarithms of the sums of exponentials; -inf for rows that see nothing."""
    lse_low: cute.Tensor | None
    """What rounding has taken from lse; only with `subtracts_max_first`."""


@cute.jit
def finalize(
    rows: Rows, scale: Float32, keep_scale: Float32, method: cutlass.Constexpr, sinks: tuple = ()
) -> Final:
    """Finish the rows; `sinks` are their scores of one more key, whose value is 0, in natural units."""
    R = cute.size(rows.row_max)
    inverse, lse, low = (cute.make_rmem_tensor(R, Float32) for _ in range(3))
    for r in cutlass.range_constexpr(R):
        row_sum, row_max = rows.row_sum[r], rows.row_max[r]
        for step in cutlass.range_constexpr(_steps(method.lanes)):
            row_sum = row_sum + cute.arch.shuffle_sync_bfly(row_sum, 1 << step)
        factor, max_scale = keep_scale, scale
        if cutlass.const_expr(len(sinks) > 0):
            row_max, row_sum, share = _with_sink(row_max, row_sum, sinks[r], scale, method)
            factor, max_scale = keep_scale * share, 1.0
        inverse[r], lse[r], low[r] = Float32(0.0), -Float32.inf, Float32(0.0)
        # Weights relative to a maximum of +inf may all be 0.
        if (row_sum != 0.0) | (row_max == Float32.inf):
            inverse[r] = factor * cute.arch.rcp_approx(row_sum)
            if cutlass.const_expr(method.subtracts_max_first):
                lse[r], low[r] = sum_and_error(row_max, cute.math.log2(row_sum, fastmath=True) * LN2)
            else:
                lse[r] = (row_max * max_scale + cute.math.log2(row_sum, fastmath=True)) * LN2
    return Final(inverse, lse, low if method.subtracts_max_first else None)


class _WithSink(NamedTuple):
    """A row that has one more key."""

    row_max: Float32
    """Maximum in base 2, or in natural units with `subtracts_max_first`."""
    row_sum: Float32
    share: Float32
    """Factor for what was summed up before."""


@cute.jit
def _with_sink(
    row_max: Float32, row_sum: Float32, sink: Float32, scale: Float32, method: cutlass.Constexpr
) -> _WithSink:
    to_log2 = 1.0
    if cutlass.const_expr(method.subtracts_max_first):
        to_log2 = LOG2E
    else:
        row_max, sink = row_max * scale, sink * LOG2E
    highest = larger(row_max, sink)
    reference = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
    share = cute.math.exp2((row_max - reference) * to_log2, fastmath=True)
    weight = cute.math.exp2((sink - reference) * to_log2, fastmath=True)
    return _WithSink(highest, row_sum * share + weight, share)


@cute.jit
def join_sink(lse: Float32, sink: Float32) -> tuple[Float32, Float32]:
    """The share of a finished row's weights next to a sink, and the lse of both, in natural units."""
    highest = larger(lse, sink)
    reference = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
    weight = cute.math.exp2((lse - reference) * LOG2E, fastmath=True)
    total = weight + cute.math.exp2((sink - reference) * LOG2E, fastmath=True)
    share, joined = Float32(0.0), -Float32.inf
    if total != 0.0:
        share = weight * cute.arch.rcp_approx(total)
        joined = highest + cute.math.log2(total, fastmath=True) * LN2
    return share, joined


def sum_and_error(x: Float32, y: Float32) -> tuple[Float32, Float32]:
    """x + y, and what rounding has taken from it (Knuth's TwoSum)."""
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


def _steps(lanes: int) -> int:
    return lanes.bit_length() - 1


@cute.jit
def _maximum(scores: cute.Tensor, r: cutlass.Constexpr, method: cutlass.Constexpr) -> Float32:
    C = cute.size(scores, mode=[1])
    chains = [scores[r, c] for c in range(CHAINS)]
    if cutlass.const_expr(method.packed):
        for c in cutlass.range_constexpr(CHAINS, C, 2):
            i = c // 2 % CHAINS
            chains[i] = _maximum_of_three(chains[i], scores[r, c], scores[r, c + 1])
    else:
        for c in cutlass.range_constexpr(CHAINS, C):
            chains[c % CHAINS] = larger(chains[c % CHAINS], scores[r, c])
    return larger(larger(chains[0], chains[1]), larger(chains[2], chains[3]))


@cute.jit
def _across(row_max: Float32, lanes: cutlass.Constexpr) -> Float32:
    """The maximum of the neighbouring lanes that share a row."""
    for step in cutlass.range_constexpr(_steps(lanes)):
        row_max = larger(row_max, cute.arch.shuffle_sync_bfly(row_max, 1 << step))
    return row_max


@cute.jit
def _reference(row_max: Float32, method: cutlass.Constexpr) -> Float32:
    """The maximum, or 0 for a row of -inf only, whose weights then are 0 instead of NaN."""
    if cutlass.const_expr(method.may_be_fully_masked):
        return Float32(0.0) if row_max == -Float32.inf else row_max
    return row_max


def _offset(reference: Float32, scale: Float32, method: Method) -> Float32:
    return reference if method.subtracts_max_first else reference * scale


def larger(x: Float32, y: Float32) -> Float32:
    """The larger number; NaN if one of them is NaN."""
    return cute.arch.fmax(x, y, nan=True)


def _maximum_of_three(x: Float32, y: Float32, z: Float32) -> Float32:
    return Float32(nvvm.fmax(x.ir_value(), y.ir_value(), c=z.ir_value(), nan=True))


@cute.jit
def _exp2_row(
    scores: cute.Tensor,
    r: cutlass.Constexpr,
    offset: Float32,
    scale: Float32,
    method: cutlass.Constexpr,
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
) -> Float32:
    """Turn some columns of row r into weights, and return their sum."""
    chains = [Float32(0.0)] * CHAINS
    for c in cutlass.range_constexpr(first, last):
        if cutlass.const_expr(method.subtracts_max_first):
            weight = method.exponent.of((scores[r, c] - offset) * scale, c)
        else:
            weight = method.exponent.of(scores[r, c] * scale - offset, c)
        scores[r, c] = weight
        chains[c % CHAINS] = weight if c < first + CHAINS else chains[c % CHAINS] + weight
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


FloatPair = tuple[Float32, Float32]


def begin_packed_sum(rows: Rows) -> tuple[FloatPair, ...]:
    """Packed rows: chains of one row's sum for `exp2_packed` to add to; `end_packed_sum` joins them."""
    zero = Float32(0.0)
    return (rows.row_sum[0], zero), *((zero, zero),) * (CHAINS // 2 - 1)


@cute.jit
def exp2_packed(
    scores: cute.Tensor,
    sums: tuple[FloatPair, ...],
    update: MaxUpdate,
    scale: Float32,
    method: cutlass.Constexpr,
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
) -> tuple[FloatPair, ...]:
    """Packed rows: turn columns `first <= c < last` of one row (1, C) into weights; adds them to its sums."""
    chains, offset = list(sums), -update.offsets[0]
    for c in cutlass.range_constexpr(first, last, 2):
        x = scores[0, c], scores[0, c + 1]
        if cutlass.const_expr(method.subtracts_max_first):
            x = cute.arch.mul_packed_f32x2(cute.arch.add_packed_f32x2(x, (offset, offset)), (scale, scale))
        else:
            x = cute.arch.fma_packed_f32x2(x, (scale, scale), (offset, offset))
        weights = method.exponent.of_pair(x, c)
        scores[0, c], scores[0, c + 1] = weights
        i = c // 2 % len(chains)
        chains[i] = cute.arch.add_packed_f32x2(chains[i], weights)
    return tuple(chains)


def end_packed_sum(rows: Rows, sums: tuple[FloatPair, ...]) -> None:
    total = cute.arch.add_packed_f32x2(*sums)
    rows.row_sum[0] = total[0] + total[1]
