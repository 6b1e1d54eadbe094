"""Online softmax over a thread's fragments of scores, in base 2.

With `scale` = softmax scale * log2(e), a row's weights are 2^(scale * (score - max)); the maximum is that of
the scores seen so far, so that sums and the accumulated output only have to be multiplied when it moves. Any
reference in the maximum's place gives the same quotient, hence `conditional`: the maximum stays as it is
until it would grow by more than 2^8, which costs no accuracy and leaves out nearly all multiplications.

A NaN among a row's scores becomes its maximum, and +inf makes NaN of the row: what attends to a poisoned key
is poisoned, whichever columns take the polynomial.
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
CHAINS = 4
"""Independent chains of a row's maximum and sum: a single one would wait for itself."""
GROWTH = 8.0
"""log2 of how far a row may outgrow its reference before it is rescaled."""


class Method(NamedTuple):
    """What is static about a softmax."""

    lanes: int
    """Neighbouring lanes that share a row, a power of two."""
    hidden: bool = False
    """Whether all of a row's scores may be -inf."""
    conditional: bool = False
    exponent: Exponent = Exponent()
    packed: bool = False
    """Maxima of three numbers, and weights by `weigh_pairs`, two to an instruction: from sm_100a on."""
    subtracts_first: bool = False
    """The maximum is subtracted before scores are scaled: for scores so large that scaling them rounds away
    what makes them differ, as beside a floating mask."""


class Rows(NamedTuple):
    """The running state of a thread's rows, each (R,) float32 registers; sums are this thread's part only."""

    top: cute.Tensor
    total: cute.Tensor


def make_rows(count: int) -> Rows:
    return Rows(cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32))


def clear(rows: Rows) -> None:
    """Nothing seen yet: the first block may then be a further one like any other."""
    rows.top.fill(-Float32.inf)
    rows.total.fill(0.0)


class Step(NamedTuple):
    """How a further block enters a softmax, each (R,)."""

    factors: cute.Tensor
    """For what has been accumulated before it."""
    offsets: cute.Tensor
    """What is subtracted from its scores: in base 2, or with `subtracts_first` in their own units."""


class Growth(NamedTuple):
    """How a block raises the references of rows, each (R,)."""

    shifts: cute.Tensor
    """The reference before it less the one from it on, in base 2."""
    offsets: cute.Tensor
    """What is subtracted from its scores: in base 2, or with `subtracts_first` in their own units."""


@cute.jit
def begin(scores: cute.Tensor, rows: Rows, scale: Float32, method: cutlass.Constexpr) -> None:
    """The first block: `scores` (R, C) become weights in place."""
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        top = _across(_maximum(scores, r, method), method.lanes)
        rows.top[r] = top
        offset = _offset(_reference(top, method), scale, method)
        rows.total[r] = _weigh_row(scores, r, offset, scale, method, 0, cute.size(scores, mode=[1]))


@cute.jit
def step(scores: cute.Tensor, rows: Rows, scale: Float32, method: cutlass.Constexpr) -> Step:
    """A further block's maxima, and sums rescaled for them; its weights follow by `weigh`."""
    growth = grow(scores, rows, scale, method)
    return Step(rescale_sums(rows, growth), growth.offsets)


@cute.jit
def grow(scores: cute.Tensor, rows: Rows, scale: Float32, method: cutlass.Constexpr) -> Growth:
    """A block's maxima. If it is a further one, `rescale_sums` has to follow."""
    R = cute.size(scores, mode=[0])
    shifts, offsets = cute.make_rmem_tensor(R, Float32), cute.make_rmem_tensor(R, Float32)
    for r in cutlass.range_constexpr(R):
        before = rows.top[r]
        top = _larger(before, _across(_maximum(scores, r, method), method.lanes))
        if cutlass.const_expr(method.conditional):
            # A first maximum of -inf is always replaced: inf and NaN do not compare.
            top = before if (top - before) * scale <= GROWTH else top
        reference = _reference(top, method)
        shifts[r] = (before - reference) * scale
        offsets[r] = _offset(reference, scale, method)
        rows.top[r] = top
    return Growth(shifts, offsets)


@cute.jit
def rescale_sums(rows: Rows, growth: Growth) -> cute.Tensor:
    """Factors for what was accumulated before the block; the sums are multiplied by them."""
    factors = cute.make_rmem_tensor(cute.size(growth.shifts), Float32)
    for r in cutlass.range_constexpr(cute.size(factors)):
        factors[r] = cute.math.exp2(growth.shifts[r], fastmath=True)
        rows.total[r] = rows.total[r] * factors[r]
    return factors


@cute.jit
def weigh(
    scores: cute.Tensor,
    rows: Rows,
    step: Step,
    scale: Float32,
    method: cutlass.Constexpr,
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
) -> None:
    """Columns `first <= c < last` of a further block become weights."""
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        rows.total[r] += _weigh_row(scores, r, step.offsets[r], scale, method, first, last)


@cute.jit
def rescale(accumulator: cute.Tensor, factors: cute.Tensor, method: cutlass.Constexpr) -> None:
    """Multiply the rows of `accumulator` (R, C); if conditional, only where a row of the warp needs it."""
    needed = Boolean(True)
    if cutlass.const_expr(method.conditional):
        lowest = factors[0]
        for r in cutlass.range_constexpr(1, cute.size(factors)):
            lowest = cute.arch.fmin(lowest, factors[r])
        needed = cute.arch.vote_any_sync(lowest < 1.0)
    if needed:
        for r in cutlass.range_constexpr(cute.size(factors)):
            for c in cutlass.range_constexpr(cute.size(accumulator, mode=[1])):
                accumulator[r, c] = accumulator[r, c] * factors[r]


