"""The exchange between the lanes of a warp, against PTX's description of each instruction.

PTX ISA: shfl.sync, vote.sync, match.sync, redux.sync, elect.sync.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash4_torch.emulator.report import EmulationError
from lanes import LANES, drawn, evaluate, few, integers

ALL = 0xFFFFFFFF


def source_lane(mode: str, lane: int, b: int, c: int) -> int | None:
    """The lane that shfl reads, or None outside of the segment (PTX ISA, shfl.sync)."""
    clamp, segment, by = c & 31, c >> 8 & 31, b & 31
    first, last = lane & segment, (lane & segment) | (clamp & ~segment)
    if mode == "up":
        return lane - by if lane - by >= last else None
    source = {"down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
    return source if source <= last else None


@pytest.mark.parametrize("width", [32, 16, 8, 2])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@few
@given(drawn, st.integers(0, 31))
def test_shuffles(mode, width, rng, by):
    c = (LANES - width) << 8 | (0 if mode == "up" else 31)
    a = integers(rng, LANES, 32)
    got, inside = evaluate(f"shfl.sync.{mode}.b32 %d0|%d1, %s0, {by}, {c}, -1;", [a], np.uint32, bool)
    sources = [source_lane(mode, lane, by, c) for lane in range(LANES)]
    assert got.tolist() == [int(a[lane if s is None else s]) for lane, s in enumerate(sources)]
    assert inside.tolist() == [s is not None for s in sources]


@few
@given(drawn)
def test_shuffle_by_lane(rng):
    a, b = integers(rng, LANES, 32), rng.integers(0, LANES, LANES).astype(np.uint32)
    (got,) = evaluate("shfl.sync.idx.b32 %d0, %s0, %s1, 31, -1;", [a, b], np.uint32)
    np.testing.assert_array_equal(got, a[b])


def test_shuffle_may_write_what_it_reads():
    a = np.arange(LANES, dtype=np.uint32)
    (got,) = evaluate("mov.b32 %d0, %s0; shfl.sync.bfly.b32 %d0, %d0, 1, 31, -1;", [a], np.uint32)
    np.testing.assert_array_equal(got, a ^ 1)


def test_a_lane_that_does_not_take_part_gives_poison():
    a = np.full(8, 5, np.uint32)
    (got,) = evaluate("shfl.sync.down.b32 %d0, %s0, 4, 31, 0xff;", [a], np.uint32)
    assert got.tolist() == [5] * 4 + [0x7FFF7FFF] * 4


@few
@given(drawn, st.sampled_from([1, 9, 32]))
def test_votes(rng, n):
    members = (1 << n) - 1
    for p in (rng.random(n) < 0.5, np.zeros(n, bool), np.ones(n, bool)):
        body = (
            f"vote.sync.all.pred %d0, %s0, {members}; vote.sync.any.pred %d1, %s0, {members};"
            f"vote.sync.uni.pred %d2, %s0, {members}; vote.sync.all.pred %d3, !%s0, {members};"
            f"vote.sync.ballot.b32 %d4, %s0, {members}; activemask.b32 %d5;"
        )
        every, any_, same, none, ballot, active = evaluate(
            body, [p], bool, bool, bool, bool, np.uint32, np.uint32
        )
        for got, want in (
            (every, p.all()),
            (any_, p.any()),
            (same, p.all() or not p.any()),
            (none, not p.any()),
        ):
            assert got.tolist() == [want] * n
        assert ballot.tolist() == [sum(int(v) << lane for lane, v in enumerate(p))] * n
        assert active.tolist() == [members] * n


@pytest.mark.parametrize("bits", [32, 64])
@few
@given(drawn, st.sampled_from([5, 32]))
def test_match(bits, rng, n):
    members = (1 << n) - 1
    a = rng.integers(0, 3, n).astype(f"u{bits // 8}")
    (got,) = evaluate(f"match.any.sync.b{bits} %d0, %s0, {members};", [a], np.uint32)
    assert got.tolist() == [sum(1 << lane for lane in range(n) if a[lane] == x) for x in a]
    for values in (a, np.full_like(a, 7)):
        agree = len(set(values.tolist())) == 1
        body = f"match.all.sync.b{bits} %d0|%d1, %s0, {members};"
        lanes, predicate = evaluate(body, [values], np.uint32, bool)
        assert lanes.tolist() == [members if agree else 0] * n
        assert predicate.tolist() == [agree] * n


REDUCTIONS = {
    "add.u32": lambda a: int(a.sum(dtype=np.uint64)) & ALL,
    "add.s32": lambda a: int(a.sum(dtype=np.uint64)) & ALL,
    "min.u32": lambda a: int(a.min()),
    "max.u32": lambda a: int(a.max()),
    "min.s32": lambda a: int(a.view(np.int32).min()) & ALL,
    "max.s32": lambda a: int(a.view(np.int32).max()) & ALL,
    "and.b32": lambda a: int(np.bitwise_and.reduce(a)),
    "or.b32": lambda a: int(np.bitwise_or.reduce(a)),
    "xor.b32": lambda a: int(np.bitwise_xor.reduce(a)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@few
@given(drawn, st.sampled_from([5, 32]))
def test_redux(name, rng, n):
    a = integers(rng, n, 32)
    (got,) = evaluate(f"redux.sync.{name} %d0, %s0, {(1 << n) - 1};", [a], np.uint32)
    assert got.tolist() == [REDUCTIONS[name](a)] * n


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("nan_wins", [False, True])
@few
@given(drawn)
def test_redux_f32(name, absolute, nan_wins, rng):
    a = rng.standard_normal(LANES).astype(np.float32)
    a[rng.random(LANES) < 0.1] = math.nan
    opcode = f"redux.sync.{name}{'.abs' * absolute}{'.NaN' * nan_wins}.f32"
    (got,) = evaluate(f"{opcode} %d0, %s0, -1;", [a], np.float32)
    values = np.abs(a) if absolute else a
    plain = {"min": (np.min, np.nanmin), "max": (np.max, np.nanmax)}[name][0 if nan_wins else 1]
    np.testing.assert_array_equal(got, np.full(LANES, plain(values)))


@pytest.mark.parametrize("first", [0, 3])
def test_elect_chooses_one_lane(first):
    """PTX leaves open which lane is elected; the engine takes the lowest that takes part."""
    body = f"""
    .reg .pred %in; .reg .b32 %lane;
    mov.u32 %lane, %laneid;
    mov.u32 %d0, 77; mov.pred %d1, 0;
    setp.ge.u32 %in, %lane, {first};
    @%in elect.sync %d0|%d1, {ALL - (1 << first) + 1};
    """
    leader, elected = evaluate(body, [np.zeros(LANES, np.uint32)], np.uint32, bool)
    assert leader.tolist() == [77] * first + [first] * (LANES - first)
    assert np.flatnonzero(elected).tolist() == [first]


def test_elect_may_drop_the_leader():
    (elected,) = evaluate("elect.sync _|%d0, -1;", [np.zeros(LANES, np.uint32)], bool)
    assert np.flatnonzero(elected).tolist() == [0]


INSTRUCTIONS = (
    "shfl.sync.idx.b32 %d0, %s0, 0, 31, {};",
    "vote.sync.ballot.b32 %d0, %p, {};",
    "match.any.sync.b32 %d0, %s0, {};",
    "redux.sync.add.u32 %d0, %s0, {};",
    "elect.sync %d0|%p, {};",
)


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_members_execute_together(instruction):
    """A member mask that names an absent lane, or omits a present one, is an error."""
    body = """
    .reg .pred %p, %in; .reg .b32 %lane;
    mov.u32 %lane, %laneid; mov.pred %p, 0; mov.u32 %d0, 0;
    setp.lt.u32 %in, %lane, 16;
    @%in """
    a = np.zeros(LANES, np.uint32)
    evaluate(body + instruction.format(0xFFFF), [a], np.uint32)
    with pytest.raises(EmulationError, match="ffff0000, which do not execute"):
        evaluate(body + instruction.format(-1), [a], np.uint32)
    with pytest.raises(EmulationError, match=r"0000ff00 .*not in the member mask"):
        evaluate(body + instruction.format(0xFF), [a], np.uint32)


def test_an_instruction_waits_for_lanes_to_exit():
    """`evaluate` runs 8 lanes here, and the others leave at the end of the program."""
    (got,) = evaluate("redux.sync.add.u32 %d0, %s0, -1;", [np.ones(8, np.uint32)], np.uint32)
    assert got.tolist() == [8] * 8
