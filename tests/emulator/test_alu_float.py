"""Floating-point arithmetic against exact rational arithmetic.

PTX ISA: Floating Point, Half Precision and Mixed Precision Floating Point Instructions.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings

from exact import F16, F32, F64, FORMATS, arithmetic, assert_same, codes, expected, saturated
from lanes import counts, drawn, evaluate, few

SOURCES = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2}


def registers(count: int) -> str:
    return ", ".join(["%d0", *(f"%s{i}" for i in range(count))])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("operation", SOURCES)
@few
@given(drawn, counts)
def test_f32_rounds_the_exact_result_once(operation, ftz, mode, rng, n):
    sources = [codes(F32, rng, n) for _ in range(SOURCES[operation])]
    opcode = f"{operation}.{mode}{'.ftz' * ftz}.f32"
    (got,) = evaluate(f"{opcode} {registers(len(sources))};", sources, np.uint32)
    want = expected(F32, lambda *x: arithmetic(operation, x, F32, mode, ftz), *sources)
    assert_same(got, want, *sources)


@pytest.mark.parametrize("mode", ["rn", "rm"])
@pytest.mark.parametrize("operation", SOURCES)
@few
@given(drawn, counts)
def test_f64_rounds_the_exact_result_once(operation, mode, rng, n):
    sources = [codes(F64, rng, n) for _ in range(SOURCES[operation])]
    (got,) = evaluate(f"{operation}.{mode}.f64 {registers(len(sources))};", sources, np.uint64)
    assert_same(got, expected(F64, lambda *x: arithmetic(operation, x, F64, mode), *sources), *sources)


@pytest.mark.parametrize("mode", ["rn", "rm"])
@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
@few
@given(drawn, counts)
def test_f32x2_is_f32_twice(operation, ftz, mode, rng, n):
    pairs = [codes(F32, rng, 2 * n) for _ in range(SOURCES[operation])]
    opcode = f"{operation}.{mode}{'.ftz' * ftz}.f32x2"
    (got,) = evaluate(f"{opcode} {registers(len(pairs))};", [p.view(np.uint64) for p in pairs], np.uint64)
    want = expected(F32, lambda *x: arithmetic(operation, x, F32, mode, ftz), *pairs)
    assert_same(got.view(np.uint32), want, *pairs)


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
@few
@given(drawn, counts)
def test_sat_clamps_to_one_and_makes_nan_zero(operation, rng, n):
    sources = [codes(F32, rng, n) for _ in range(SOURCES[operation])]
    (got,) = evaluate(
        f"{operation}.sat.f32 {registers(len(sources))};".replace("fma", "fma.rn"), sources, np.uint32
    )
    assert_same(got, expected(F32, lambda *x: saturated(arithmetic(operation, x, F32)), *sources), *sources)


def relu(x: float) -> float:
    return 0.0 if x < 0 else x


HALF_CLAMPS = {"": lambda x: x, ".sat": saturated, ".relu": relu}


@pytest.mark.parametrize("clamp", HALF_CLAMPS)
@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
@few
@given(drawn, counts)
def test_half_precision_rounds_the_exact_result_once(operation, kind, clamp, rng, n):
    if clamp == ".relu" and operation != "fma":
        clamp = ""
    half = FORMATS[kind.removesuffix("x2")]
    packed = kind.endswith("x2")
    sources = [codes(half, rng, n * (1 + packed)) for _ in range(SOURCES[operation])]
    given_sources = [s.view(np.uint32) for s in sources] if packed else sources
    opcode = f"{operation}.rn{clamp}.{kind}"
    (got,) = evaluate(f"{opcode} {registers(len(sources))};", given_sources, given_sources[0].dtype.type)
    want = expected(half, lambda *x: HALF_CLAMPS[clamp](arithmetic(operation, x, half)), *sources)
    assert_same(got.view(np.uint16), want, *sources)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("tiny", [2.0**-24, 2.0**-20, 2.0**-60, 2.0**-110])
def test_half_precision_sees_what_lies_far_below_a_tie(kind, tiny):
    """The product a * b lies half-way between two numbers; the third source decides, beyond f32 and f64."""
    half = FORMATS[kind]
    if tiny < 2.0 ** (half.least - half.mantissa):
        tiny = 2.0 ** (half.least - half.mantissa)
    unit = 2.0**-half.mantissa
    ties = [(1 + k * unit, 1.5, sign * tiny) for k in (1, 3, 5, 7) for sign in (-1, 1)]
    sources = [np.array([half.encode(row[i]) for row in ties], half.dtype) for i in range(3)]
    (got,) = evaluate(f"fma.rn.{kind} %d0, %s0, %s1, %s2;", sources, half.dtype)
    assert_same(got, expected(half, lambda *x: arithmetic("fma", x, half), *sources), *sources)


@pytest.mark.parametrize("operation", ["add", "mul", "fma"])
@few
@given(drawn, counts)
def test_f16_flushes_subnormals(operation, rng, n):
    sources = [codes(F16, rng, n) for _ in range(SOURCES[operation])]
    (got,) = evaluate(f"{operation}.rn.ftz.f16 {registers(len(sources))};", sources, np.uint16)
    want = expected(F16, lambda *x: arithmetic(operation, x, F16, ftz=True), *sources)
    assert_same(got, want, *sources)


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("operation", ["add", "sub", "fma"])
@few
@given(drawn, counts)
def test_mixed_precision_takes_half_precision_as_exact(operation, kind, mode, rng, n):
    half = FORMATS[kind]
    sources = [*(codes(half, rng, n) for _ in range(SOURCES[operation] - 1)), codes(F32, rng, n)]
    (got,) = evaluate(f"{operation}.{mode}.f32.{kind} {registers(len(sources))};", sources, np.uint32)
    rows = zip(*sources, strict=True)
    numbers = [[*map(half.decode, map(int, row[:-1])), F32.decode(int(row[-1]))] for row in rows]
    want = np.array([F32.encode(arithmetic(operation, row, F32, mode)) for row in numbers], np.uint32)
    assert_same(got, want, *sources)


# --- Functions

# The relative (or an absolute) error that PTX allows, and the interval that it allows it for.
APPROXIMATE = {
    "ex2": (lambda x: 2.0**x, 2.0**-22, (-120.0, 120.0)),
    "lg2": (math.log2, 2.0**-22, (2.0**-100, 2.0**100)),
    "sin": (math.sin, 2.0**-20.5, (-math.pi, math.pi)),
    "cos": (math.cos, 2.0**-20.5, (-math.pi, math.pi)),
    "tanh": (math.tanh, 2.0**-11, (-20.0, 20.0)),
    "rcp": (lambda x: 1 / x, 2.0**-23, (0.001, 1e30)),
    "sqrt": (math.sqrt, 2.0**-22, (0.0, 1e38)),
    "rsqrt": (lambda x: 1 / math.sqrt(x), 2.0**-22.9, (0.001, 1e38)),
}


@pytest.mark.parametrize("name", APPROXIMATE)
@few
@given(drawn, counts)
def test_approximate_functions_are_within_the_bound_of_ptx(name, rng, n):
    function, bound, (low, high) = APPROXIMATE[name]
    x = rng.uniform(low, high, n).astype(np.float32)
    (got,) = evaluate(f"{name}.approx.f32 %d0, %s0;", [x], np.float32)
    want = np.array([function(float(v)) for v in x])
    np.testing.assert_allclose(got, want, rtol=bound, atol=1e-30)


INF, NAN = math.inf, math.nan
# Arguments and results.
SPECIAL_VALUES = {
    "ex2": [
        (-INF, 0.0),
        (-0.0, 1.0),
        (0.0, 1.0),
        (INF, INF),
        (200.0, INF),
        (-200.0, 0.0),
        (3.0, 8.0),
        (-149.0, 2.0**-149),
    ],
    "lg2": [(-INF, NAN), (-1.0, NAN), (-0.0, -INF), (0.0, -INF), (INF, INF), (8.0, 3.0)],
    "rcp": [(-INF, -0.0), (-0.0, -INF), (0.0, INF), (INF, 0.0), (4.0, 0.25)],
    "sqrt": [(-INF, NAN), (-1.0, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, INF), (9.0, 3.0)],
    "rsqrt": [(-INF, NAN), (-1.0, NAN), (-0.0, -INF), (0.0, INF), (INF, 0.0), (4.0, 0.5)],
    "tanh": [(-INF, -1.0), (-0.0, -0.0), (0.0, 0.0), (INF, 1.0)],
    "sin": [(-INF, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, NAN)],
    "cos": [(-INF, NAN), (-0.0, 1.0), (0.0, 1.0), (INF, NAN)],
}


@pytest.mark.parametrize("name", SPECIAL_VALUES)
def test_special_values_of_functions(name):
    table = [*SPECIAL_VALUES[name], (NAN, NAN)]
    x = np.array([argument for argument, _ in table], np.float32)
    (got,) = evaluate(f"{name}.approx.f32 %d0, %s0;", [x], np.uint32)
    want = np.array([F32.encode(v) for _, v in table], np.uint32)
    assert_same(got, want, x.view(np.uint32))


@pytest.mark.parametrize("name", ["ex2", "lg2", "rcp", "sqrt", "rsqrt"])
def test_ftz_of_functions_takes_subnormals_as_zero(name):
    x = np.array([1e-40, -1e-40], np.float32)
    zeros = np.array([0.0, -0.0], np.float32)
    (got,) = evaluate(f"{name}.approx.ftz.f32 %d0, %s0;", [x], np.uint32)
    (want,) = evaluate(f"{name}.approx.ftz.f32 %d0, %s0;", [zeros], np.uint32)
    assert_same(got, want, x.view(np.uint32))


@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
@pytest.mark.parametrize("name", ["ex2", "tanh"])
@few
@given(drawn, counts)
def test_half_precision_functions(name, kind, rng, n):
    half = FORMATS[kind.removesuffix("x2")]
    x = codes(half, rng, 2 * n)
    packed = x.view(np.uint32) if kind.endswith("x2") else x
    (got,) = evaluate(f"{name}.approx.{kind} %d0, %s0;", [packed], packed.dtype.type)
    function = APPROXIMATE[name][0]
    for code, result in zip(map(int, x), map(int, got.view(np.uint16)), strict=True):
        argument = half.decode(code)
        want = math.inf if name == "ex2" and argument > 1000 else function(argument)
        want = half.round(Fraction(want)) if math.isfinite(want) and want else want
        np.testing.assert_allclose(half.decode(result), want, rtol=2.0**-half.mantissa, atol=half.decode(1))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@few
@given(drawn, counts)
def test_square_root_rounds_once(mode, rng, n):
    """The root of a 12-bit number's square is exact; next to it the rounding direction shows."""
    roots = rng.integers(1 << 11, 1 << 12, n).astype(np.float64)
    delta = rng.integers(-1, 2, n)
    x = (roots**2 + delta).astype(np.float32)
    (got,) = evaluate(f"sqrt.{mode}.f32 %d0, %s0;", [x], np.uint32)
    # The root in f64 is close enough to tell on which side of an f32 it lies.
    exact = np.sqrt(x.astype(np.float64))
    nearest = exact.astype(np.float32)
    down = np.where(nearest > exact, np.nextafter(nearest, np.float32(0)), nearest)
    up = np.where(nearest < exact, np.nextafter(nearest, np.float32(np.inf)), nearest)
    want = {"rn": nearest, "rz": down, "rm": down, "rp": up}[mode]
    assert_same(got, want.view(np.uint32), x.view(np.uint32))