class Ends(NamedTuple):
    """What is left of rows, each (R,)."""

    inverse: cute.Tensor
    """Factors that normalise the output; 0 for rows that see nothing."""
    lse: cute.Tensor
    """Natural logarithms of the sums of exponentials; -inf for rows that see nothing."""
    lse_low: cute.Tensor | None
    """With `subtracts_first`: what rounding has taken from lse."""


@cute.jit
def finish(rows: Rows, scale: Float32, keep_scale: Float32, method: cutlass.Constexpr) -> Ends:
    R = cute.size(rows.top)
    inverse, lse, low = (cute.make_rmem_tensor(R, Float32) for _ in range(3))
    for r in cutlass.range_constexpr(R):
        total, top = rows.total[r], rows.top[r]
        for step in cutlass.range_constexpr(_steps(method.lanes)):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
        inverse[r], lse[r], low[r] = Float32(0.0), -Float32.inf, Float32(0.0)
        # Weights relative to a maximum of +inf may all be 0.
        if (total != 0.0) | (top == Float32.inf):
            inverse[r] = keep_scale * cute.arch.rcp_approx(total)
            if cutlass.const_expr(method.subtracts_first):
                lse[r], low[r] = _sum_and_error(top, cute.math.log2(total, fastmath=True) * LN2)
            else:
                lse[r] = (top * scale + cute.math.log2(total, fastmath=True)) * LN2
    return Ends(inverse, lse, low if method.subtracts_first else None)


def _sum_and_error(x: Float32, y: Float32) -> tuple[Float32, Float32]:
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
            chains[c % CHAINS] = _larger(chains[c % CHAINS], scores[r, c])
    return _larger(_larger(chains[0], chains[1]), _larger(chains[2], chains[3]))


@cute.jit
def _across(top: Float32, lanes: cutlass.Constexpr) -> Float32:
    """The maximum of the neighbouring lanes that share a row."""
    for step in cutlass.range_constexpr(_steps(lanes)):
        top = _larger(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
    return top


@cute.jit
def _reference(top: Float32, method: cutlass.Constexpr) -> Float32:
    """The maximum, or 0 for a row of -inf only, whose weights then are 0 instead of NaN."""
    if cutlass.const_expr(method.hidden):
        return Float32(0.0) if top == -Float32.inf else top
    return top


def _offset(reference: Float32, scale: Float32, method: Method) -> Float32:
    return reference if method.subtracts_first else reference * scale


def _larger(x: Float32, y: Float32) -> Float32:
    """NaN if one of them is."""
    return cute.arch.fmax(x, y, nan=True)


def _maximum_of_three(x: Float32, y: Float32, z: Float32) -> Float32:
    return Float32(nvvm.fmax(x.ir_value(), y.ir_value(), c=z.ir_value(), nan=True))


@cute.jit
def _weigh_row(
    scores: cute.Tensor,
    r: cutlass.Constexpr,
    offset: Float32,
    scale: Float32,
    method: cutlass.Constexpr,
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
) -> Float32:
    """Some columns of row r become weights; returns their sum."""
    chains = [Float32(0.0)] * CHAINS
    for c in cutlass.range_constexpr(first, last):
        if cutlass.const_expr(method.subtracts_first):
            weight = method.exponent.of((scores[r, c] - offset) * scale, c)
        else:
            weight = method.exponent.of(scores[r, c] * scale - offset, c)
        scores[r, c] = weight
        chains[c % CHAINS] = weight if c < first + CHAINS else chains[c % CHAINS] + weight
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


Pair = tuple[Float32, Float32]


def begin_sums(rows: Rows) -> tuple[Pair, ...]:
    """Packed rows: chains of the sum of one row, to go through `weigh_pairs`, which `end_sums` adds up."""
    zero = Float32(0.0)
    return (rows.total[0], zero), *((zero, zero),) * (CHAINS // 2 - 1)


@cute.jit
def weigh_pairs(
    scores: cute.Tensor,
    sums: tuple[Pair, ...],
    growth: Growth,
    scale: Float32,
    method: cutlass.Constexpr,
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
) -> tuple[Pair, ...]:
    """Packed rows: columns `first <= c < last` of one row (1, C) become weights, added to its sums."""
    chains, offset = list(sums), -growth.offsets[0]
    for c in cutlass.range_constexpr(first, last, 2):
        x = scores[0, c], scores[0, c + 1]
        if cutlass.const_expr(method.subtracts_first):
            x = cute.arch.mul_packed_f32x2(cute.arch.add_packed_f32x2(x, (offset, offset)), (scale, scale))
        else:
            x = cute.arch.fma_packed_f32x2(x, (scale, scale), (offset, offset))
        weights = method.exponent.of_pair(x, c)
        scores[0, c], scores[0, c + 1] = weights
        i = c // 2 % len(chains)
        chains[i] = cute.arch.add_packed_f32x2(chains[i], weights)
    return tuple(chains)


def end_sums(rows: Rows, sums: tuple[Pair, ...]) -> None:
    total = cute.arch.add_packed_f32x2(*sums)
    rows.total[0] = total[0] + total[1]
