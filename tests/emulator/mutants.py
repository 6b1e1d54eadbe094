"""Subjects and a judge for studies of whether anything notices a missing synchronisation instruction."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flash4_torch.emulator import host, ptx
from flash4_torch.emulator.engine import Options, Program, pack_parameters
from flash4_torch.emulator.mutate import without
from flash4_torch.emulator.report import EmulationError, Report
from kernels import Case

Run = Callable[[], list[Tensor]]
# The model works without these: what tcgen05.ld loads is there at once, and the order of the tensor core's
# work is always known. So they are counted separately.
APART = ("tcgen05.wait::ld", "tcgen05.fence")
# The limit is ten times what the largest original executes, as some mutants run for ever.
_ALWAYS = {"strict": frozenset({"exit", "lanes"}), "max_instructions": 50_000_000}
LATE, EAGER = (Options(schedule=name, **_ALWAYS) for name in ("late", "eager"))
FUZZ = [Options(schedule="fuzz", seed=seed, **_ALWAYS) for seed in range(48)]


@dataclass
class Bench:
    """Runs launches like a device, with some kernels replaced by mutants.

    memory: (address, bytes) that the kernels may touch; empty: anything.
    executed: for each kernel launched, how often warps have executed each instruction, in all launches.
    """

    arch: str
    options: Options = EAGER
    memory: list[tuple[int, int]] = field(default_factory=list)
    programs: dict[host.Kernel, Program] = field(default_factory=dict)
    mutants: dict[host.Kernel, Program] = field(default_factory=dict)
    executed: dict[host.Kernel, Counter[int]] = field(default_factory=dict)

    def launch(self, launch: host.Launch) -> None:
        """Runs one launch; raises EmulationError for findings."""
        program = self.mutants.get(launch.kernel) or self._original(launch.kernel)
        params = program.kernel.params
        values = [ctypes.string_at(a, p.size) for a, p in zip(launch.args, params, strict=True)]
        report = program.launch(
            pack_parameters(program.kernel, values),
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            dynamic_shared=launch.smem_bytes,
            regions=self.memory or None,
            options=self.options,
        )
        self._note(launch.kernel, report)
        report.raise_findings()

    def mutate(self, kernel: host.Kernel, index: int) -> None:
        """Makes `kernel` lack the instruction with that index from now on, and no other kernel lack any."""
        mutant = without(self.programs[kernel].kernel, index)
        self.mutants = {kernel: Program(mutant, arch=self.number)}

    @property
    def number(self) -> int:
        return host.ARCHITECTURES[self.arch].major * 10

    def _original(self, kernel: host.Kernel) -> Program:
        if kernel not in self.programs:
            parsed = next(k for k in ptx.parse(kernel.ptx).kernels if k.name == kernel.name)
            self.programs[kernel] = Program(parsed, arch=self.number)
        return self.programs[kernel]

    def _note(self, kernel: host.Kernel, report: Report) -> None:
        executed = self.executed.setdefault(kernel, Counter())
        executed.update({i: sum(line.counts) for i, line in enumerate(report.lines) if any(line.counts)})


@dataclass(frozen=True)
class Subject:
    """Kernels that are launched together, on one set of inputs.

    prepare: maps a bench to a context that gives a function; this runs the kernels on fresh inputs and
    returns their results.
    tolerance: how far outputs may be from the original's; above 0 where floats are summed in the order of
    arrival.
    """

    name: str
    arch: str
    shape: str
    prepare: Callable[[Bench], AbstractContextManager[Run]]
    tolerance: float = 0.0


def subject_of(case: Case, arch: str) -> Subject:
    """One of our own kernels."""

    @contextmanager
    def prepare(bench: Bench) -> Iterator[Run]:
        host.install(bench.launch, arch)
        try:
            compiled = case.compile(arch)

            def run() -> list[Tensor]:
                arguments = case.arguments()
                tensors = [a for a in arguments if isinstance(a, Tensor)]
                bench.memory = [(t.data_ptr(), t.untyped_storage().nbytes()) for t in tensors]
                compiled(*case.converted(arguments))
                return tensors

            yield run
        finally:
            host.uninstall()

    shapes = ", ".join(str(tuple(a.shape)) for a in case.arguments() if isinstance(a, Tensor))
    return Subject(case.name, arch, shapes, prepare)


@dataclass(frozen=True)
class Judge:
    """Distinguishes the mutant from the original by findings, by outputs or by an exception."""

    subject: Subject
    bench: Bench
    run: Run
    expected: list[Tensor]

    def differs(self, options: Options) -> str | None:
        """How a run differs from the original: kinds of findings, "output", or None."""
        self.bench.options = options
        try:
            outputs = self.run()
        except EmulationError as error:
            return error.findings[0].kind
        same = all(
            torch.allclose(a.double(), b.double(), rtol=0, atol=self.subject.tolerance, equal_nan=True)
            for a, b in zip(outputs, self.expected, strict=True)
        )
        return None if same else "output"

    def detects(self, kernel: host.Kernel, index: int, schedules: list[Options]) -> str | None:
        """The first difference between the original and the mutant without that instruction, or None."""
        self.bench.mutate(kernel, index)
        try:
            return next(filter(None, map(self.differs, schedules)), None)
        finally:
            self.bench.mutants = {}


@contextmanager
def judge_of(subject: Subject) -> Iterator[Judge]:
    """A judge for the duration of the block; the original has run once, eagerly."""
    bench = Bench(subject.arch)
    with subject.prepare(bench) as run:
        yield Judge(subject, bench, run, run())