# --- min and max, signs


def extreme(larger: bool, nan_wins: bool, *sources: float) -> float:
    numbers = [x for x in sources if not math.isnan(x)]
    if not numbers or (nan_wins and len(numbers) < len(sources)):
        return math.nan
    return (max if larger else min)(numbers, key=lambda x: (x, math.copysign(1, x)))


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("nan_wins", [False, True])
@pytest.mark.parametrize("sources", [2, 3])
@pytest.mark.parametrize("name", ["min", "max"])
@few
@given(drawn, counts)
def test_min_max_f32(name, sources, nan_wins, ftz, rng, n):
    """NaN loses unless .NaN is given, and -0 is less than +0."""
    arrays = [codes(F32, rng, n) for _ in range(sources)]
    opcode = f"{name}{'.ftz' * ftz}{'.NaN' * nan_wins}.f32"
    (got,) = evaluate(f"{opcode} {registers(sources)};", arrays, np.uint32)
    flush = F32.flush if ftz else lambda x: x
    want = expected(F32, lambda *x: flush(extreme(name == "max", nan_wins, *map(flush, x))), *arrays)
    assert_same(got, want, *arrays)


@pytest.mark.parametrize("nan_wins", [False, True])
@pytest.mark.parametrize("name", ["min", "max"])
@few
@given(drawn, counts)
def test_min_max_of_magnitudes(name, nan_wins, rng, n):
    a, b, c = (codes(F32, rng, n) for _ in range(3))
    modifier = ".NaN" * nan_wins

    def signed(x: float, y: float) -> float:
        magnitude = extreme(name == "max", nan_wins, abs(x), abs(y))
        return math.copysign(magnitude, math.copysign(1, x) * math.copysign(1, y))

    (got,) = evaluate(f"{name}{modifier}.xorsign.abs.f32 %d0, %s0, %s1;", [a, b], np.uint32)
    assert_same(got, expected(F32, signed, a, b), a, b)
    (got,) = evaluate(f"{name}{modifier}.abs.f32 %d0, %s0, %s1, %s2;", [a, b, c], np.uint32)
    want = expected(F32, lambda *x: extreme(name == "max", nan_wins, *map(abs, x)), a, b, c)
    assert_same(got, want, a, b, c)


