"""An emulated device: CuTe-DSL compiles for it, and its launches run here.

`flash4_torch.testing.emulate` is the public interface.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from flash4_torch import env
from flash4_torch.emulator import host, ptx
from flash4_torch.emulator.early import refuse_early_access
from flash4_torch.emulator.engine import Options, Program, pack_parameters
from flash4_torch.emulator.errors import EmulatorError
from flash4_torch.emulator.report import Report


@dataclass
class Device:
    """An emulated device: what its launches do, and the report of each.

    Attributes:
        options: how launches run from now on; may be replaced between launches.
        check: raise EmulationError after a launch with findings; otherwise look at the reports.
        memory: (address, bytes) of the global memory that kernels may touch; empty: anything.
        transform: applied to every kernel before it runs, as mutation studies do.
        around: the device that this one temporarily replaces; reports go to both.
    """

    arch: str
    options: Options = field(default_factory=Options)
    check: bool = True
    memory: Sequence[tuple[int, int]] = ()
    transform: Callable[[ptx.Kernel], ptx.Kernel] | None = None
    reports: list[Report] = field(default_factory=list)
    around: Device | None = None
    gives_way: bool = False

    @contextmanager
    def touching(self, *tensors: Any) -> Iterator[None]:
        """Restricts kernels inside the block to these tensors' memory (torch tensors of any strides)."""
        before, self.memory = self.memory, [_span(tensor) for tensor in tensors]
        try:
            yield
        finally:
            self.memory = before

    def launch(self, launch: host.Launch) -> None:
        """Runs one launch to its end."""
        kernel = _kernel(launch.kernel.ptx, launch.kernel.name)
        if launch.programmatic:
            refuse_early_access(kernel)
        if self.transform:
            kernel = self.transform(kernel)
            program = Program(kernel, arch=_number(self.arch), compact=self.options.compact)
        else:
            program = _program(
                launch.kernel.ptx, launch.kernel.name, _number(self.arch), self.options.compact
            )
        values = [ctypes.string_at(a, p.size) for a, p in zip(launch.args, kernel.params, strict=True)]
        report = program.launch(
            pack_parameters(kernel, values),
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            dynamic_shared=launch.smem_bytes,
            regions=self.memory or None,
            options=self.options,
        )
        device: Device | None = self
        while device:
            device.reports.append(report)
            device = device.around
        if self.check:
            report.raise_findings()


@contextmanager
def device(
    arch: str | None = None,
    *,
    num_sms: int | None = None,
    check: bool = True,
    gives_way: bool = False,
    **options: Any,
) -> Iterator[Device]:
    """Inside the block CuTe-DSL compiles for an emulated device, and launches run on it.

    Functions must be compiled and called inside the block.

    Args:
        arch: one of `host.ARCHITECTURES`, as "sm_90a"; default: FLASH4_ARCH.
        num_sms: how many SMs it has; persistent kernels launch that many CTAs. Default: those of the
            architecture's largest GPU.
        check: raise EmulationError for the first launch with findings.
        gives_way: allow `device` blocks inside this one; they replace it, start from its architecture and
            options, and add their reports to its own, too.
        options: the other fields of `Options`.

    Raises:
        BuildError: the engine cannot be built (it needs g++).
        ImportError: nvidia-cutlass-dsl is not installed.
    """
    around = active()
    if around and not around.gives_way:
        raise EmulatorError(f"an emulated {around.arch} device is active; there can be one at a time")
    arch = arch or (around.arch if around else env.ARCH.get())
    if num_sms:
        options["num_sms"] = num_sms
    chosen = replace(around.options if around else Options(), **options)
    emulated = Device(arch, chosen, check, around=around, gives_way=gives_way)
    _install(emulated)
    _active.append(emulated)
    try:
        yield emulated
    finally:
        _active.pop()
        if around:
            _install(around)
        else:
            host.uninstall()


def _install(device: Device) -> None:
    host.install(device.launch, device.arch, device.options.num_sms)


_active: list[Device] = []


@contextmanager
def active_or_new() -> Iterator[Device]:
    """The device of the surrounding `device` block, or a new one for the duration of this block."""
    if _active:
        yield _active[-1]
    else:
        with device() as emulated:
            yield emulated


def active() -> Device | None:
    """The device of the surrounding `device` block, or None."""
    return _active[-1] if _active else None


def _span(tensor: Any) -> tuple[int, int]:
    """Address and size in bytes of the memory from a tensor's first to its last element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _number(arch: str) -> int:
    return int("".join(filter(str.isdigit, arch)))


@functools.lru_cache(maxsize=64)
def _kernel(text: str, name: str) -> ptx.Kernel:
    return next(kernel for kernel in ptx.parse(text).kernels if kernel.name == name)


@functools.lru_cache(maxsize=64)
def _program(text: str, name: str, arch: int, compact: bool) -> Program:
    return Program(_kernel(text, name), arch=arch, compact=compact)
