"""2^x of scores: by MUFU, or for a share of the columns by a polynomial.

The polynomial is the one that FlashAttention-4 uses. x = n + f with a whole n and f in [0, 1); 2^f is a
polynomial of degree 3 with relative error 8.8e-5, a fortieth of half a unit in bfloat16's last place; n is
added to its exponent. It costs 8 instructions, or 5 where two numbers share one; a share pays where MUFU is
what limits the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm

COEFFICIENTS = (1.0, 0.695146143436, 0.227564394474, 0.077119089663)
"""Coefficients of f^0, f^1, f^2, f^3."""
LOWEST = -127.0
"""The polynomial gives 0 for any x up to this."""

_MAGIC = 12582912.0
"""2^23 + 2^22: a sum with it has no fraction bits, and has the whole number in its lowest bits."""


class Exponent(NamedTuple):
    """The columns of a row that take the polynomial: the last `count` of every `period`; by default none.

    The choice depends on the column alone, so that results do not depend on which mask a kernel applies.
    """

    count: int = 0
    period: int = 1

    def of(self, x: Float32, column: int) -> Float32:
        """2^x for x <= 127, 0 for -inf; `column` is static. Below 2^-126 results are 0 or inexact.

        The polynomial takes NaN for -inf. But a row with a NaN has NaN for its maximum, which makes NaN of
        its other columns.
        """
        return polynomial(x) if self._by_polynomial(column) else cute.math.exp2(x, fastmath=True)

    def of_pair(self, x: tuple[Float32, Float32], column: int) -> tuple[Float32, Float32]:
        """2^x of columns `column` and `column + 1`, with packed arithmetic: from sm_100a on."""
        if self._by_polynomial(column) and self._by_polynomial(column + 1):
            return polynomial_pair(x)
        return self.of(x[0], column), self.of(x[1], column + 1)

    def _by_polynomial(self, column: int) -> bool:
        return column % self.period >= self.period - self.count


def polynomial(x: Float32) -> Float32:
    x = cute.arch.fmax(x, LOWEST)
    shifted = _add_down(x, Float32(_MAGIC))
    f = x - (shifted - _MAGIC)
    result = Float32(COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        result = result * f + coefficient
    return _scaled(result, shifted)


def polynomial_pair(x: tuple[Float32, Float32]) -> tuple[Float32, Float32]:
    x = tuple(cute.arch.fmax(number, LOWEST) for number in x)
    shifted = cute.arch.add_packed_f32x2(x, _twice(_MAGIC), rnd="rm", ftz=True)
    whole = cute.arch.add_packed_f32x2(shifted, _twice(-_MAGIC))
    f = cute.arch.fma_packed_f32x2(whole, _twice(-1.0), x)
    result = _twice(COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        result = cute.arch.fma_packed_f32x2(result, f, _twice(coefficient))
    return _scaled(result[0], shifted[0]), _scaled(result[1], shifted[1])


def _scaled(x: Float32, shifted: Float32) -> Float32:
    """x times 2 to the whole number in `shifted`."""
    return _from_bits(_bits(x) + (_bits(shifted) << 23))


def _add_down(x: Float32, y: Float32) -> Float32:
    """x + y, rounded towards minus infinity."""
    return cute.arch.inline_ptx(
        "add.rm.ftz.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


def _twice(x: float) -> tuple[Float32, Float32]:
    return Float32(x), Float32(x)


def _bits(x: Float32) -> Int32:
    return Int32(llvm.bitcast(Int32.mlir_type, x.ir_value()))


def _from_bits(x: Int32) -> Float32:
    return Float32(llvm.bitcast(Float32.mlir_type, x.ir_value()))
