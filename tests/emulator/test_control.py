"""Control flow and slots: post-dominators by definition, slots by executing with and without sharing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator import control, ptx
from flash4_torch.emulator.control import EXIT, NOWHERE

WIDTHS = {"%p": 4, "%h": 128, "%r": 128, "%f": 128, "%d": 256, "%q": 512}
TYPES = {"%p": "pred", "%h": "b16", "%r": "b32", "%f": "f32", "%d": "b64", "%q": "b128"}
REGISTERS = {"%p": 8, "%h": 3, "%r": 16, "%f": 8, "%d": 8, "%q": 3}
DECLARED = "".join(f".reg .{TYPES[stem]} {stem}<{count}>; " for stem, count in REGISTERS.items())

laws = settings(derandomize=True, deadline=None, max_examples=60)


def parse_body(body: str) -> ptx.Kernel:
    header = ".version 8.8\n.target sm_100a\n.shared .b32 buffer[64];\n"
    text = f"{header}.entry kernel()\n{{\n{DECLARED}{body}\n}}\n"
    (kernel,) = ptx.parse(text).kernels
    return kernel


# --- control flow


def reachable(successors: Sequence[Sequence[int]], start: int, without: int | None = None) -> set[int]:
    """Nodes, and EXIT, on paths from `start` that do not touch `without`."""
    seen: set[int] = set()
    work = [start]
    while work:
        node = work.pop()
        if node in seen or node == without:
            continue
        seen.add(node)
        work += successors[node] if node != EXIT else ()
    return seen


def expected_post_dominators(successors: Sequence[Sequence[int]]) -> list[int | None]:
    """Post-dominators by definition: nodes that every path to the end passes, and the nearest of those."""
    result: list[int | None] = []
    for node in range(len(successors)):
        reaches = reachable(successors, node)
        common = [
            other
            for other in reaches - {node, EXIT}
            if EXIT in reaches and EXIT not in reachable(successors, node, without=other)
        ]
        # The nearest is passed before all others: without it, none of them is reached.
        nearest = [a for a in common if not (set(common) - {a}) & reachable(successors, node, without=a)]
        result.append(nearest[0] if nearest else None)
    return result


graphs = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(st.integers(EXIT, n - 1), max_size=3, unique=True), min_size=n, max_size=n)
)


@settings(laws, max_examples=500)
@given(graphs)
def test_post_dominators_are_the_nearest_common_nodes(successors: list[list[int]]) -> None:
    assert control.post_dominators(successors) == expected_post_dominators(successors)


def test_lanes_meet_after_both_sides_of_a_branch() -> None:
    kernel = parse_body(
        """@%p1 bra right; mov.b32 %r1, 1; bra.uni meet;
        right: mov.b32 %r1, 2;
        meet: mov.b32 %r2, %r1; ret;"""
    )
    assert control.reconvergence(kernel) == [kernel.labels["meet"], *[NOWHERE] * 5]


def test_lanes_that_leave_a_loop_meet_behind_it() -> None:
    kernel = parse_body("loop: add.s32 %r1, %r1, 1; @%p1 bra loop; @!%p2 bra loop; mov.b32 %r2, 3; ret;")
    assert control.reconvergence(kernel) == [NOWHERE, 2, 3, NOWHERE, NOWHERE]


def test_a_side_that_returns_or_traps_is_not_waited_for() -> None:
    returns = parse_body("@%p1 bra leave; mov.b32 %r1, 1; ret; leave: ret;")
    assert control.reconvergence(returns)[0] == 1
    guarded = parse_body("@%p1 bra side; mov.b32 %r1, 1; side: @%p2 ret; mov.b32 %r1, 2; ret;")
    assert control.reconvergence(guarded)[0] == 2
    traps = parse_body("@%p1 bra bad; mov.b32 %r1, 1; bra.uni done; bad: trap; done: ret;")
    assert control.reconvergence(traps)[0] == 1


def test_the_lanes_of_a_table_branch_meet() -> None:
    kernel = parse_body(
        """table: .branchtargets a, b, a;
        brx.idx %r1, table; a: mov.b32 %r2, 1; bra done; b: mov.b32 %r2, 2; done: ret;"""
    )
    assert control.reconvergence(kernel) == [kernel.labels["done"], *[NOWHERE] * 4]
    assert control.blocks(kernel)[0].successors == (1, 2)


# --- what instructions read and write


@pytest.mark.parametrize(
    ("statement", "reads", "writes"),
    [
        ("@!%p1 add.s32 %r1, %r2, 3", "%p1 %r2", "%r1"),
        ("setp.lt.and.s32 %p1|%p2, %r1, 4, !%p3", "%r1 %p3", "%p1 %p2"),
        ("mov.b64 {%r1, _}, %d1", "%d1", "%r1"),
        ("mov.u32 %r1, %tid.x", "", "%r1"),
        ("ld.global.v2.b32 {%r1, %r2}, [%d1+8]", "%d1", "%r1 %r2"),
        ("st.shared.v2.b32 [%r3], {%r1, %r2}", "%r3 %r1 %r2", ""),
        ("st.shared.b32 [buffer], %r2", "%r2", ""),
        ("atom.global.add.u32 %r1, [%d1], %r2", "%d1 %r2", "%r1"),
        ("red.global.add.u32 [%d1], %r2", "%d1 %r2", ""),
        ("shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, %r3", "%r2 %r3", "%r1 %p1"),
        ("bra end", "", ""),
        ("bar.sync %r1, %r2", "%r1 %r2", ""),
        ("barrier.cta.arrive %r1, %r2", "%r1 %r2", ""),
        ("bar.warp.sync %r1", "%r1", ""),
        ("barrier.cta.red.popc.u32 %r1, %r2, %p1", "%r2 %p1", "%r1"),
        ("nanosleep.u32 %r1", "%r1", ""),
        ("mbarrier.arrive.shared.b64 %d1, [%r1], %r2", "%r1 %r2", "%d1"),
        ("mbarrier.arrive.shared::cluster.b64 _, [%r1], %r2", "%r1 %r2", ""),
        ("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2", "%r1 %r2", "%p1"),
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%r1], [%d1, {%r2, %r3}], [%r4]",
            "%r1 %d1 %r2 %r3 %r4",
            "",
        ),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64", "%r1", ""),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64", "%r1", ""),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3]", "%r3", "%r1 %r2"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r1, %r2}, %r4, [%r3]", "%r3", "%r1 %r2 %r4"),
        ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r1}", "%r3 %r1", ""),
        (
            "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2], %d1, %r3, %p1",
            "%r1 %r2 %d1 %r3 %p1",
            "",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2}, {%r1, %r2}, %d1, %p1, 1, 1, 0",
            "%f1 %f2 %r1 %r2 %d1 %p1",
            "%f1 %f2",
        ),
        ("wgmma.wait_group.sync.aligned 1", "", ""),
        ("cp.async.wait_group 0", "", ""),
    ],
)
def test_access(statement: str, reads: str, writes: str) -> None:
    found = control.access(parse_body(statement + "; end: ret;").instructions[0])
    assert (" ".join(found.reads), " ".join(found.writes)) == (reads, writes)


# --- slots


def test_slots_are_aligned_apart_and_as_wide_as_their_type() -> None:
    kernel = parse_body(
        """mov.b32 %r1, 1; mov.b16 %h1, 2; mov.f32 %f1, 0f00000000; mov.b64 %d1, 3; mov.b128 %q1, {%d1, %d1};
        setp.eq.s32 %p1, %r1, 0; setp.eq.s32 %p2, %r1, 1; ret;"""
    )
    slots = control.assign(kernel, compact=False)
    assert sorted(slots.offset) == ["%d1", "%f1", "%h1", "%p1", "%p2", "%q1", "%r1"]
    ends = 0
    for name, offset in sorted(slots.offset.items(), key=lambda item: item[1]):
        assert offset >= ends
        assert offset % (4 if name.startswith("%p") else 64) == 0
        ends = offset + WIDTHS[name[:2]]
    assert ends <= slots.bytes
    assert slots.bytes % 64 == 0


def test_a_dead_register_gives_its_space_away() -> None:
    chain = "".join(f"add.s32 %r{i + 1}, %r{i}, 1; " for i in range(1, 8))
    slots = control.assign(parse_body(f"mov.b32 %r1, 0; {chain} st.shared.b32 [buffer], %r8; ret;"))
    assert len(set(slots.offset.values())) == 2


def test_registers_of_one_instruction_never_share() -> None:
    slots = control.assign(parse_body("mov.b32 %r1, 0; shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; ret;"))
    assert slots.offset["%r1"] != slots.offset["%r2"]


def shares(body: str, first: str, second: str) -> bool:
    offset = control.assign(parse_body(body)).offset
    return offset[first] == offset[second]


USE_R2 = "mov.b32 %r2, 7; st.shared.b32 [buffer], %r2;"
USE_F2 = "mov.f32 %f2, 0f00000000; st.shared.b32 [buffer], %f2;"


@pytest.mark.parametrize("define", ["", "mov.b32 %r1, 1;"])
def test_what_a_loop_reads_again_keeps_its_space(define: str) -> None:
    loop = f"mov.b32 %r1, 0; loop: {define} st.shared.b32 [buffer], %r1; {USE_R2} @%p1 bra loop; ret;"
    assert shares(loop, "%r1", "%r2") is bool(define)


def test_a_register_takes_no_space_before_its_definition() -> None:
    body = f"{USE_R2} @%p1 bra on; on: mov.b32 %r1, 1; @%p2 bra off; off: st.shared.b32 [buffer], %r1; ret;"
    assert shares(body, "%r1", "%r2")


@pytest.mark.parametrize("guard", ["", "@%p1", "@!%p1"])
def test_a_guarded_definition_keeps_the_other_lanes_values(guard: str) -> None:
    loop = f"loop: {guard} mov.b32 %r1, 1; st.shared.b32 [buffer], %r1; {USE_R2} @%p2 bra loop; ret;"
    assert shares(loop, "%r1", "%r2") is not guard


PRODUCT = "mov.b32 %r1, 1; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1}, {%r1}, %d1, 1, 1, 1, 0;"
WAIT, WAIT_FOR_OLDER = (f"wgmma.wait_group.sync.aligned {n};" for n in (0, 1))


@pytest.mark.parametrize(
    ("body", "shared"),
    [
        (f"{PRODUCT} {WAIT} {USE_R2} {USE_F2} ret;", True),
        (f"{PRODUCT} {USE_R2} {USE_F2} {WAIT} ret;", False),
        (f"{PRODUCT} {WAIT_FOR_OLDER} {USE_R2} {USE_F2} ret;", False),
        (f"{PRODUCT} @%p1 {WAIT} {USE_R2} {USE_F2} ret;", False),
        (f"{PRODUCT} @%p1 bra on; {WAIT} on: {USE_R2} {USE_F2} ret;", False),
        (f"{PRODUCT} @%p1 bra on; {WAIT} bra wait; on: {USE_R2} {USE_F2} wait: {WAIT} ret;", False),
        (f"bra start; head: {USE_R2} {USE_F2} {WAIT} ret; start: {PRODUCT} bra head;", False),
    ],
)
def test_matrix_products_keep_their_registers_until_the_wait(body: str, shared: bool) -> None:
    assert shares(body, "%f1", "%f2") is shared
    assert shares(body, "%r1", "%r2") is shared


# Programs to execute: their instructions with what they read and write, and their branch targets.


@dataclass(frozen=True)
class Step:
    opcode: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    guard: str | None = None

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        if self.opcode == "wgmma":
            text = (
                "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
                f" {{{', '.join(self.writes)}}}, {{{', '.join(self.reads)}}}, 0, 1, 1, 1, 0"
            )
        elif self.opcode.startswith("wait"):
            text = "wgmma.wait_group.sync.aligned " + self.opcode[-1]
        else:
            writes = f"{{{', '.join(self.writes)}}}" if self.writes else "[0]"
            text = f"{self.opcode}.any {', '.join([writes, *self.reads])}"
        return guard + text + ";"


@dataclass(frozen=True)
class Node:
    """Steps, then a jump to `target` (None: a return); it is guarded if the next node is the alternative."""

    steps: tuple[Step, ...]
    target: int | None
    guarded: bool

    def __str__(self) -> str:
        jump = "ret;" if self.target is None else f"bra L{self.target};"
        return " ".join([*map(str, self.steps), ("@%p1 " if self.guarded else "") + jump])


def random_program(rng: random.Random) -> list[Node]:
    """A program with few uses for each of many registers: those are the ones that share."""
    count = rng.randint(1, 7)
    nodes = [
        Node(random_steps(rng), rng.choice([None, *range(count + 1)]), rng.random() < 0.6)
        for _ in range(count)
    ]
    return [*nodes, Node(random_steps(rng), None, False)]


def random_steps(rng: random.Random) -> tuple[Step, ...]:
    return tuple(random_step(rng) for _ in range(rng.randint(0, 5)))


def random_step(rng: random.Random) -> Step:
    opcode = rng.choices(["op", "wgmma", "wait0", "wait1"], [8, 1, 1, 1])[0]
    if opcode.startswith("wait"):
        return Step(opcode)
    if opcode == "wgmma":
        return Step(opcode, random_names(rng, "%r", 1), random_names(rng, "%f", 1))
    guard = rng.choice([None, None, "%p2", "!%p3"])
    stem = rng.choice(["%r", "%r", "%f", "%d", "%p"])
    return Step(opcode, random_names(rng, stem), random_names(rng, stem), guard)


def random_names(rng: random.Random, stem: str, least: int = 0) -> tuple[str, ...]:
    numbers = rng.sample(range(1, REGISTERS[stem]), rng.randint(least, 2))
    return tuple(f"{stem}{i}" for i in numbers)


programs = st.integers(0, 2**32).map(lambda seed: random_program(random.Random(seed)))


def render(program: list[Node]) -> ptx.Kernel:
    return parse_body("\n".join(f"L{i}: {node}" for i, node in enumerate(program)))


class Lane:
    """One lane's part of the register file, next to registers that share nothing.

    Every write makes a new value, in both. Reading compares them where the lane has written the register.
    MMAs read and write when a wait completes them, as late as they may.
    """

    def __init__(self, offset: dict[str, int]):
        self.offset = offset
        self.file: dict[int, int] = {}
        self.own: dict[str, int] = {}
        self.flying: list[Step] = []
        self.values = 0

    def granules(self, name: str) -> range:
        begin = self.offset[name] // 4
        return range(begin, begin + WIDTHS[name[:2]] // 4)

    def write(self, name: str) -> None:
        self.values += 1
        self.own[name] = self.values
        self.file.update(dict.fromkeys(self.granules(name), self.values))

    def read(self, name: str) -> None:
        if name in self.own:
            assert {self.file[g] for g in self.granules(name)} == {self.own[name]}, name

    def execute(self, step: Step, guard_holds: bool) -> None:
        if step.guard:
            self.read(step.guard.lstrip("!"))
            if not guard_holds:
                return
        if step.opcode == "wgmma":
            self.flying.append(step)
        elif step.opcode.startswith("wait"):
            allowed = int(step.opcode[-1])
            while len(self.flying) > allowed:
                product = self.flying.pop(0)
                self.use((*product.reads, *product.writes), product.writes)
        else:
            self.use(step.reads, step.writes)

    def use(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        # Handlers may write one destination before they read the next operand.
        for name in set(writes) - set(reads):
            self.write(name)
        for name in reads:
            self.read(name)
        for name in set(writes) & set(reads):
            self.write(name)


def walk(program: list[Node], lane: Lane, rng: random.Random) -> None:
    at = 0
    for _ in range(60):
        node = program[at]
        for step in node.steps:
            lane.execute(step, rng.random() < 0.5)
        if node.guarded:
            lane.read("%p1")
        if node.guarded and rng.random() < 0.5:
            at += 1
        elif node.target is None:
            return
        else:
            at = node.target


@settings(laws, max_examples=500)
@given(programs, st.integers(0, 2**32))
def test_sharing_changes_nothing_that_a_lane_reads(program: list[Node], seed: int) -> None:
    kernel = render(program)
    compact, apart = control.assign(kernel), control.assign(kernel, compact=False)
    assert set(compact.offset) == set(apart.offset)
    assert compact.bytes <= apart.bytes
    rng = random.Random(seed)
    for slots in (compact, apart):
        for _ in range(10):
            walk(program, Lane(slots.offset), rng)


@laws
@given(programs)
def test_lanes_meet_at_post_dominators_of_blocks(program: list[Node]) -> None:
    kernel = render(program)
    graph = control.blocks(kernel)
    assert [b.begin for b in graph[1:]] == [b.end for b in graph[:-1]]
    assert (graph[0].begin, graph[-1].end) == (0, len(kernel.instructions))
    nearest = expected_post_dominators(control.ways_to_the_end(kernel, graph))
    expected = [NOWHERE] * len(kernel.instructions)
    for block, at in zip(graph, nearest, strict=True):
        last = kernel.instructions[block.end - 1]
        if last.opcode == "bra" and last.guard and at is not None:
            expected[block.end - 1] = graph[at].begin
    assert control.reconvergence(kernel) == expected


@laws
@given(programs)
def test_blocks_follow_the_branches(program: list[Node]) -> None:
    kernel = render(program)
    graph = control.blocks(kernel)
    block_of = {begin: i for i, begin in enumerate(b.begin for b in graph)}
    for i, node in enumerate(program):
        begin = kernel.labels[f"L{i}"]
        block = graph[block_of[begin]]
        target = EXIT if node.target is None else block_of[kernel.labels[f"L{node.target}"]]
        after = {block_of[kernel.labels[f"L{i + 1}"]]} if node.guarded else set()
        assert set(block.successors) == {target} | after
        assert block.end - begin == len(node.steps) + 1
