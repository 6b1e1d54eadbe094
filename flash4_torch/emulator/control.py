"""Control flow of a kernel: where the lanes of a branch reconverge, and which registers may share space.

Both work on the graph of basic blocks. `reconvergence` gives each branch its immediate post-dominator.
`assign` places registers in the register file of a warp.

Sharing is safe under divergence. A slot holds one value per lane, and an instruction writes only the lanes
that execute it. So one lane's part of the file depends only on the instructions that this lane executes, in
its own order, as if it were alone: however lanes diverge, interleave and reconverge, the ordinary liveness of
one thread over the control-flow graph tells whether a lane still needs a value. Three things go beyond that:

- A guarded instruction may leave a lane's register unchanged, so its definition does not end the life of what
  the register held before.
- Some instructions read the registers of other lanes (shuffles, MMAs). Those lanes execute the same
  instruction, so for them it is a use as well. It may write one lane before it has read another, and an
  instruction with several destinations may do the same: no two registers of one instruction share a slot,
  even if one dies where the other begins.
- `wgmma.mma_async` uses its accumulators and operands after it was issued. They count as in use up to the
  `wgmma.wait_group 0` that follows, on every path. (The engine does all other work on registers at issue,
  including that of `tcgen05.ld` and `tcgen05.st`.)

Two registers share a slot if the hulls of their uses and live ranges, in the order of the instructions, do
not overlap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from flash4_torch.emulator.ptx import (
    SINK,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
    type_bytes,
)

NOWHERE = 0xFFFFFFFF  # the sides of a branch never reconverge; csrc_stubs/no_gpu/warp.cpp has the same number
EXIT = -1  # as a successor: the lane leaves the kernel

LANES = 32
_PREDICATE_BYTES = 4  # one bit per lane
_LINE = 64  # the file's size and the start of the part after the predicates are multiples of it


@dataclass(frozen=True)
class Block:
    """Instructions `begin` to `end - 1`, which a lane executes in order; successors are blocks or EXIT."""

    begin: int
    end: int
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Slots:
    """Byte offsets of virtual registers in a warp's register file, and the file's size in bytes.

    A predicate takes 4 bytes, one bit per lane. Other registers take 32 lanes of 4, 8 or 16 bytes; narrower
    types take 4.
    """

    offset: dict[str, int]
    bytes: int


def blocks(kernel: Kernel) -> list[Block]:
    """The kernel's basic blocks in the order of their instructions."""
    instructions = kernel.instructions
    begins = {0, *kernel.labels.values()}
    begins |= {i + 1 for i, ins in enumerate(instructions) if _kind(ins) in _LEAVES}
    bounds = sorted(b for b in begins if b < len(instructions))
    number = {begin: i for i, begin in enumerate(bounds)}
    ends = [*bounds[1:], len(instructions)]
    return [
        Block(begin, end, _successors(kernel, end - 1, number))
        for begin, end in zip(bounds, ends, strict=True)
    ]


_LEAVES = ("bra", "brx", "ret", "exit", "trap")


def _kind(ins: Instruction) -> str:
    return ins.opcode.partition(".")[0]


def _successors(kernel: Kernel, index: int, number: dict[int, int]) -> tuple[int, ...]:
    """The blocks that a lane can go to from a block's last instruction.

    There are none for a trap: it ends the launch.
    """
    ins = kernel.instructions[index]
    kind = _kind(ins)
    after = [] if kind in _LEAVES and ins.guard is None else [number[index + 1]]
    if kind in ("ret", "exit"):
        return (*after, EXIT)
    return (*after, *(number[kernel.labels[name]] for name in _targets(ins)))


def _targets(ins: Instruction) -> list[str]:
    """The labels that a branch names."""
    if _kind(ins) not in ("bra", "brx"):
        return []
    operand = ins.operands[-1]
    symbols = operand.elements if isinstance(operand, Vector) else (operand,)
    return list(dict.fromkeys(s.name for s in symbols if isinstance(s, Symbol)))


