"""Integer arithmetic, logic, bit fields, comparison, selection and moves, against Python's integers.

PTX ISA: Integer Arithmetic, Extended-Precision, Logic and Shift, Comparison and Selection Instructions; mov.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator.errors import UnsupportedInstruction
from lanes import bits_of, counts, drawn, evaluate, few, integers, number, unsigned

TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")


def expected(
    function: Callable[..., int], kinds: list[str], sources: list[np.ndarray], bits: int
) -> np.ndarray:
    """The low bits of a function's results, from sources read as numbers of the given types."""
    rows = zip(*(map(int, s) for s in sources), strict=True)
    results = [function(*map(number, row, kinds)) for row in rows]
    return np.array([r & ((1 << bits) - 1) for r in results], unsigned(bits))


def check(
    body: str, function: Callable[..., int], kinds: list[str], to: str, rng: np.random.Generator, n: int
) -> None:
    """Checks `body`, which has the sources %s0, ... and the destination %d0 written as {}."""
    sources = [integers(rng, n, bits_of(kind)) for kind in kinds]
    registers = ", ".join(["%d0", *(f"%s{i}" for i in range(len(kinds)))])
    (got,) = evaluate(body.format(registers), sources, unsigned(bits_of(to)))
    np.testing.assert_array_equal(got, expected(function, kinds, sources, bits_of(to)))


def quotient(a: int, b: int) -> int:
    """The quotient rounded towards zero. Division by zero is not specified: all ones here."""
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b) if b else -1,
    "min": min,
    "max": max,
}
TERNARY = {"mad.lo": lambda a, b, c: a * b + c, "sad": lambda a, b, c: c + abs(a - b)}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", [*BINARY, *TERNARY])
@few
@given(drawn, counts)
def test_arithmetic_wraps_around(name, kind, rng, n):
    function = {**BINARY, **TERNARY}[name]
    check(f"{name}.{kind} {{}};", function, [kind] * (3 if name in TERNARY else 2), kind, rng, n)


@pytest.mark.parametrize("kind", TYPES)
@few
@given(drawn, counts)
def test_high_halves(kind, rng, n):
    bits = bits_of(kind)
    check(f"mul.hi.{kind} {{}};", lambda a, b: a * b >> bits, [kind] * 2, kind, rng, n)
    check(f"mad.hi.{kind} {{}};", lambda a, b, c: (a * b >> bits) + c, [kind] * 3, kind, rng, n)


@pytest.mark.parametrize("kind", TYPES[:4])
@few
@given(drawn, counts)
def test_wide_products(kind, rng, n):
    wide = f"{kind[0]}{2 * bits_of(kind)}"
    check(f"mul.wide.{kind} {{}};", lambda a, b: a * b, [kind] * 2, wide, rng, n)
    check(f"mad.wide.{kind} {{}};", lambda a, b, c: a * b + c, [kind, kind, wide], wide, rng, n)


@few
@given(drawn, counts)
def test_saturating_arithmetic(rng, n):
    def clamp(x: int) -> int:
        return max(-(2**31), min(2**31 - 1, x))

    check("add.sat.s32 {};", lambda a, b: clamp(a + b), ["s32"] * 2, "s32", rng, n)
    check("sub.sat.s32 {};", lambda a, b: clamp(a - b), ["s32"] * 2, "s32", rng, n)
    check("mad.hi.sat.s32 {};", lambda a, b, c: clamp((a * b >> 32) + c), ["s32"] * 3, "s32", rng, n)
    check("max.relu.s32 {};", lambda a, b: max(a, b, 0), ["s32"] * 2, "s32", rng, n)
    check("min.relu.s32 {};", lambda a, b: max(min(a, b), 0), ["s32"] * 2, "s32", rng, n)


@pytest.mark.parametrize("kind", ["u16", "s16"])
@pytest.mark.parametrize("name", ["add", "min", "max"])
@few
@given(drawn, counts)
def test_packed_integers(name, kind, rng, n):
    sources = [integers(rng, 2 * n, 16) for _ in range(2)]
    (got,) = evaluate(f"{name}.{kind}x2 %d0, %s0, %s1;", [s.view(np.uint32) for s in sources], np.uint32)
    np.testing.assert_array_equal(got.view(np.uint16), expected(BINARY[name], [kind] * 2, sources, 16))


