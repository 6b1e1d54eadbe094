"""Division of an int32 by one that many are divided by: a product with a multiplier that is made once.

For 1 <= D <= 2^31, shift = floor(log2(D)) and m = floor((2^(32 + shift) - 1) / D), which has 32 bits, the
quotient n // D is ((n + 1) * m) >> (32 + shift) for 0 <= n <= 2^31, and that of n, rounded up, is
(n * m + 2^(32 + shift) - 1) >> (32 + shift) for n < 2^31. By 0 anything comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

Divider = tuple[Any, Any, Any, Any]
"""m and the shift of the divisor's absolute value, and the lower and upper word of what is added to n * m for
a position n: a negative divisor rounds n / D up."""


def known_divider(divisor: int) -> Divider:
    """The divider of a constant."""
    size = max(abs(divisor), 1)
    shift = size.bit_length() - 1
    multiplier = ((1 << (32 + shift)) - 1) // size
    added = multiplier if divisor >= 0 else (1 << (32 + shift)) - 1
    return Uint32(multiplier), Uint32(shift), Uint32(added & 0xFFFFFFFF), Uint32(added >> 32)


def divider(divisor: Int32) -> Divider:
    """The divider of a number that is known when the kernel runs; in float32, without a branch."""
    sign = divisor >> 31
    size = ((divisor ^ sign) - sign).to(Uint32)
    shift = (Uint32(31) - cute.arch.clz(size | Uint32(1)).to(Uint32)) & Uint32(31)
    # All ones, as one word of zeros less one.
    dividend = (Uint64(1) << (shift + Uint32(32)).to(Uint64)) - Uint64(1)
    # Slightly less than 1 / size, so that what is left does not become negative; each step adds 20 bits.
    inverse = cute.arch.rcp_approx(size.to(Float32)) * Float32(1.0 - 2.0**-20)
    multiplier = Uint64(0)
    for _ in range(2):
        left = dividend - multiplier * size.to(Uint64)
        multiplier = multiplier + (left.to(Float32) * inverse).to(Uint32).to(Uint64)
    left = dividend - multiplier * size.to(Uint64)
    multiplier = multiplier.to(Uint32) + cutlass.select_(left >= size.to(Uint64), Uint32(1), Uint32(0))
    is_negative = divisor < Int32(0)
    upper = (Uint32(1) << shift) - Uint32(1)
    return (
        multiplier,
        shift,
        Uint32(cutlass.select_(is_negative, Uint32(0xFFFFFFFF), multiplier)),
        Uint32(cutlass.select_(is_negative, upper, Uint32(0))),
    )


def _upper(x: Uint32, y: Uint32) -> Uint32:
    return cute.arch.mul_hi(x, y)


def _of_position(x: Int32, by: Divider) -> Uint32:
    """|x // y| of x >= 0, rounded away from 0 if y is negative."""
    multiplier, shift, lower, upper = by
    added = (upper.to(Uint64) << Uint64(32)) | lower.to(Uint64)
    product = x.to(Uint32).to(Uint64) * multiplier.to(Uint64) + added
    return (product >> Uint64(32)).to(Uint32) >> shift


def _floor(x: Int32, y: Int32, by: Divider, is_position: bool) -> Int32:
    sign = y >> 31
    if is_position:
        return _of_position(x, by).to(Int32) * (sign | Int32(1))
    # x / y is ~((x - 1) / |y|) for a negative y, and x / |y| is ~(~x / |y|) for a negative x.
    moved = x + sign
    own = (x | moved) >> 31
    found = _upper((moved ^ own).to(Uint32) + Uint32(1), by[0]) >> by[1]
    return found.to(Int32) ^ own ^ sign


def _remainder(x: Int32, y: Int32, by: Divider, is_position: bool) -> Int32:
    if is_position:
        sign = y >> 31
        return x - _of_position(x, by).to(Int32) * ((y ^ sign) - sign)
    return x - _floor(x, y, by, False) * y


def _trunc(x: Int32, y: Int32, by: Divider, is_position: bool) -> Int32:
    own = x >> 31
    size = ((x ^ own) - own).to(Uint32)
    found = (_upper(size + Uint32(1), by[0]) >> by[1]).to(Int32)
    sign = own ^ (y >> 31)
    return (found ^ sign) - sign


def _rest(x: Int32, y: Int32, by: Divider, is_position: bool) -> Int32:
    return x - _trunc(x, y, by, is_position) * y


DIVISIONS: dict[str, Callable[[Any, Any, Divider, bool], Any]] = {
    "div_floor_by": _floor,
    "div_trunc_by": _trunc,
    "remainder_by": _remainder,
    "fmod_by": _rest,
}
"""(x, y, divider of y, whether x is not negative), by the name of the node."""