def reconvergence(kernel: Kernel) -> list[int]:
    """The index of the instruction where the lanes of each guarded branch or table branch reconverge.

    That is the first instruction of the immediate post-dominator of the branch's block: the first block that
    all paths from here to the kernel's end have in common. It is NOWHERE if there is none, and for all other
    instructions. Nobody waits for lanes that leave early: a path on which some lanes leave the kernel does
    not count if the other lanes can go on and leave later.
    """
    graph = blocks(kernel)
    meeting = post_dominators(ways_to_the_end(kernel, graph))
    result = [NOWHERE] * len(kernel.instructions)
    for block, at in zip(graph, meeting, strict=True):
        last = kernel.instructions[block.end - 1]
        branches = _kind(last) == "brx" or (_kind(last) == "bra" and last.guard)
        if branches and at is not None:
            result[block.end - 1] = graph[at].begin
    return result


def ways_to_the_end(kernel: Kernel, graph: Sequence[Block]) -> list[tuple[int, ...]]:
    """The successors of blocks, without the exits that lanes can bypass and still reach the end."""
    leaves = {
        i for i, block in enumerate(graph) if block.successors == (EXIT,) and block.end - block.begin == 1
    }
    ways = [block.successors for block in graph]
    for i, successors in enumerate(ways):
        onwards = tuple(s for s in successors if s != EXIT and s not in leaves)
        if len(onwards) < len(successors) and _reaches_exit(onwards, ways, without=i):
            ways[i] = onwards
    return ways


def _reaches_exit(starts: Sequence[int], successors: Sequence[Sequence[int]], without: int) -> bool:
    seen, work = {without}, list(starts)
    while work:
        node = work.pop()
        if node == EXIT:
            return True
        if node not in seen:
            seen.add(node)
            work += successors[node]
    return False