UNARY = {"neg": lambda a: -a, "abs": abs}


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
@pytest.mark.parametrize("name", UNARY)
@few
@given(drawn, counts)
def test_signs(name, kind, rng, n):
    check(f"{name}.{kind} {{}};", UNARY[name], [kind], kind, rng, n)


@pytest.mark.parametrize("a", ["u", "s"])
@pytest.mark.parametrize("b", ["u", "s"])
@few
@given(drawn, counts)
def test_dp4a_adds_the_products_of_bytes(a, b, rng, n):
    def dot(x: int, y: int, c: int) -> int:
        return c + sum(number(x >> s, f"{a}8") * number(y >> s, f"{b}8") for s in (0, 8, 16, 24))

    check(f"dp4a.{a}32.{b}32 {{}};", dot, [f"{a}32", f"{b}32", "s32"], "s32", rng, n)


# --- Carries


@pytest.mark.parametrize("bits", [32, 64])
@few
@given(drawn, counts)
def test_sums_of_many_words(bits, rng, n):
    """add.cc, addc.cc, addc and their sub counterparts on three words are one operation on long integers."""
    words = [integers(rng, n, bits) for _ in range(6)]
    for name, function in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        body = (
            f"{name}.cc.u{bits} %d0, %s0, %s3; {name}c.cc.u{bits} %d1, %s1, %s4;"
            f"{name}c.u{bits} %d2, %s2, %s5;"
        )
        got = evaluate(body, words, *[unsigned(bits)] * 3)
        for row in range(n):
            a, b = (sum(int(w[row]) << (bits * i) for i, w in enumerate(words[k : k + 3])) for k in (0, 3))
            result = sum(int(w[row]) << (bits * i) for i, w in enumerate(got))
            assert result == function(a, b) % (1 << (3 * bits))


@pytest.mark.parametrize("bits", [32, 64])
@few
@given(drawn, counts)
def test_products_of_two_words(bits, rng, n):
    """mad.lo.cc and madc.hi give the double word a * b + c."""
    a, b, low, high = (integers(rng, n, bits) for _ in range(4))
    kind = f"u{bits}"
    body = f"mad.lo.cc.{kind} %d0, %s0, %s1, %s2; madc.hi.{kind} %d1, %s0, %s1, %s3;"
    got = evaluate(body, [a, b, low, high], unsigned(bits), unsigned(bits))
    for row in range(n):
        want = int(a[row]) * int(b[row]) + int(low[row]) + (int(high[row]) << bits)
        assert int(got[0][row]) | int(got[1][row]) << bits == want % (1 << (2 * bits))


# --- Logic and bit fields

LOGIC = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


@pytest.mark.parametrize("bits", [16, 32, 64])
@few
@given(drawn, counts)
def test_logic(bits, rng, n):
    kind = f"u{bits}"
    for name, function in LOGIC.items():
        check(f"{name}.b{bits} {{}};", function, [kind] * 2, kind, rng, n)
    check(f"not.b{bits} {{}};", lambda a: ~a, [kind], kind, rng, n)
    check(f"cnot.b{bits} {{}};", lambda a: a == 0, [kind], kind, rng, n)


@few
@given(drawn, counts)
def test_logic_of_predicates(rng, n):
    a, b = rng.random(n) < 0.5, rng.random(n) < 0.5
    for name, function in LOGIC.items():
        (got,) = evaluate(f"{name}.pred %d0, %s0, %s1;", [a, b], bool)
        np.testing.assert_array_equal(got, function(a, b))
    negated, copied, constant = evaluate(
        "not.pred %d0, %s0; mov.pred %d1, %s0; mov.pred %d2, -1;", [a], bool, bool, bool
    )
    np.testing.assert_array_equal(negated, ~a)
    np.testing.assert_array_equal(copied, a)
    assert constant.all()