@pytest.mark.parametrize("nan_wins", [False, True])
@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
@pytest.mark.parametrize("name", ["min", "max"])
@few
@given(drawn, counts)
def test_min_max_half(name, kind, nan_wins, rng, n):
    half = FORMATS[kind.removesuffix("x2")]
    sources = [codes(half, rng, 2 * n) for _ in range(2)]
    packed = [s.view(np.uint32) for s in sources] if kind.endswith("x2") else sources
    (got,) = evaluate(f"{name}{'.NaN' * nan_wins}.{kind} {registers(2)};", packed, packed[0].dtype.type)
    want = expected(half, lambda *x: extreme(name == "max", nan_wins, *x), *sources)
    assert_same(got.view(np.uint16), want, *sources)


@pytest.mark.parametrize("kind", FORMATS)
@few
@given(drawn, counts)
def test_signs(kind, rng, n):
    to = FORMATS[kind]
    a = codes(to, rng, n)
    (negative,) = evaluate(f"neg.{kind} %d0, %s0;", [a], to.dtype)
    assert_same(negative, expected(to, lambda x: -x, a), a)
    (magnitude,) = evaluate(f"abs.{kind} %d0, %s0;", [a], to.dtype)
    assert_same(magnitude, expected(to, abs, a), a)


@few
@given(drawn, counts)
def test_copysign_takes_the_sign_of_the_first_source(rng, n):
    a, b = codes(F32, rng, n), codes(F32, rng, n)
    (got,) = evaluate("copysign.f32 %d0, %s0, %s1;", [a, b], np.uint32)
    assert_same(got, (a & np.uint32(1 << 31)) | (b & np.uint32((1 << 31) - 1)), a, b)


