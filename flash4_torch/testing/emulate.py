"""Run CuTe-DSL kernels without a GPU: their compiled PTX is executed on the CPU and checked while it runs.

    with emulate.device("sm_100a") as device:
        compiled = cute.compile(host_function, from_dlpack(a), from_dlpack(b))
        compiled(from_dlpack(a), from_dlpack(b))
    print(device.reports[-1].counters)

Every launch inside the block runs in the emulator, on CPU tensors; the first thing that a kernel does wrong raises
`EmulationError`, which names the warp, the PTX line and the source line.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from flash4_torch import env
from flash4_torch.emulator import host, ptx
from flash4_torch.emulator.engine import SCHEDULES, Options, Program, pack_parameters, run_ptx
from flash4_torch.emulator.report import EmulationError, Finding, Report

__all__ = ["Device", "EmulationError", "Finding", "Options", "Report", "device", "run_ptx"]


@dataclass
class Device:
    """An emulated device: what its launches do, and the report of each.

    options: how launches run from now on; may be replaced between launches.
    check: raise EmulationError after a launch with findings; else look at the reports.
    memory: (address, bytes) of the global memory that kernels may touch; empty: anything.
    transform: applied to every kernel before it runs, as mutation studies do.
    """

    arch: str
    options: Options = field(default_factory=Options)
    check: bool = True
    memory: Sequence[tuple[int, int]] = ()
    transform: Callable[[ptx.Kernel], ptx.Kernel] | None = None
    reports: list[Report] = field(default_factory=list)

    def launch(self, launch: host.Launch) -> None:
        """Runs one launch to its end."""
        kernel = _kernel(launch.kernel.ptx, launch.kernel.name)
        if self.transform:
            kernel = self.transform(kernel)
            program = Program(kernel, arch=_number(self.arch), compact=self.options.compact)
        else:
            program = _program(launch.kernel.ptx, launch.kernel.name, _number(self.arch), self.options.compact)
        values = [ctypes.string_at(a, p.size) for a, p in zip(launch.args, kernel.params, strict=True)]
        report = program.launch(
            pack_parameters(kernel, values),
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            dynamic_shared=launch.smem_bytes,
            regions=self.memory,
            options=self.options,
        )
        self.reports.append(report)
        if self.check:
            report.raise_findings()


@contextmanager
def device(
    arch: str | None = None,
    *,
    multiprocessors: int | None = None,
    check: bool = True,
    **options: object,
) -> Iterator[Device]:
    """Inside the block CuTe-DSL compiles for an emulated device, and launches run on it.

    arch: "sm_90a" or "sm_100a"; default: FLASH4_ARCH.
    multiprocessors: how many it seems to have; persistent kernels launch as many CTAs. Default: 132 and 148.
    check: raise EmulationError for the first launch with findings.
    options: the fields of `Options`.

    Functions must be compiled and called inside the block. Raises BuildError where the engine cannot be built (it needs
    g++), ImportError without nvidia-cutlass-dsl.
    """
    arch = arch or env.ARCH.get()
    emulated = Device(arch, Options(**options), check)  # type: ignore[arg-type]
    host.install(emulated.launch, arch, multiprocessors)
    try:
        yield emulated
    finally:
        host.uninstall()


def _number(arch: str) -> int:
    return int("".join(filter(str.isdigit, arch)))


@functools.lru_cache(maxsize=64)
def _kernel(text: str, name: str) -> ptx.Kernel:
    return next(kernel for kernel in ptx.parse(text).kernels if kernel.name == name)


@functools.lru_cache(maxsize=64)
def _program(text: str, name: str, arch: int, compact: bool) -> Program:
    return Program(_kernel(text, name), arch=arch, compact=compact)