@pytest.mark.parametrize("kind", TYPES)
@few
@given(drawn, counts, st.integers(0, 70))
def test_shifts_clamp_the_amount(kind, rng, n, amount):
    bits = bits_of(kind)
    check(f"shl.b{bits} {{}}, {amount};", lambda a: a << amount, [kind], kind, rng, n)
    check(f"shr.{kind} {{}}, {amount};", lambda a: a >> amount, [kind], kind, rng, n)
    a, by = integers(rng, n, bits), rng.integers(0, 2 * bits, n).astype(np.uint32)
    (got,) = evaluate(f"shr.{kind} %d0, %s0, %s1;", [a, by], a.dtype.type)
    np.testing.assert_array_equal(got, expected(lambda x, y: x >> y, [kind, "u32"], [a, by], bits))


def test_shr_of_a_bit_type_brings_in_zeros():
    (got,) = evaluate("shr.b32 %d0, %s0, 4;", [np.array([0x80000000], np.uint32)], np.uint32)
    assert got.tolist() == [0x08000000]


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
@few
@given(drawn, counts, st.integers(0, 80))
def test_funnel_shifts(mode, rng, n, amount):
    by = amount % 32 if mode == "wrap" else min(amount, 32)
    kinds = ["u32", "u32"]
    check(f"shf.l.{mode}.b32 {{}}, {amount};", lambda a, b: (b << 32 | a) << by >> 32, kinds, "u32", rng, n)
    check(f"shf.r.{mode}.b32 {{}}, {amount};", lambda a, b: (b << 32 | a) >> by, kinds, "u32", rng, n)


@pytest.mark.parametrize("bits", [32, 64])
@few
@given(drawn, counts)
def test_counts_of_bits(bits, rng, n):
    kind, signed = f"u{bits}", f"s{bits}"
    check(f"clz.b{bits} {{}};", lambda a: bits - a.bit_length(), [kind], "u32", rng, n)
    check(f"popc.b{bits} {{}};", lambda a: a.bit_count(), [kind], "u32", rng, n)
    check(f"brev.b{bits} {{}};", lambda a: int(f"{a:0{bits}b}"[::-1], 2), [kind], kind, rng, n)
    check(f"bfind.{kind} {{}};", lambda a: a.bit_length() - 1, [kind], "u32", rng, n)
    check(f"bfind.{signed} {{}};", lambda a: (a ^ (a >> bits)).bit_length() - 1, [signed], "u32", rng, n)
    check(f"bfind.shiftamt.{kind} {{}};", lambda a: bits - a.bit_length() if a else -1, [kind], "u32", rng, n)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@settings(few, max_examples=12)
@given(drawn, counts, st.integers(0, 80), st.integers(0, 80))
def test_bit_field_extract(kind, rng, n, position, length):
    """Bits beyond the top repeat the field's top bit if the type is signed, and are zero otherwise."""
    bits = bits_of(kind)

    def extract(a: int) -> int:
        if length == 0:
            return 0
        field = (a % (1 << bits)) >> position & ((1 << length) - 1)
        top = min(position + length - 1, bits - 1)
        if kind[0] == "s" and a >> top & 1:
            field |= -1 << max(top - position + 1, 0)
        return field

    check(f"bfe.{kind} {{}}, {position}, {length};", extract, [kind], kind, rng, n)


@pytest.mark.parametrize("bits", [32, 64])
@settings(few, max_examples=12)
@given(drawn, counts, st.integers(0, 80), st.integers(0, 80))
def test_bit_field_insert(bits, rng, n, position, length):
    kind = f"u{bits}"
    ones = ((1 << length) - 1) << position

    def insert(field: int, into: int) -> int:
        return (into & ~ones) | (field << position & ones)

    check(f"bfi.b{bits} {{}}, {position}, {length};", insert, [kind] * 2, kind, rng, n)


@few
@given(drawn, counts, st.integers(0, 255))
def test_lop3_is_its_table(rng, n, table):
    def lookup(a: int, b: int, c: int) -> int:
        rows = ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1) for i in range(32))
        return sum((table >> row & 1) << i for i, row in enumerate(rows))

    check(f"lop3.b32 {{}}, {table};", lookup, ["u32"] * 3, "u32", rng, n)


