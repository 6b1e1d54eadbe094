"""Lanes that diverge and reconverge (warp.cpp): programs against an interpreter that runs one lane at a time.

PTX ISA: Control Flow Instructions; bar.warp.sync; Special Registers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator.engine import Options, run_ptx
from flash4_torch.emulator.report import Report

OPTIONS = (Options(), Options(compact=False), *(Options(schedule="fuzz", seed=seed) for seed in range(2)))
# A lane that spins for ever fails the test instead of hanging it.
SCHEDULES = tuple(
    Options(schedule, seed, max_instructions=2_000_000)
    for schedule, seed in (("eager", 0), ("late", 0), ("fuzz", 0), ("fuzz", 1), ("fuzz", 2))
)
schedules = pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: f"{o.schedule}{o.seed}")
VARIABLES = 4
WORD = (1 << 32) - 1


def kernel(body: str, shared_bytes: int = 512) -> str:
    """A kernel with a pointer parameter; %i is the thread's number, %out its own two words of the array."""
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out)
{{
    .shared .align 8 .b8 buffer[{shared_bytes}];
    .reg .pred %p, %q, %odd, %done;
    .reg .b32 %i, %lane, %buffer, %mine, %x, %y, %z;
    .reg .b64 %out, %all, %long;
    mov.u32 %i, %tid.x;
    mov.u32 %lane, %laneid;
    mov.u32 %buffer, buffer;
    mad.lo.u32 %mine, %i, 4, %buffer;
    and.b32 %x, %i, 1;
    setp.eq.u32 %odd, %x, 1;
    ld.param.u64 %all, [out];
    mad.wide.u32 %out, %i, 8, %all;
    {body}
    ret;
}}
"""


def run(body: str, threads: int = 32, options: Options | None = None, **launch: Any) -> np.ndarray:
    """The array (threads, 2) uint32 after the launch; it was filled with ones."""
    out = np.ones((threads, 2), np.uint32)
    run_ptx(kernel(body), [out], block=(threads, 1, 1), options=options, **launch)
    return out


def kinds(body: str, threads: int = 32, options: Options | None = None) -> list[str]:
    out = np.ones((threads, 2), np.uint32)
    report = run_ptx(kernel(body), [out], block=(threads, 1, 1), options=options, check=False)
    return [finding.kind for finding in report.findings]


# --- random structured programs


@dataclass(frozen=True)
class Condition:
    """A bit of a variable."""

    variable: int
    bit: int

    def holds(self, values: list[int]) -> bool:
        return bool(values[self.variable] >> self.bit & 1)


@dataclass(frozen=True)
class Assign:
    """to = left * factor + right, where the condition holds."""

    to: int
    left: int
    factor: int
    right: int
    condition: Condition | None


@dataclass(frozen=True)
class If:
    condition: Condition
    yes: tuple[Statement, ...]
    no: tuple[Statement, ...]


@dataclass(frozen=True)
class Loop:
    """A loop; its number of rounds is the initial value of the variable's lowest two bits."""

    variable: int
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Break:
    """Leaves the innermost loop; means nothing outside of loops."""

    condition: Condition


@dataclass(frozen=True)
class Exit:
    condition: Condition


Statement = Assign | If | Loop | Break | Exit

variables = st.integers(0, VARIABLES - 1)
conditions = st.builds(Condition, variables, st.integers(0, 31))
assignments = st.builds(Assign, variables, variables, st.integers(3, 9), variables, st.none() | conditions)
leaves = assignments | st.builds(Break, conditions) | st.builds(Exit, conditions)


def nested(inside: st.SearchStrategy[Statement]) -> st.SearchStrategy[Statement]:
    block = st.lists(inside, max_size=3).map(tuple)
    return st.builds(If, conditions, block, block) | st.builds(Loop, variables, block)


statements = st.recursive(leaves, nested, max_leaves=12)
programs = st.lists(statements, min_size=1, max_size=4).map(tuple)


