"""cvt between all kinds of numbers, against exact arithmetic (PTX ISA: cvt)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given

from exact import F16, F32, FORMATS, Format, assert_same, codes, expected, saturated
from flash4_torch.emulator.errors import UnsupportedInstruction
from lanes import bits_of, counts, drawn, evaluate, few, integers, number, unsigned

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
MODES = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def limits(kind: str) -> tuple[int, int]:
    bits = bits_of(kind)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def cut(x: int, bits: int) -> int:
    return x & ((1 << bits) - 1)


# --- Integers


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
@few
@given(drawn, counts)
def test_integers_extend_or_lose_their_upper_bits(to, source, rng, n):
    a = integers(rng, n, bits_of(source))
    (got,) = evaluate(f"cvt.{to}.{source} %d0, %s0;", [a], unsigned(bits_of(to)))
    want = [cut(number(int(x), source), bits_of(to)) for x in a]
    assert got.tolist() == want
    low, high = limits(to)
    (got,) = evaluate(f"cvt.sat.{to}.{source} %d0, %s0;", [a], unsigned(bits_of(to)))
    want = [cut(min(max(number(int(x), source), low), high), bits_of(to)) for x in a]
    assert got.tolist() == want


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16", "u32", "s32"])
@few
@given(drawn, counts)
def test_a_wide_source_register_is_truncated(to, source, rng, n):
    """The lower bits of a register of 64 are the number, with its own sign."""
    a = integers(rng, n, 64)
    (got,) = evaluate(f"cvt.{to}.{source} %d0, %s0;", [a], unsigned(bits_of(to)))
    assert got.tolist() == [cut(number(cut(int(x), bits_of(source)), source), bits_of(to)) for x in a]


@pytest.mark.parametrize("container", [16, 32])
@few
@given(drawn, counts)
def test_bytes_fill_the_register_with_their_sign(container, rng, n):
    a = integers(rng, n, container)
    for kind in ("u8", "s8"):
        for source in (kind, f"u{container}"):
            (got,) = evaluate(f"cvt.{kind}.{source} %d0, %s0;", [a], unsigned(container))
            assert got.tolist() == [cut(number(int(x), kind), container) for x in a]
        (got,) = evaluate(
            f"cvt.{'s' if kind == 's8' else 'u'}{container}.{kind} %d0, %s0;", [a], unsigned(container)
        )
        assert got.tolist() == [cut(number(int(x), kind), container) for x in a]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", INTEGERS)
@few
@given(drawn, counts)
def test_integers_to_real_numbers_round_once(source, mode, rng, n):
    a = integers(rng, n, bits_of(source))
    for kind, to in FORMATS.items():
        if to.bits == 16 and bits_of(source) == 64:
            continue
        (got,) = evaluate(f"cvt.{mode}.{kind}.{source} %d0, %s0;", [a], to.dtype)
        numbers = [number(int(x), source) for x in a]
        want = [to.encode(to.round(Fraction(x), mode) if x else 0.0) for x in numbers]
        assert_same(got, np.array(want, to.dtype), a)


# --- Real numbers to integers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", FORMATS)
@few
@given(drawn, counts)
def test_real_numbers_to_integers_saturate(source, mode, rng, n):
    """NaN becomes 0, or the integer with only its top bit set if either side has 64 bits."""
    of = FORMATS[source]
    a = codes(of, rng, n)
    a[::3] = [of.encode(of.round(Fraction(float(x)))) for x in rng.normal(0, 100, len(a[::3]))]
    limit_like = rng.choice([2.0**15, 2.0**16, 2.0**31, 2.0**32, 2.0**63, 2.0**64], len(a[1::3]))
    a[1::3] = [of.encode(of.round(Fraction(x) * rng.choice([-1, 1]))) for x in limit_like.tolist()]
    for to in INTEGERS:
        low, high = limits(to)

        def convert(x: float, low: int = low, high: int = high, to: str = to) -> int:
            if math.isnan(x):
                return 1 << (bits_of(to) - 1) if source == "f64" or bits_of(to) == 64 else 0
            return min(max(MODES[mode](x), low), high) if math.isfinite(x) else (high if x > 0 else low)

        (got,) = evaluate(f"cvt.{mode}.{to}.{source} %d0, %s0;", [a], unsigned(bits_of(to)))
        want = [cut(convert(of.decode(int(x))), bits_of(to)) for x in a]
        assert_same(got, np.array(want, unsigned(bits_of(to))), a)


def test_ftz_counts_for_integers():
    x = np.array([1e-40, -1e-40], np.float32)
    up, flushed = evaluate("cvt.rpi.s32.f32 %d0, %s0; cvt.rpi.ftz.s32.f32 %d1, %s0;", [x], np.int32, np.int32)
    assert up.tolist() == [1, 0]
    assert flushed.tolist() == [0, 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", FORMATS)
@few
@given(drawn, counts)
def test_rounding_to_integral_values(kind, mode, rng, n):
    to = FORMATS[kind]
    a = codes(to, rng, n)

    def integral(x: float) -> float:
        return math.copysign(float(MODES[mode](x)), x) if math.isfinite(x) else x

    (got,) = evaluate(f"cvt.{mode}.{kind}.{kind} %d0, %s0;", [a], to.dtype)
    assert_same(got, expected(to, integral, a), a)


# --- Real numbers to real numbers


def narrowed(to: Format, mode: str, x: float) -> float:
    return to.round(Fraction(x), mode) if math.isfinite(x) and x else x


@pytest.mark.parametrize(
    ("to", "source"),
    [("f32", "f16"), ("f32", "bf16"), ("f64", "f32"), ("f64", "f16"), ("f64", "bf16"), ("f32", "f32")],
)
@few
@given(drawn, counts)
def test_widening_is_exact(to, source, rng, n):
    wide, of = FORMATS[to], FORMATS[source]
    a = codes(of, rng, n)
    (got,) = evaluate(f"cvt.{to}.{source} %d0, %s0;", [a], wide.dtype)
    assert_same(got, np.array([wide.encode(of.decode(int(x))) for x in a], wide.dtype), a)
    (got,) = evaluate(f"cvt.sat.{to}.{source} %d0, %s0;", [a], wide.dtype)
    assert_same(got, np.array([wide.encode(saturated(of.decode(int(x)))) for x in a], wide.dtype), a)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_every_half_converts_exactly(kind):
    to = FORMATS[kind]
    every = np.arange(1 << 16, dtype=np.uint16)
    wide, back = evaluate(
        f"cvt.f32.{kind} %d0, %s0; cvt.rn.{kind}.f32 %d1, %d0;", [every], np.uint32, np.uint16
    )
    want = np.array([F32.encode(to.decode(int(x))) for x in every], np.uint32)
    assert_same(wide, want, every)
    is_nan = (every & 0x7FFF) > to.infinity
    assert_same(back, np.where(is_nan, np.uint16(to.nan), every), every)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(
    ("to", "source"), [("f32", "f64"), ("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64")]
)
@few
@given(drawn, counts)
def test_narrowing_rounds_once(to, source, mode, rng, n):
    narrow, of = FORMATS[to], FORMATS[source]
    a = codes(of, rng, n)
    # Numbers around the middle between two numbers of the narrow format.
    middle = [
        of.encode(narrow.decode(int(x)) * (1 + 2.0 ** -(narrow.mantissa + 1)))
        for x in codes(narrow, rng, len(a[::2]))
    ]
    a[::2] = np.array(middle, of.dtype) + rng.integers(-1, 2, len(middle)).astype(of.dtype)
    (got,) = evaluate(f"cvt.{mode}.{to}.{source} %d0, %s0;", [a], narrow.dtype)
    want = [narrow.encode(narrowed(narrow, mode, of.decode(int(x)))) for x in a]
    assert_same(got, np.array(want, narrow.dtype), a)


@pytest.mark.parametrize("source", ["s64", "u64"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@few
@given(drawn, counts)
def test_wide_integers_are_rounded_once(kind, source, rng, n):
    to = FORMATS[kind]
    # Next to the middle between two numbers: a double in between would round to the middle first.
    middle = 2 * rng.integers(1 << to.mantissa, 2 << to.mantissa, n) + 1
    a = (middle << rng.integers(0, 61 - to.mantissa, n)) + rng.integers(-1, 2, n)
    if source == "s64":
        a *= rng.choice([-1, 1], n)
    (got,) = evaluate(f"cvt.rn.{kind}.{source} %d0, %s0;", [a], to.dtype)
    want = [to.encode(narrowed(to, "rn", int(x))) for x in a]
    assert_same(got, np.array(want, to.dtype), a)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@few
@given(drawn, counts)
def test_pairs_have_the_first_source_above(kind, mode, relu, rng, n):
    to = FORMATS[kind]
    high, low = codes(F32, rng, n), codes(F32, rng, n)
    opcode = f"cvt.{mode}{'.relu' * relu}.{kind}x2.f32"
    (got,) = evaluate(f"{opcode} %d0, %s0, %s1;", [high, low], np.uint32)

    def convert(code: int) -> int:
        x = F32.decode(code)
        return to.encode(
            0.0 if relu and math.copysign(1, x) < 0 and not math.isnan(x) else narrowed(to, mode, x)
        )

    want = [convert(int(h)) << 16 | convert(int(w)) for h, w in zip(high, low, strict=True)]
    assert_same(got, np.array(want, np.uint32), high, low)


@few
@given(drawn, counts)
def test_satfinite_gives_the_largest_finite_number(rng, n):
    a = codes(F32, rng, n)
    (got,) = evaluate("cvt.rn.satfinite.f16.f32 %d0, %s0;", [a], np.uint16)
    largest = float(F16.largest)

    def convert(x: float) -> float:
        return math.copysign(min(abs(narrowed(F16, "rn", x)), largest), x) if not math.isnan(x) else x

    assert_same(got, np.array([F16.encode(convert(F32.decode(int(x)))) for x in a], np.uint16), a)


TF32 = Format(19, 10, -126, 127)


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
@few
@given(drawn, counts)
def test_tf32_clears_the_low_bits(mode, rng, n):
    a = codes(F32, rng, n)
    (got,) = evaluate(f"cvt.{mode}.tf32.f32 %d0, %s0;", [a], np.uint32)

    def convert(x: float) -> int:
        return F32.nan if math.isnan(x) else TF32.encode(narrowed(TF32, mode, x)) << 13

    assert_same(got, np.array([convert(F32.decode(int(x))) for x in a], np.uint32), a)


# --- fp8 and smaller. Finite codes count up with the numbers they encode, so a table is the whole format.


def table(mantissa: int, least: int, largest: int) -> list[Fraction]:
    """The numbers of the codes from 0 to that of the largest finite number."""
    fields = (divmod(code, 1 << mantissa) for code in range(largest + 1))
    return [
        (fraction + (1 << mantissa if field else 0)) * Fraction(2) ** (least - mantissa + max(field, 1) - 1)
        for field, fraction in fields
    ]


# Codes of finite numbers, and the code of NaN.
SMALL = {
    "e4m3": (table(3, -6, 0x7E), 0x7F),
    "e5m2": (table(2, -14, 0x7B), 0x7F),
    "e2m1": (table(1, 0, 0x7), 0x7),
    "e2m3": (table(3, 0, 0x1F), 0x1F),
    "e3m2": (table(2, -2, 0x1F), 0x1F),
}
SIGN = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 0x8, "e2m3": 0x20, "e3m2": 0x20}


def nearest_code(kind: str, x: float, relu: bool) -> int:
    """The nearest code, ties to the even code; beyond the largest number, that number."""
    numbers, nan = SMALL[kind]
    if math.isnan(x):
        return nan
    negative = math.copysign(1, x) < 0
    if negative and relu:
        return 0
    magnitude = Fraction(min(abs(x), 1e30))
    code = min(range(len(numbers)), key=lambda c: (abs(numbers[c] - magnitude), c % 2))
    return code | (SIGN[kind] if negative else 0)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", SMALL)
@few
@given(drawn, counts)
def test_small_formats_round_to_nearest(kind, relu, rng, n):
    scale = float(SMALL[kind][0][-1])
    a, b = (rng.normal(0, scale / 2, n).astype(np.float32) for _ in range(2))
    halves = [float(x + y) / 2 for x, y in zip(SMALL[kind][0], SMALL[kind][0][1:], strict=False)]
    a[::2] = rng.choice(halves, len(a[::2])) * rng.choice([-1, 1], len(a[::2]))
    a[:5] = [math.nan, math.inf, -math.inf, -0.0, scale * 4]
    opcode = f"cvt.rn.satfinite{'.relu' * relu}.{kind}x2.f32"
    body = f"{opcode} %d0, %s0, %s1;"
    if kind == "e2m1":
        body = f".reg .b8 %small; {opcode} %small, %s0, %s1; mov.b16 %d0, {{%small, 0}};"
    (got,) = evaluate(body, [a, b], np.uint16)
    above = 4 if kind == "e2m1" else 8
    want = [
        nearest_code(kind, float(x), relu) << above | nearest_code(kind, float(y), relu)
        for x, y in zip(a, b, strict=True)
    ]
    assert_same(got, np.array(want, np.uint16), a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_fp8_number_converts_to_f16(kind):
    every = np.arange(256, dtype=np.uint16)
    pairs = every << 8 | every[::-1]
    (got,) = evaluate(f"cvt.rn.f16x2.{kind}x2 %d0, %s0;", [pairs], np.uint32)
    numbers, _ = SMALL[kind]

    def f16_code(code: int) -> int:
        magnitude = code & 0x7F
        if magnitude >= len(numbers):
            infinite = kind == "e5m2" and magnitude == len(numbers)
            return (F16.infinity | (code & 0x80) << 8) if infinite else F16.nan
        return F16.encode(math.copysign(float(numbers[magnitude]), -1 if code & 0x80 else 1))

    want = [f16_code(int(x) >> 8) << 16 | f16_code(int(x) & 0xFF) for x in pairs]
    assert_same(got, np.array(want, np.uint32), pairs)


@few
@given(drawn, counts)
def test_fp8_from_pairs_of_f16(rng, n):
    pairs = codes(F16, rng, 2 * n)
    (got,) = evaluate("cvt.rn.satfinite.e4m3x2.f16x2 %d0, %s0;", [pairs.view(np.uint32)], np.uint16)
    want = [nearest_code("e4m3", F16.decode(int(x)), False) for x in pairs]
    assert_same(got.view(np.uint8), np.array(want, np.uint8), pairs)


@pytest.mark.parametrize("opcode", ["cvt.rs.f16x2.f32", "cvt.rn.ue8m0x2.f32", "cvt.pack.sat.u16.s32"])
def test_what_is_not_implemented_is_named(opcode):
    with pytest.raises(UnsupportedInstruction, match=opcode):
        evaluate(f"{opcode} %d0, %s0, %s0;", [np.zeros(1, np.uint32)], np.uint32)
