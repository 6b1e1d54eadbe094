"""The result of a launch in the emulator: findings, and counts of what was executed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

PIPES = ("alu", "fma", "mufu", "convert", "control", "memory", "sync", "async", "mma", "move")


@dataclass(frozen=True)
class Place:
    """The place of an event: the warp, and the instruction in PTX and in the kernel's source.

    Attributes:
        cta: index in the grid, where known.
        rank: index in its cluster.
    """

    cta: tuple[int, int, int] | None
    rank: int
    warp: int
    ptx_line: int
    ptx: str
    source: tuple[str, int] | None

    def __str__(self) -> str:
        source = f", {self.source[0]}:{self.source[1]}" if self.source else ""
        cta = f"CTA {self.cta}" if self.cta else f"CTA {self.rank} of the cluster"
        return f"warp {self.warp} of {cta}, PTX line {self.ptx_line}{source}: {self.ptx}"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with the kernel: `kind` is "race", "deadlock", "out-of-bounds", ..."""

    kind: str
    message: str
    at: Place
    other: Place | None = None
    times: int = 1

    def __str__(self) -> str:
        again = f" ({self.times} times)" if self.times > 1 else ""
        lines = [f"{self.kind}{again}: {self.message}", f"    at {self.at}"]
        if self.other:
            lines.append(f"    and {self.other}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Counters:
    """Dynamic counts of one launch.

    Instructions are warp-instructions; bytes are those that lanes asked for.
    """

    instructions: int
    by_pipe: dict[str, int]
    shared_read: int
    shared_written: int
    global_read: int
    global_written: int
    async_bytes: int
    mma: int
    mma_flops: int
    barrier_waits: int

    def rows(self) -> Iterator[tuple[str, int]]:
        """(name, count), in the order of a table."""
        yield "warp-instructions", self.instructions
        for pipe in PIPES:
            yield f"  {pipe}", self.by_pipe.get(pipe, 0)
        yield "MMA instructions", self.mma
        yield "MMA FLOPs", self.mma_flops
        yield "shared bytes read", self.shared_read
        yield "shared bytes written", self.shared_written
        yield "global bytes read", self.global_read
        yield "global bytes written", self.global_written
        yield "bytes copied asynchronously", self.async_bytes
        yield "barrier waits", self.barrier_waits

    def __str__(self) -> str:
        return "\n".join(f"{name:<28} {count:>16,}" for name, count in self.rows())


@dataclass(frozen=True)
class Line:
    """How often one PTX instruction was executed, by warp of the CTA, summed over all CTAs.

    Attributes:
        shared_bytes: bytes of shared memory that it read and wrote, itself or through the unit that it gave
            work to. A byte that several lanes access counts once. A tensor core reads an operand once per
            instruction, in both CTAs of a pair.
        shared_passes: passes through the 32 banks that this took, conflicts included.
    """

    ptx_line: int
    ptx: str
    source: tuple[str, int] | None
    pipe: str
    counts: tuple[int, ...]
    shared_bytes: tuple[int, ...]
    shared_passes: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """One launch."""

    kernel: str
    findings: list[Finding]
    counters: Counters
    make_lines: Callable[[], list[Line]] = field(repr=False, compare=False)
    """Makes `lines`: few readers want them, and they take longer than a short launch."""

    @functools.cached_property
    def lines(self) -> list[Line]:
        """The kernel's instructions, in the order of its PTX, with their counts."""
        return self.make_lines()

    def raise_findings(self) -> None:
        """Raises EmulationError if there are any."""
        if self.findings:
            raise EmulationError(self.kernel, self.findings)


class EmulationError(RuntimeError):
    """A kernel did something wrong; `findings` says what and where."""

    def __init__(self, kernel: str, findings: Sequence[Finding]):
        self.kernel = kernel
        self.findings = list(findings)
        super().__init__(f"{kernel}:\n" + "\n".join(map(str, findings)))