@dataclass
class Writer:
    """Renders statements as PTX."""

    labels: Iterator[int] = field(default_factory=itertools.count)

    def block(self, body: tuple[Statement, ...], behind_loop: str = "") -> str:
        return "\n".join(self.statement(statement, behind_loop) for statement in body)

    def statement(self, s: Statement, behind_loop: str) -> str:
        n = next(self.labels)
        if isinstance(s, Assign):
            guard = f"{self.test(s.condition)} @%p" if s.condition else ""
            return f"{guard} mad.lo.u32 %v{s.to}, %v{s.left}, {s.factor}, %v{s.right};"
        if isinstance(s, If):
            return f"""
            {self.test(s.condition)} @!%p bra NO{n};
            {self.block(s.yes, behind_loop)} bra END{n};
            NO{n}: {self.block(s.no, behind_loop)}
            END{n}:"""
        if isinstance(s, Loop):
            return f"""
            .reg .b32 %left{n}; and.b32 %left{n}, %v{s.variable}, 3;
            HEAD{n}: setp.eq.u32 %p, %left{n}, 0; @%p bra BEHIND{n};
            {self.block(s.body, f"BEHIND{n}")}
            sub.u32 %left{n}, %left{n}, 1; bra HEAD{n};
            BEHIND{n}:"""
        if isinstance(s, Break):
            return f"{self.test(s.condition)} @%p bra {behind_loop};" if behind_loop else ""
        return f"{self.test(s.condition)} {store()} @%p exit;"

    def test(self, condition: Condition) -> str:
        return f"""
            shr.u32 %x, %v{condition.variable}, {condition.bit}; and.b32 %x, %x, 1;
            setp.ne.u32 %p, %x, 0;"""


def store() -> str:
    return " ".join(f"st.global.u32 [%mine+{4 * i}], %v{i};" for i in range(VARIABLES))


