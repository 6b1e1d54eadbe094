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
from cutlass import Float32, Int32, Uint32, Uint64

Divider = tuple[Any, Any, Any, Any]
"""m and the shift of the divisor's size, and the lower and upper word of what `size_by` adds to a product."""
_ONES = 0xFFFFFFFF


def divider(divisor: Int32, sign: Int32, known: int | None = None) -> Divider:
    """What divides by a number, which may be known when the kernel is compiled.

    sign: negative if `size_by` rounds up.
    """
    multiplier, shift = _multiplier(divisor) if known is None else _known_multiplier(known)
    rounds_up = sign < Int32(0)
    upper = (Uint32(1) << shift) - Uint32(1)
    return (
        multiplier,
        shift,
        Uint32(cutlass.select_(rounds_up, Uint32(_ONES), multiplier)),
        Uint32(cutlass.select_(rounds_up, upper, Uint32(0))),
    )


def _known_multiplier(divisor: int) -> tuple[Uint32, Uint32]:
    size = max(abs(divisor), 1)
    shift = size.bit_length() - 1
    return Uint32(((1 << (32 + shift)) - 1) // size), Uint32(shift)


def _multiplier(divisor: Int32) -> tuple[Uint32, Uint32]:
    """m and the shift, without a branch."""
    sign = divisor >> 31
    size = ((divisor ^ sign) - sign).to(Uint32)
    wide = size.to(Uint64)
    shift = Uint32(31) - cute.arch.clz(size | Uint32(1)).to(Uint32)
    dividend = (Uint64(1) << (shift + Uint32(32)).to(Uint64)) - Uint64(1)
    # Slightly less than 1 / size, so that what is left does not become negative; each step adds 20 bits.
    inverse = cute.arch.rcp_approx(size.to(Float32)) * Float32(1.0 - 2.0**-20)
    multiplier = Uint64(0)
    for _ in range(2):
        left = dividend - multiplier * wide
        multiplier = multiplier + (left.to(Float32) * inverse).to(Uint32).to(Uint64)
    rest = cutlass.select_(dividend - multiplier * wide >= wide, Uint32(1), Uint32(0))
    return multiplier.to(Uint32) + rest, shift


def size_by(x: Int32, by: Divider) -> Int32:
    """The size of a quotient of x >= 0, rounded as the divider says."""
    multiplier, shift, lower, upper = by
    added = (upper.to(Uint64) << Uint64(32)) | lower.to(Uint64)
    product = x.to(Uint32).to(Uint64) * multiplier.to(Uint64) + added
    return ((product >> Uint64(32)).to(Uint32) >> shift).to(Int32)


def _quotient(size: Int32, by: Divider) -> Int32:
    """The quotient, rounded down, of an unsigned number up to 2^31 by the divisor's size."""
    return (cute.arch.mul_hi(size.to(Uint32) + Uint32(1), by[0]) >> by[1]).to(Int32)


def _floor(x: Int32, y: Int32, by: Divider) -> Int32:
    # For y < 0, x // y is ~((x - 1) // -y), and for x < 0, x // D is ~(~x // D).
    sign = y >> 31
    moved = x + sign
    own = (x | moved) >> 31
    return _quotient(moved ^ own, by) ^ own ^ sign


def _trunc(x: Int32, y: Int32, by: Divider) -> Int32:
    own = x >> 31
    sign = own ^ (y >> 31)
    return (_quotient((x ^ own) - own, by) ^ sign) - sign


DIVISIONS: dict[str, Callable[[Any, Any, Divider], Any]] = {
    "div_floor_by": _floor,
    "div_trunc_by": _trunc,
    "remainder_by": lambda x, y, by: x - _floor(x, y, by) * y,
    "fmod_by": lambda x, y, by: x - _trunc(x, y, by) * y,
}
"""(x, y, divider of y), by the name of the node."""