def post_dominators(successors: Sequence[Sequence[int]]) -> list[int | None]:
    """The immediate post-dominator of each node of a graph, given the successors of each (EXIT: the end).

    It is None where only the end itself is common to all paths, and for nodes from which no path leads to the
    end.
    """
    # Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm", on the reversed graph.
    order = _towards_exit(successors)
    rank = {node: i for i, node in enumerate(order)}
    above = {EXIT: EXIT}

    def common(a: int, b: int) -> int:
        while a != b:
            if rank[a] > rank[b]:
                a = above[a]
            else:
                b = above[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in order[1:]:
            known = [s for s in successors[node] if s in above]
            meet = known[0]
            for other in known[1:]:
                meet = common(meet, other)
            if above.get(node) != meet:
                above[node] = meet
                changed = True
    found = [above.get(node, EXIT) for node in range(len(successors))]
    return [None if node == EXIT else node for node in found]


def _towards_exit(successors: Sequence[Sequence[int]]) -> list[int]:
    """EXIT and the nodes that reach it, in reverse postorder of a depth-first search against the edges."""
    predecessors: dict[int, list[int]] = {}
    for node, nexts in enumerate(successors):
        for following in nexts:
            predecessors.setdefault(following, []).append(node)
    postorder: list[int] = []
    seen = {EXIT}
    stack = [(EXIT, iter(predecessors.get(EXIT, ())))]
    while stack:
        node, rest = stack[-1]
        unseen = next((p for p in rest if p not in seen), None)
        if unseen is None:
            postorder.append(node)
            stack.pop()
        else:
            seen.add(unseen)
            stack.append((unseen, iter(predecessors.get(unseen, ()))))
    return postorder[::-1]


@dataclass(frozen=True)
class Access:
    """The virtual registers, by name, that an instruction reads and writes; the guard counts as read."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


# Instructions whose first operand is a register that they read. Those that begin with an address are plain.
_NO_DESTINATION = frozenset({"bra", "brx", "bar", "barrier", "nanosleep", "setmaxnreg", "wgmma", "pmevent"})


def access(ins: Instruction) -> Access:
    """What an instruction does to registers."""
    count = _destinations(ins)
    reads = [ins.guard.register] if ins.guard else []
    for operand in ins.operands[count:]:
        reads += _registers(operand)
    writes: list[Register] = []
    for operand in ins.operands[:count]:
        # An address among the operands is read, wherever it stands.
        (reads if isinstance(operand, Address) else writes).extend(_registers(operand))
    if ins.opcode.startswith("wgmma.mma_async"):
        writes += _registers(ins.operands[0])
    return Access(_names(reads), _names(writes))


def _destinations(ins: Instruction) -> int:
    """The number of leading operands that are written."""
    if not ins.operands or not isinstance(ins.operands[0], Register | Vector | Pair):
        return 0
    if ins.opcode.startswith("tcgen05.ld.red"):
        return 2
    # The reducing barriers return a value.
    if _kind(ins) in _NO_DESTINATION and "red" not in ins.opcode.split("."):
        return 0
    return 0 if ins.opcode.startswith("tcgen05.dealloc") else 1


def _registers(operand: Operand) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Negated):
        yield operand.register
    elif isinstance(operand, Pair):
        yield from (operand.first, operand.second)
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _registers(element)
    elif isinstance(operand, Address):
        if isinstance(operand.base, Register):
            yield operand.base
        for element in operand.coordinates:
            yield from _registers(element)


def _names(registers: Iterable[Register]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.name for r in registers if not r.special and r != SINK))


def assign(kernel: Kernel, *, compact: bool = True) -> Slots:
    """Places the registers that the kernel's instructions name.

    compact: let registers of one width share space where no lane needs both. Without it each register has its
    own space, and reading one that nothing wrote gives what the file held at the start; with it, possibly
    what another register left there.
    """
    accesses = [access(ins) for ins in kernel.instructions]
    names = list(dict.fromkeys(name for a in accesses for name in (*a.reads, *a.writes)))
    by_width: dict[int, list[str]] = {}
    for name in names:
        by_width.setdefault(_width(kernel.registers[name]), []).append(name)
    spans = _spans(kernel, accesses, names) if compact else None
    offset: dict[str, int] = {}
    end = 0
    for width, members in sorted(by_width.items()):
        numbers = _share([spans[name] for name in members]) if spans else range(len(members))
        offset |= {name: end + number * width for name, number in zip(members, numbers, strict=True)}
        end = -(-(end + (max(numbers) + 1) * width) // _LINE) * _LINE
    return Slots(offset, end)


def _width(type_name: str) -> int:
    """Bytes of a register in the file."""
    return _PREDICATE_BYTES if type_name == "pred" else LANES * max(4, type_bytes(type_name))


def _share(spans: Sequence[tuple[int, int]]) -> list[int]:
    """A slot's number for each (first, last) span: the fewest slots in which no two spans overlap."""
    result = [0] * len(spans)
    busy: list[tuple[int, int]] = []  # (last, slot)
    slots = 0
    for i in sorted(range(len(spans)), key=lambda i: spans[i]):
        first, last = spans[i]
        if busy and busy[0][0] < first:
            slot = heapq.heappop(busy)[1]
        else:
            slot = slots
            slots += 1
        result[i] = slot
        heapq.heappush(busy, (last, slot))
    return result


def _spans(kernel: Kernel, accesses: Sequence[Access], names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The first and the last instruction at which each register is named, live or in flight.

    Sets of registers are integers with one bit per register.
    """
    bit = {name: 1 << i for i, name in enumerate(names)}
    reads = [_union(bit[name] for name in a.reads) for a in accesses]
    writes = [_union(bit[name] for name in a.writes) for a in accesses]
    graph = blocks(kernel)
    entering, leaving = _live(kernel, graph, reads, writes)
    touched = [r | w for r, w in zip(reads, writes, strict=True)]
    flying_in, flying_out = _in_flight(kernel, graph, touched)
    entering = [a | b for a, b in zip(entering, flying_in, strict=True)]
    leaving = [a | b for a, b in zip(leaving, flying_out, strict=True)]

    forwards = ((b.begin, entering[i], range(b.begin, b.end)) for i, b in enumerate(graph))
    backwards = (
        (b.end - 1, leaving[i], range(b.end - 1, b.begin - 1, -1))
        for i, b in reversed(list(enumerate(graph)))
    )
    first, last = _first_seen(forwards, touched), _first_seen(backwards, touched)
    return {name: (first[i], last[i]) for i, name in enumerate(names)}


def _union(sets: Iterable[int]) -> int:
    result = 0
    for one in sets:
        result |= one
    return result


def _first_seen(walk: Iterable[tuple[int, int, range]], touched: Sequence[int]) -> dict[int, int]:
    """The instruction at which a walk of blocks first meets each register.

    walk: for each block, the instruction at the edge where the walk enters, the registers there, the
    instructions.
    """
    seen = 0
    result: dict[int, int] = {}

    def meet(registers: int, at: int) -> None:
        nonlocal seen
        for register in _members(registers & ~seen):
            result[register] = at
        seen |= registers

    for edge, present, indices in walk:
        meet(present, edge)
        for index in indices:
            meet(touched[index], index)
    return result


def _members(registers: int) -> Iterator[int]:
    while registers:
        lowest = registers & -registers
        yield lowest.bit_length() - 1
        registers ^= lowest


def _live(
    kernel: Kernel, graph: Sequence[Block], reads: Sequence[int], writes: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The registers live where each block begins and ends."""
    uses, kills = [], []
    for block in graph:
        use = kill = 0
        for i in range(block.begin, block.end):
            use |= reads[i] & ~kill
            if kernel.instructions[i].guard is None:
                kill |= writes[i]
        uses.append(use)
        kills.append(kill)

    following = [[s for s in block.successors if s != EXIT] for block in graph]
    leaving, entering = _solve(following, lambda b, live: uses[b] | (live & ~kills[b]))
    return entering, leaving


def _in_flight(kernel: Kernel, graph: Sequence[Block], touched: list[int]) -> tuple[list[int], list[int]]:
    """The registers that MMAs may be using where each block begins and ends.

    Adds the registers that a wait completes to those that it touches.
    """
    starts = {i for i, ins in enumerate(kernel.instructions) if ins.opcode.startswith("wgmma.mma_async.")}
    waits = {i for i, ins in enumerate(kernel.instructions) if _waits_for_all(ins)}

    def through(b: int, flying: int, *, record: bool = False) -> int:
        for i in range(graph[b].begin, graph[b].end):
            if i in waits:
                if record:
                    touched[i] |= flying
                flying = 0
            elif i in starts:
                flying |= touched[i]
        return flying

    previous: list[list[int]] = [[] for _ in graph]
    for b, block in enumerate(graph):
        for successor in block.successors:
            if successor != EXIT:
                previous[successor].append(b)
    entering, leaving = _solve(previous, through)
    for b, flying in enumerate(entering):
        through(b, flying, record=True)
    return entering, leaving


def _waits_for_all(ins: Instruction) -> bool:
    """Whether the instruction leaves no MMA in flight; `wgmma.wait_group N` may leave N groups."""
    return ins.opcode.startswith("wgmma.wait_group") and ins.guard is None and ins.operands == (Immediate(0),)


def _solve(
    sources: Sequence[Sequence[int]], through: Callable[[int, int], int]
) -> tuple[list[int], list[int]]:
    """The least sets with after[b] = through(b, before[b]), and before[b] the union of the sources' after."""
    dependents: list[list[int]] = [[] for _ in sources]
    for b, mine in enumerate(sources):
        for s in mine:
            dependents[s].append(b)
    before = [0] * len(sources)
    after = [through(b, 0) for b in range(len(sources))]
    work = list(range(len(sources)))
    waiting = set(work)
    while work:
        b = work.pop()
        waiting.discard(b)
        before[b] = _union(after[s] for s in sources[b])
        result = through(b, before[b])
        if result != after[b]:
            after[b] = result
            added = [d for d in dependents[b] if d not in waiting]
            work += added
            waiting.update(added)
    return before, after