def render(program: tuple[Statement, ...]) -> str:
    """Renders a program as PTX.

    All lanes of a warp are together again after each outermost statement: an aligned barrier shows it.
    """
    writer = Writer()
    body = "\n".join(writer.statement(statement, "") + "\nbar.sync 0;" for statement in program)
    loads = " ".join(f"ld.global.u32 %v{i}, [%mine+{4 * i}];" for i in range(VARIABLES))
    return f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 words)
{{
    .reg .pred %p;
    .reg .b32 %x, %v<{VARIABLES}>;
    .reg .b64 %mine;
    mov.u32 %x, %tid.x;
    ld.param.u64 %mine, [words];
    mad.wide.u32 %mine, %x, {4 * VARIABLES}, %mine;
    {loads}
    {body}
    {store()}
    ret;
}}
"""


class Left(Exception):
    """Raised when the lane has executed Exit."""


def walk(block: tuple[Statement, ...], values: list[int], in_loop: bool = False) -> bool:
    """Executes a block for one lane; returns whether it broke out of the innermost loop."""
    for s in block:
        if isinstance(s, Assign):
            if s.condition is None or s.condition.holds(values):
                values[s.to] = (values[s.left] * s.factor + values[s.right]) & WORD
        elif isinstance(s, If):
            if walk(s.yes if s.condition.holds(values) else s.no, values, in_loop):
                return True
        elif isinstance(s, Loop):
            for _ in range(values[s.variable] & 3):
                if walk(s.body, values, in_loop=True):
                    break
        elif isinstance(s, Break):
            if in_loop and s.condition.holds(values):
                return True
        elif s.condition.holds(values):
            raise Left
    return False


def interpret(program: tuple[Statement, ...], words: np.ndarray) -> np.ndarray:
    rows = words.tolist()
    for row in rows:
        with contextlib.suppress(Left):
            walk(program, row)
    return np.array(rows, np.uint32)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(programs, st.integers(0, 99))
def test_structured_programs_run_as_lane_by_lane(program: tuple[Statement, ...], seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, WORD, (40, VARIABLES), np.uint32, endpoint=True)
    expected = interpret(program, words)
    for options in OPTIONS:
        out = words.copy()
        run_ptx(render(program), [out], block=(len(words), 1, 1), options=options)
        np.testing.assert_array_equal(out, expected)


@schedules
@pytest.mark.parametrize("leave", ["@%odd exit;", "@%odd bra END;"])
def test_barriers_do_not_wait_for_lanes_that_left_in_a_loop(leave: str, options: Options) -> None:
    """The other lanes reconverge after the branch and after the loop."""
    out = run(
        f"""
        mov.u32 %y, 0;
        shr.u32 %z, %lane, 3;
    LOOP:
        setp.ne.u32 %p, %y, 2;
        @%p bra NEXT;
        {leave}
    NEXT:
        add.u32 %y, %y, 1;
        setp.le.u32 %p, %y, %z;
        @%p bra LOOP;
        bar.sync 0;
        st.global.u32 [%out], %y;
    END:
        """,
        options=options,
    )
    assert out[:, 0].tolist() == [1 if i % 2 and i // 8 >= 2 else i // 8 + 1 for i in range(32)]


# --- bar.warp.sync


@schedules
def test_lanes_of_both_sides_wait_for_each_other(options: Options) -> None:
    """PTX ISA, bar.warp.sync: orders the accesses of the participating threads. They reconverge after it."""
    out = run(
        """
        @%odd bra ODD;
        st.shared.u32 [%mine], 7;
        bar.warp.sync 0xFFFFFFFF;
        ld.shared.u32 %y, [%mine+4];
        bra END;
    ODD:
        add.u32 %x, %i, 100;
        st.shared.u32 [%mine], %x;
        bar.warp.sync 0xFFFFFFFF;
        ld.shared.u32 %y, [%mine+-4];
    END:
        activemask.b32 %z;
        st.global.v2.u32 [%out], {%y, %z};
        """,
        options=options,
    )
    lanes = np.arange(32)
    np.testing.assert_array_equal(out[:, 0], np.where(lanes % 2, 7, lanes + 101))
    assert (out[:, 1] == WORD).all()


@schedules
@pytest.mark.parametrize("skip", ["", "bra SECOND;"])
def test_lanes_meet_where_the_warp_barrier_is_the_last_of_a_branch(skip: str, options: Options) -> None:
    """Released lanes may be at the reconvergence point at once, where the aligned barrier needs them all."""
    out = run(
        f"""
        @%odd bra ODD;
        {skip}
        bar.warp.sync 0xFFFFFFFF;
        bra END;
    ODD:
        {"bar.warp.sync 0xFFFFFFFF; bra END;" if skip else ""}
    SECOND:
        bar.warp.sync 0xFFFFFFFF;
    END:
        bar.sync 0;
        st.global.u32 [%out], 5;
        """,
        options=options,
    )
    assert (out[:, 0] == 5).all()


@schedules
def test_warp_barriers_of_other_lanes_release_nobody(options: Options) -> None:
    """Lanes 0 to 7 wait for lanes 8 to 15, which come after the upper half has used a barrier of its own."""
    out = run(
        """
        shr.u32 %x, %lane, 3;
        setp.ge.u32 %p, %x, 2; @%p bra UPPER;
        setp.eq.u32 %p, %x, 1; @%p bra SECOND;
        bar.warp.sync 0x0000FFFF;
        ld.shared.u32 %y, [%buffer];
        bra END;
    SECOND:
        ld.volatile.shared.u32 %z, [%buffer+4];
        setp.ne.u32 %p, %z, 5; @%p bra SECOND;
        st.shared.u32 [%buffer], 9;
        bar.warp.sync 0x0000FFFF;
        mov.u32 %y, 9;
        bra END;
    UPPER:
        setp.eq.u32 %p, %x, 3; @%p bra FOURTH;
        bar.warp.sync 0xFFFF0000;
        bra PUBLISH;
    FOURTH:
        bar.warp.sync 0xFFFF0000;
    PUBLISH:
        mov.u32 %z, 0;
    DELAY:
        ld.volatile.shared.u32 %y, [%buffer+8];
        add.u32 %z, %z, 1;
        setp.lt.u32 %p, %z, 8; @%p bra DELAY;
        mov.u32 %y, 9;
        st.volatile.shared.u32 [%buffer+4], 5;
    END:
        st.global.u32 [%out], %y;
        """,
        options=options,
    )
    assert (out[:, 0] == 9).all()


def test_a_warp_barrier_does_not_wait_for_lanes_that_have_exited() -> None:
    out = run("@%odd exit; bar.warp.sync 0xFFFFFFFF; st.global.u32 [%out], 3;")
    assert out[:, 0].tolist() == [3, 1] * 16


def test_a_warp_barrier_that_lanes_go_round_is_a_deadlock() -> None:
    """The odd lanes wait at the end for the even ones, which wait for them."""
    body = "@%odd bra END; bar.warp.sync 0xFFFFFFFF; END: bar.warp.sync 0xFFFFFFFF;"
    assert kinds(body) == ["deadlock"]


# --- brx.idx

TABLE = """
    shr.u32 %x, %i, 5;
    {index}