PERMUTATIONS = {
    "": None,
    ".f4e": lambda c: [c, c + 1, c + 2, c + 3],
    ".b4e": lambda c: [c, c - 1, c - 2, c - 3],
    ".rc8": lambda c: [c] * 4,
    ".ecl": lambda c: [max(i, c) for i in range(4)],
    ".ecr": lambda c: [min(i, c) for i in range(4)],
    ".rc16": lambda c: [0, 1, 0, 1] if c % 2 == 0 else [2, 3, 2, 3],
}


@pytest.mark.parametrize("mode", PERMUTATIONS)
@few
@given(drawn, counts)
def test_prmt(mode, rng, n):
    def permute(a: int, b: int, c: int) -> int:
        data = (b << 32 | a).to_bytes(8, "little")
        if PERMUTATIONS[mode]:
            return int.from_bytes([data[i % 8] for i in PERMUTATIONS[mode](c % 4)], "little")
        nibbles = [c >> shift & 15 for shift in (0, 4, 8, 12)]
        chosen = [(data[k & 7], k >> 3) for k in nibbles]
        return int.from_bytes([255 * (byte >> 7) if sign else byte for byte, sign in chosen], "little")

    check(f"prmt.b32{mode} {{}};", permute, ["u32"] * 3, "u32", rng, n)


# --- Comparison and selection

COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@pytest.mark.parametrize("kind", [*TYPES, "b16", "b32", "b64"])
@few
@given(drawn, counts)
def test_setp(kind, rng, n):
    a, b = integers(rng, n, bits_of(kind)), integers(rng, n, bits_of(kind))
    names = [*COMPARISONS, *(UNSIGNED_NAMES if kind[0] == "u" else ())]
    if kind[0] == "b":
        names = ["eq", "ne"]
    for name in names:
        (got,) = evaluate(f"setp.{name}.{kind} %d0, %s0, %s1;", [a, b], bool)
        compare = COMPARISONS[UNSIGNED_NAMES.get(name, name)]
        want = [compare(number(int(x), kind), number(int(y), kind)) for x, y in zip(a, b, strict=True)]
        assert got.tolist() == want


@pytest.mark.parametrize("name", LOGIC)
@pytest.mark.parametrize("negated", [False, True])
@few
@given(drawn, counts)
def test_setp_combines_with_a_predicate(name, negated, rng, n):
    """p = compare op c, q = not compare op c."""
    a, b, c = integers(rng, n, 32), integers(rng, n, 32), rng.random(n) < 0.5
    got = evaluate(f"setp.lt.{name}.u32 %d0|%d1, %s0, %s1, {'!' * negated}%s2;", [a, b, c], bool, bool)
    other = ~c if negated else c
    np.testing.assert_array_equal(got[0], LOGIC[name](a < b, other))
    np.testing.assert_array_equal(got[1], LOGIC[name](a >= b, other))


@few
@given(drawn, counts)
def test_setp_writes_the_opposite_and_may_read_what_it_writes(rng, n):
    a, b, c = integers(rng, n, 32), integers(rng, n, 32), rng.random(n) < 0.5
    less, not_less = evaluate("setp.lt.s32 %d0|%d1, %s0, %s1;", [a, b], bool, bool)
    np.testing.assert_array_equal(less, a.view(np.int32) < b.view(np.int32))
    np.testing.assert_array_equal(not_less, ~less)
    body = "mov.pred %d0, %s2; setp.eq.or.b32 %d0, %s0, %s1, %d0;"
    np.testing.assert_array_equal(evaluate(body, [a, b, c], bool)[0], (a == b) | c)


@few
@given(drawn, counts)
def test_set(rng, n):
    a, b, c = integers(rng, n, 32), integers(rng, n, 32), rng.random(n) < 0.5
    less = a.view(np.int32) < b.view(np.int32)
    body = (
        "set.lt.u32.s32 %d0, %s0, %s1; set.lt.f32.s32 %d1, %s0, %s1; set.lt.and.s32.s32 %d2, %s0, %s1, !%s2;"
    )
    mask, one, both = evaluate(body, [a, b, c], np.uint32, np.float32, np.int32)
    np.testing.assert_array_equal(mask, np.where(less, 0xFFFFFFFF, 0))
    np.testing.assert_array_equal(one, less.astype(np.float32))
    np.testing.assert_array_equal(both, np.where(less & ~c, -1, 0))


