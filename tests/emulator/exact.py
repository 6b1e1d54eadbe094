"""Floating-point arithmetic by its definition: exact rational numbers, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary format.

    bits: total bits; mantissa: stored bits of the significand.
    least, most: exponents of the smallest and the largest normal number.
    """

    bits: int
    mantissa: int
    least: int
    most: int

    @property
    def nan(self) -> int:
        """The NaN that arithmetic produces."""
        return (1 << (self.bits - 1)) - 1

    @property
    def infinity(self) -> int:
        return (self.most - self.least + 2) << self.mantissa

    @property
    def largest(self) -> Fraction:
        return (2 - Fraction(1, 2**self.mantissa)) * Fraction(2) ** self.most

    @property
    def dtype(self) -> type:
        return {16: np.uint16, 32: np.uint32, 64: np.uint64}[self.bits]

    def decode(self, code: int) -> float:
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        magnitude = code & self.nan
        if magnitude >= self.infinity:
            return math.copysign(math.inf if magnitude == self.infinity else math.nan, sign)
        field, fraction = divmod(magnitude, 1 << self.mantissa)
        significand = fraction + (1 << self.mantissa if field else 0)
        return math.copysign(math.ldexp(significand, self.least - self.mantissa + max(field, 1) - 1), sign)

    def encode(self, x: float) -> int:
        """The code of a number that the format can represent."""
        if math.isnan(x):
            return self.nan
        sign = int(math.copysign(1, x) < 0) << (self.bits - 1)
        if math.isinf(x):
            return sign | self.infinity
        if x == 0:
            return sign
        exponent = max(math.frexp(x)[1] - 1, self.least)
        count = Fraction(abs(x)) / Fraction(2) ** (exponent - self.mantissa)
        assert count.denominator == 1, f"{x} is not a number of the format"
        return sign | ((exponent - self.least) << self.mantissa) + int(count)

    def round(self, x: Fraction, mode: str = "rn") -> float:
        """The number of the format that PTX's rounding `mode` rounds x to; x is not 0."""
        magnitude, negative = abs(x), x < 0
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        exponent -= magnitude < Fraction(2) ** exponent
        spacing = Fraction(2) ** (max(exponent, self.least) - self.mantissa)
        count, rest = divmod(magnitude, spacing)
        outwards = {"rz": False, "rm": negative, "rp": not negative}
        up = (
            outwards[mode]
            if mode in outwards
            else (rest * 2 > spacing or (rest * 2 == spacing and (mode == "rna" or count % 2 == 1)))
        )
        rounded = (count + (up and rest > 0)) * spacing
        if rounded > self.largest:
            bounded = mode in outwards and not outwards[mode]
            rounded = self.largest if bounded else math.inf
        return -float(rounded) if negative else float(rounded)

    def flush(self, x: float) -> float:
        return math.copysign(0.0, x) if abs(x) < 2.0**self.least else x


F16 = Format(16, 10, -14, 15)
BF16 = Format(16, 7, -126, 127)
F32 = Format(32, 23, -126, 127)
F64 = Format(64, 52, -1022, 1023)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


def arithmetic(
    operation: str, sources: Sequence[float], to: Format, mode: str = "rn", ftz: bool = False
) -> float:
    """add, sub, mul, fma or div of numbers, rounded once to a format."""
    if ftz:
        sources = [to.flush(x) for x in sources]
    if operation == "sub":
        operation, sources = "add", [sources[0], -sources[1]]
    result = _special(operation, sources, mode)
    if result is None:
        result = to.round(_exact(operation, sources), mode)
    return to.flush(result) if ftz else result


def _exact(operation: str, sources: Sequence[float]) -> Fraction:
    a, b, *c = map(Fraction, sources)
    if operation == "add":
        return a + b
    if operation == "div":
        return a / b
    return a * b + (c[0] if c else 0)


def _special(operation: str, sources: Sequence[float], mode: str) -> float | None:
    """The result if it is a zero, an infinity or NaN for reasons other than rounding; else None."""
    if operation == "fma":
        product = _special("mul", sources[:2], mode)
        if product is None:
            a, b, c = sources
            if not math.isfinite(c):
                return c
            return _zero(1.0, 1.0, mode) if Fraction(a) * Fraction(b) + Fraction(c) == 0 else None
        return _special("add", [product, sources[2]], mode)
    a, b = sources
    with np.errstate(all="ignore"):
        if operation == "div" and (b == 0 or not (math.isfinite(a) and math.isfinite(b))):
            return float(np.float64(a) / np.float64(b))
        if operation in ("mul", "div") and (a == 0 or b == 0):
            product = float(np.float64(a) * np.float64(b))
            return math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b)) if product == 0 else product
        if not (math.isfinite(a) and math.isfinite(b)):
            return float(
                np.float64(a) * np.float64(b) if operation == "mul" else np.float64(a) + np.float64(b)
            )
    if operation == "add" and Fraction(a) + Fraction(b) == 0:
        return _zero(a, b, mode)
    return None


def _zero(a: float, b: float, mode: str) -> float:
    """The sign of a sum that is exactly zero."""
    if a == b == 0 and math.copysign(1, a) == math.copysign(1, b):
        return a
    return -0.0 if mode == "rm" else 0.0


def codes(to: Format, rng: np.random.Generator, count: int) -> np.ndarray:
    """Codes of a format (count,): arbitrary bits, numbers of similar size, and the remarkable ones."""
    anything = rng.integers(0, 1 << to.bits, count, np.uint64)
    bias = (to.infinity >> to.mantissa) // 2
    fields = rng.integers(bias - 6, bias + 6, count).astype(np.uint64)
    low = anything & np.uint64((1 << to.mantissa) - 1)
    # Half of these have few bits, so that results are exact or lie half-way.
    low = np.where(
        rng.random(count) < 0.5,
        low & np.uint64(((1 << to.mantissa) - 1) ^ ((1 << (to.mantissa - 3)) - 1)),
        low,
    )
    sign = anything >> np.uint64(to.bits - 1) << np.uint64(to.bits - 1)
    similar = sign | fields << np.uint64(to.mantissa) | low
    one = to.encode(1.0)
    special = [
        0,
        1,
        (1 << to.mantissa) - 1,
        1 << to.mantissa,
        one - 1,
        one,
        one + 1,
        to.infinity - 1,
        to.infinity,
        to.nan,
    ]
    remarkable = rng.choice(np.array(special, np.uint64), count) | sign
    which = rng.integers(0, 4, count)
    chosen = np.where(which == 0, anything, np.where(which == 1, remarkable, similar))
    return chosen.astype(to.dtype)


def expected(to: Format, function: Callable[..., float], *sources: np.ndarray) -> np.ndarray:
    """Codes of a function's results, element by element."""
    rows = zip(*(map(int, s) for s in sources), strict=True)
    return np.array([to.encode(function(*map(to.decode, row))) for row in rows], to.dtype)


def saturated(x: float) -> float:
    return min(x, 1.0) if x > 0 else 0.0


def assert_same(got: np.ndarray, want: np.ndarray, *sources: np.ndarray) -> None:
    for row in np.flatnonzero(got != want)[:1]:
        shown = [f"{int(s[row]):#x}" for s in sources]
        raise AssertionError(f"of {', '.join(shown)}: got {int(got[row]):#x}, want {int(want[row]):#x}")