TABLE: .branchtargets ZERO, ONE, TWO;
    brx.idx %x, TABLE;
ZERO:
    mov.u32 %y, 10;
    bra END;
ONE:
    mov.u32 %y, 11;
    bra END;
TWO:
    mov.u32 %y, 12;
END:
    st.global.u32 [%out], %y;
    bar.sync 0;
"""


def test_every_warp_branches_by_its_own_index() -> None:
    out = run(TABLE.format(index=""), threads=96)
    assert out[:, 0].tolist() == [10] * 32 + [11] * 32 + [12] * 32


@pytest.mark.parametrize(
    ("index", "kind"), [("mov.u32 %x, 3;", "out-of-bounds"), ("and.b32 %x, %i, 1;", "unsupported")]
)
def test_wrong_table_branches_are_named(index: str, kind: str) -> None:
    assert kinds(TABLE.format(index=index)) == [kind]


# --- forward progress: lanes of a warp that have diverged are all scheduled eventually

WAITS_IN_WARP = {
    "volatile load": (
        "st.volatile.shared.u32 [%buffer], 5;",
        "ld.volatile.shared.u32 %x, [%buffer]; setp.ne.u32 %p, %x, 5;",
    ),
    "acquiring load": (
        "st.release.cta.shared.u32 [%buffer], 5;",
        "ld.acquire.cta.shared.u32 %x, [%buffer]; setp.ne.u32 %p, %x, 5;",
    ),
    "atomic": (
        "atom.shared.exch.b32 %x, [%buffer], 5;",
        "atom.shared.or.b32 %x, [%buffer], 0; setp.ne.u32 %p, %x, 5;",
    ),
    "atomic that counts polls": (
        "atom.shared.or.b32 %x, [%buffer], 0x80000000;",
        "atom.shared.add.u32 %x, [%buffer], 1; setp.lt.u32 %p, %x, 0x80000000;",
    ),
    "test_wait": (
        "mbarrier.arrive.shared.b64 _, [%buffer+8];",
        "mbarrier.test_wait.parity.shared.b64 %q, [%buffer+8], 0; not.pred %p, %q;",
    ),
    "try_wait": (
        "mbarrier.arrive.shared.b64 _, [%buffer+8];",
        "mbarrier.try_wait.parity.shared.b64 %q, [%buffer+8], 0; not.pred %p, %q;",
    ),
}


@schedules
@pytest.mark.parametrize("waiter_falls_through", [False, True])
@pytest.mark.parametrize(("publish", "poll"), WAITS_IN_WARP.values(), ids=WAITS_IN_WARP)
def test_a_lane_may_wait_for_another_of_its_warp(
    publish: str, poll: str, waiter_falls_through: bool, options: Options
) -> None:
    """One lane publishes, the 31 others poll, whichever side runs first."""
    waits = f"WAITS: {poll} @%p bra WAITS; bra END;"
    publishes = f"PUBLISHES: {publish} bra END;"
    first, second = (waits, publishes) if waiter_falls_through else (publishes, waits)
    condition = "%lane, 9" if waiter_falls_through else "%lane, 8"
    out = run(
        f"""
        setp.eq.u32 %p, %lane, 0;
        @%p mbarrier.init.shared.b64 [%buffer+8], 1;
        @%p st.shared.u32 [%buffer], 0;
        bar.sync 0;
        setp.{"eq" if waiter_falls_through else "ne"}.u32 %p, {condition};
        @%p bra {"PUBLISHES" if waiter_falls_through else "WAITS"};
        {first}
        {second}
    END:
        bar.sync 0;
        st.global.u32 [%out], 3;
        """,
        options=options,
    )
    assert (out[:, 0] == 3).all()


@schedules
def test_lanes_take_a_lock_in_turns(options: Options) -> None:
    """Every lane of both warps adds 1 under the lock, without an atomic addition."""
    out = run(
        """
        setp.eq.u32 %p, %i, 0;
        @%p st.global.v2.u32 [%all], {0, 0};
        bar.sync 0;
    TRY:
        atom.acquire.gpu.global.cas.b32 %x, [%all], 0, 1;
        setp.ne.u32 %q, %x, 0;
        @%q bra AGAIN;
        ld.relaxed.gpu.global.u32 %y, [%all+4];
        add.u32 %y, %y, 1;
        st.relaxed.gpu.global.u32 [%all+4], %y;
        atom.release.gpu.global.exch.b32 %x, [%all], 0;
    AGAIN:
        @%q bra TRY;
        """,
        threads=64,
        options=options,
    )
    assert out[0].tolist() == [0, 64]


# --- shapes of blocks, grids and clusters


@pytest.mark.parametrize("threads", [1, 31, 40])
def test_a_block_may_end_within_a_warp(threads: int) -> None:
    out = run("bar.sync 0; activemask.b32 %x; st.global.v2.u32 [%out], {%i, %x};", threads)
    assert out[:, 0].tolist() == list(range(threads))
    last = (1 << (threads - 1) % 32 + 1) - 1
    assert out[:, 1].tolist() == [WORD if i // 32 < (threads - 1) // 32 else last for i in range(threads)]


SPECIALS = [
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *(f"%cluster_{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz"),
    *(f"%{name}.{axis}" for name in ("clusterid", "nclusterid") for axis in "xyz"),
    *("%cluster_ctarank", "%cluster_nctarank", "%laneid", "%warpid", "%nwarpid"),
]


def special_registers(grid: tuple, cluster: tuple, block: tuple) -> Iterator[list[int]]:
    """The values that each thread reads, by CTA (x fastest) and thread."""
    for cz, cy, cx in itertools.product(*map(range, grid[::-1])):
        cta = (cx, cy, cz)
        within = [c % n for c, n in zip(cta, cluster, strict=True)]
        rank = within[0] + cluster[0] * (within[1] + cluster[1] * within[2])
        for number, (z, y, x) in enumerate(itertools.product(*map(range, block[::-1]))):
            yield [
                *(x, y, z, *block, *cta, *grid, *within, *cluster),
                *(c // n for c, n in zip(cta, cluster, strict=True)),
                *(g // n for g, n in zip(grid, cluster, strict=True)),
                *(rank, np.prod(cluster), number % 32, number // 32, -(-np.prod(block) // 32)),
            ]


def run_specials(grid: tuple, cluster: tuple, block: tuple) -> tuple[np.ndarray, Report]:
    count = len(SPECIALS)
    stores = "\n".join(
        f"mov.u32 %x, {name}; st.global.u32 [%mine+{4 * i}], %x;" for i, name in enumerate(SPECIALS)
    )
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out)
{{
    .reg .b32 %x, %t, %c, %n;
    .reg .b64 %mine;
    mov.u32 %x, %tid.z; mov.u32 %n, %ntid.y; mov.u32 %t, %tid.y; mad.lo.u32 %t, %x, %n, %t;
    mov.u32 %n, %ntid.x; mov.u32 %x, %tid.x; mad.lo.u32 %t, %t, %n, %x;
    mov.u32 %x, %ctaid.z; mov.u32 %n, %nctaid.y; mov.u32 %c, %ctaid.y; mad.lo.u32 %c, %x, %n, %c;
    mov.u32 %n, %nctaid.x; mov.u32 %x, %ctaid.x; mad.lo.u32 %c, %c, %n, %x;
    mad.lo.u32 %t, %c, {np.prod(block)}, %t;
    ld.param.u64 %mine, [out];
    mad.wide.u32 %mine, %t, {4 * count}, %mine;
    {stores}
    ret;
}}
"""
    out = np.full((np.prod(grid) * np.prod(block), count), WORD, np.uint32)
    return out, run_ptx(text, [out], grid=grid, cluster=cluster, block=block)


@pytest.mark.parametrize(
    ("grid", "cluster", "block"),
    [
        ((3, 1, 1), (1, 1, 1), (32, 1, 1)),
        ((4, 6, 2), (2, 3, 1), (5, 4, 3)),
        ((2, 2, 4), (1, 2, 4), (1, 33, 2)),
    ],
)
def test_special_registers_tell_the_place_of_a_thread(grid: tuple, cluster: tuple, block: tuple) -> None:
    out, report = run_specials(grid, cluster, block)
    np.testing.assert_array_equal(out, list(special_registers(grid, cluster, block)))
    warps = -(-np.prod(block) // 32)
    assert report.lines[0].counts == (np.prod(grid),) * warps