CLASSES = {
    "finite": math.isfinite,
    "infinite": math.isinf,
    "number": lambda x: not math.isnan(x),
    "notanumber": math.isnan,
    "normal": lambda x: math.isfinite(x) and (x == 0 or abs(x) >= 2.0**-126),
    "subnormal": lambda x: 0 < abs(x) < 2.0**-126,
}


@pytest.mark.parametrize("name", CLASSES)
@few
@given(drawn, counts)
def test_testp(name, rng, n):
    a = codes(F32, rng, n)
    (got,) = evaluate(f"testp.{name}.f32 %d0, %s0;", [a], bool)
    assert got.tolist() == [CLASSES[name](F32.decode(int(x))) for x in a]


# --- Comparison

ORDERED = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def comparison(name: str, a: float, b: float) -> bool:
    unordered = math.isnan(a) or math.isnan(b)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if name.endswith("u"):
        return unordered or ORDERED[name[:-1]](a, b)
    return not unordered and ORDERED[name](a, b)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", [*ORDERED, *(f"{n}u" for n in ORDERED), "num", "nan"])
@settings(few, max_examples=3)
@given(drawn, counts)
def test_setp_of_real_numbers(name, kind, rng, n):
    to = FORMATS[kind]
    a, b = codes(to, rng, n), codes(to, rng, n)
    b = np.where(rng.random(n) < 0.3, a, b).astype(to.dtype)
    (got,) = evaluate(f"setp.{name}.{kind} %d0, %s0, %s1;", [a, b], bool)
    want = [comparison(name, to.decode(int(x)), to.decode(int(y))) for x, y in zip(a, b, strict=True)]
    assert got.tolist() == want


def test_setp_ftz_compares_subnormals_as_zero():
    a = np.array([1e-40, 1e-40, -1e-40, 1.0], np.float32)
    b = np.array([0.0, -1e-40, 1e-39, 1e-40], np.float32)
    equal, less = evaluate(
        "setp.eq.ftz.f32 %d0, %s0, %s1; setp.lt.ftz.f32 %d1, %s0, %s1;", [a, b], bool, bool
    )
    assert equal.tolist() == [True, True, True, False]
    assert less.tolist() == [False] * 4
