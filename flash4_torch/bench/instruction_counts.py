"""Counts of a launch in the emulator: warp instructions by class and role, SMEM bytes, FLOPs, waits.

Instructions are PTX instructions. The class "dropped" holds those that ptxas mostly removes: moves, packing
and unpacking of registers, parameters (operands from the constant bank in SASS) and changes of address space.
Every other instruction becomes about one SASS instruction, with exceptions on both sides: a negation folds
into its user, a multiplication and an addition of addresses become one, a 64-bit operation splits into two.
So totals of two kernels are comparable, but a difference of a few percent between them means nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..emulator.report import Line, Report

MATH = ("packed", "float", "max", "convert", "integer")
"""Classes that the FMA and ALU pipes execute: "FMA+ALU"."""
CLASSES = ("mufu", *MATH, "tensor memory", "memory", "sync", "branch", "copy", "mma", "dropped")
ISSUED = tuple(name for name in CLASSES if name != "dropped")
SHARED = ("loads", "stores", "operands", "copies out", "copies across", "copies in")
"""Shared-memory accesses: loads and stores of threads, MMA operands, asynchronous copies to global memory,
within a cluster, and from global memory."""
ROLES = ("weights", "products", "accumulators", "loads", "stores", "other")
"""Roles of warps: those that compute the exponentials; issue tcgen05.mma; read TMEM and are neither of these;
load; store; and the rest."""

QUADRANTS = 4
"""Quadrants of an SM; warp w issues in quadrant w % 4."""

_PACKED = re.compile(r"\.f32x2\b")
_EXTREMUM = re.compile(r"(max|min)\.(\w+\.)*f32$")
_DROPPED = re.compile(r"mov\b|cvta\b|ld\.param|ldu?\.const|pack\b|unpack\b")
_WAITS = ("mbarrier.try_wait", "mbarrier.test_wait", "bar.sync", "barrier.sync", "barrier.cluster.wait")
_BY_DEED = {"mma": "products", "tmem": "accumulators", "in": "loads", "out": "stores"}
"""Roles by activity; the first that a warp has decides, unless it computes exponentials."""
_OF_PIPE = {
    "mufu": "mufu",
    "convert": "convert",
    "fma": "float",
    "alu": "integer",
    "memory": "memory",
    "sync": "sync",
    "control": "branch",
    "async": "copy",
    "mma": "mma",
    "move": "dropped",
}


def opcode(ptx: str) -> str:
    """Opcode of an instruction's text: "add.rn.f32" for "@%p1 add.rn.f32 %f1, %f2, %f3;"."""
    words = ptx.split()
    return words[1 if words[0].startswith("@") else 0].rstrip(";")


def class_of(line: Line) -> str:
    """The class of a line's instruction, one of CLASSES."""
    code = opcode(line.ptx)
    if _DROPPED.match(code):
        return "dropped"
    if code.startswith("tcgen05.") and not code.startswith(("tcgen05.mma", "tcgen05.commit", "tcgen05.cp")):
        return "tensor memory"
    if _PACKED.search(code):
        return "packed"
    if _EXTREMUM.match(code):
        return "max"
    return _OF_PIPE[line.pipe]


def shared_kind(line: Line) -> str:
    """The kind of a line's shared-memory access, one of SHARED."""
    code = opcode(line.ptx)
    if line.pipe == "mma":
        return "operands"
    if line.pipe == "async":
        if ".global.shared" in code:
            return "copies out"
        return (
            "copies across"
            if ".shared::cluster.shared::cta" in code or code.startswith("st.")
            else "copies in"
        )
    return "stores" if code.startswith(("st", "red")) else "loads"


@dataclass(frozen=True)
class Counts:
    """Counts of one launch, or of several; warp instructions unless stated otherwise.

    roles: by role and class. quadrants: issued by each quadrant of the SMs. warps: the warps of each role.
    shared: SMEM bytes by kind. passes: passes through the banks for them, conflicts included.
    waits: on barriers of all kinds, by role.
    """

    kernel: str
    roles: dict[str, dict[str, int]]
    warps: dict[str, list[int]]
    quadrants: list[int]
    shared: dict[str, int]
    passes: dict[str, int]
    waits: dict[str, int]
    mma_flops: int

    def count(self, *classes: str) -> int:
        """Instructions of these classes, over all roles."""
        return sum(counts.get(name, 0) for counts in self.roles.values() for name in classes)

    @property
    def shared_bytes(self) -> int:
        return sum(self.shared.values())

    def row(self) -> dict[str, Any]:
        """The counts as plain data; `of_row` reads it."""
        return dict(vars(self))

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Counts:
        return cls(**row)


def count_instructions(report: Report) -> Counts:
    """The counts of the launch described by `report`."""
    lines = [line for line in report.lines if any(line.counts)]
    warps = range(len(report.lines[0].counts))
    classes = [class_of(line) for line in lines]
    by_warp = [Counter[str]() for _ in warps]
    waits = Counter[int]()
    shared, passes = dict.fromkeys(SHARED, 0), dict.fromkeys(SHARED, 0)
    for line, name in zip(lines, classes, strict=True):
        shared[shared_kind(line)] += sum(line.shared_bytes)
        passes[shared_kind(line)] += sum(line.shared_passes)
        is_wait = opcode(line.ptx).startswith(_WAITS)
        for warp in warps:
            by_warp[warp][name] += line.counts[warp]
            waits[warp] += is_wait * line.counts[warp]
    roles = _roles(lines, len(warps))
    playing = {role: [warp for warp in warps if roles[warp] == role] for role in ROLES if role in roles}
    return Counts(
        kernel=report.kernel.partition("_object_at_")[0],
        roles={role: _sum(by_warp[warp] for warp in group) for role, group in playing.items()},
        warps=playing,
        quadrants=[
            sum(by_warp[warp][name] for warp in warps[quadrant::QUADRANTS] for name in ISSUED)
            for quadrant in range(QUADRANTS)
        ],
        shared=shared,
        passes=passes,
        waits={role: sum(waits[warp] for warp in group) for role, group in playing.items()},
        mma_flops=report.counters.mma_flops,
    )


def _sum(counts: Iterable[Counter[str]]) -> dict[str, int]:
    total = sum(counts, Counter[str]())
    return {name: total[name] for name in CLASSES if total[name]}


def _roles(lines: list[Line], warps: int) -> list[str]:
    """Each warp's role, derived from the instructions that it executes."""
    done = {name: [0] * warps for name in ("exp", *_BY_DEED)}
    for line in lines:
        for name in _deeds(line):
            done[name] = [a + b for a, b in zip(done[name], line.counts, strict=True)]
    most = max(done["exp"])

    def role(warp: int) -> str:
        # A few exponentials, for a row's sum or statistics, are not enough for this role.
        if done["exp"][warp] and 4 * done["exp"][warp] > most:
            return "weights"
        for name, played in (
            ("mma", "products"),
            ("tmem", "accumulators"),
            ("in", "loads"),
            ("out", "stores"),
        ):
            if done[name][warp]:
                return played
        return "other"

    return [role(warp) for warp in range(warps)]


def _deeds(line: Line) -> Iterator[str]:
    """The activities that a line shows of the warps that execute it; they decide the warps' roles."""
    code = opcode(line.ptx)
    if code.startswith("ex2"):
        yield "exp"
    elif code.startswith("tcgen05.mma"):
        yield "mma"
    elif code.startswith("tcgen05.ld"):
        yield "tmem"
    elif line.pipe == "async" and any(line.shared_bytes):
        yield "out" if shared_kind(line) == "copies out" else "in"