@pytest.mark.parametrize("bits", [16, 32, 64])
@few
@given(drawn, counts)
def test_selection(bits, rng, n):
    a, b, p = integers(rng, n, bits), integers(rng, n, bits), rng.random(n) < 0.5
    (got,) = evaluate(f"selp.b{bits} %d0, %s0, %s1, %s2;", [a, b, p], a.dtype.type)
    np.testing.assert_array_equal(got, np.where(p, a, b))
    c = integers(rng, n, 32)
    (got,) = evaluate(f"slct.u{bits}.s32 %d0, %s0, %s1, %s2;", [a, b, c], a.dtype.type)
    np.testing.assert_array_equal(got, np.where(c.view(np.int32) >= 0, a, b))
    real = rng.standard_normal(n).astype(np.float32)
    (got,) = evaluate(f"slct.b{bits}.f32 %d0, %s0, %s1, %s2;", [a, b, real], a.dtype.type)
    np.testing.assert_array_equal(got, np.where(real >= 0, a, b))


# --- mov


@pytest.mark.parametrize(("whole", "count"), [(32, 2), (64, 2), (64, 4)])
@few
@given(drawn, counts)
def test_vectors_pack_from_the_lowest_bits(whole, count, rng, n):
    part = whole // count
    parts = [integers(rng, n, part) for _ in range(count)]
    names = ", ".join(f"%s{i}" for i in range(count))
    (packed,) = evaluate(f"mov.b{whole} %d0, {{{names}}};", parts, unsigned(whole))
    np.testing.assert_array_equal(packed.view(unsigned(part)).reshape(n, count).T, parts)
    names = ", ".join(f"%d{i}" for i in range(count))
    back = evaluate(f"mov.b{whole} {{{names}}}, %s0;", [packed], *[unsigned(part)] * count)
    np.testing.assert_array_equal(back, parts)


def test_vectors_may_drop_parts():
    x = np.array([0x1111222233334444], np.uint64)
    (high,) = evaluate("mov.b64 {_, %d0}, %s0;", [x], np.uint32)
    (low,) = evaluate("mov.b64 {%d0, _}, %s0;", [x], np.uint32)
    assert (high.tolist(), low.tolist()) == ([0x11112222], [0x33334444])


def test_immediates_fit_their_register():
    """A negative 16-bit number has zeros above it in its register, which wider reads may see."""
    body = (
        ".reg .b16 %h; mov.b16 %h, -2; cvt.u32.u16 %d0, %h; mov.b32 %d1, {%h, %h}; mov.b32 %d2, 0f3F800000;"
    )
    x = np.zeros(1, np.uint32)
    wide, both, one = evaluate(body, [x], np.uint32, np.uint32, np.float32)
    assert (wide.tolist(), both.tolist(), one.tolist()) == ([0xFFFE], [0xFFFEFFFE], [1.0])


def test_clocks_go_forward():
    body = "mov.u32 %d0, %clock; mov.u64 %d1, %clock64; nanosleep.u32 20; mov.u64 %d2, %globaltimer;"
    first, second, third = evaluate(body, [np.zeros(32, np.uint32)], np.uint32, np.uint64, np.uint64)
    assert (first < second).all()
    assert (second < third).all()


@pytest.mark.parametrize(
    "instruction",
    ["add.v2.s32 %d0, %s0, %s0;", "setp.lt.b32 %p, %s0, %s0;", "lop3.or.b32 %d0|%p, %s0, %s0, %s0, 1, %p;"],
)
def test_what_is_not_implemented_is_named(instruction):
    opcode = instruction.split()[0]
    with pytest.raises(UnsupportedInstruction, match=opcode):
        evaluate(f".reg .pred %p; mov.pred %p, 0; {instruction}", [np.zeros(1, np.uint32)], np.uint32)
