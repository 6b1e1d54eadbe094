"""Runs kernels in the emulator, and records all it takes to run them on a GPU."""

from __future__ import annotations

import argparse
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flash4_torch.emulator import dsl, host, ptx
from flash4_torch.emulator.emulate import Device
from flash4_torch.emulator.engine import Options, pack_parameters

from .recording import Bound, Launch, Recording, Region, Step

ARCH = "sm_90a"
PACKAGES = ("torch", "nvidia-cutlass-dsl")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    from . import subjects

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--peers", action="store_true", help="also flash-attn-4's kernels")
    given = parser.parse_args(arguments)
    recorder = Recorder([*PACKAGES, "flash-attn-4"] if given.peers else PACKAGES)
    with recorder.listening():
        subjects.small_kernels(recorder)
        if given.peers:
            subjects.flash_attn_4_kernels(recorder)
    recorder.recording.save(given.recording)
    print(f"{len(recorder.recording.steps)} steps, {given.recording.stat().st_size >> 10} KiB")
    return 0


@dataclass(frozen=True)
class Ran:
    """A launch that has run, and the storages that its parameters point to, by address."""

    launch: host.Launch
    params: bytes
    before: dict[int, bytes]
    after: dict[int, bytes]

    def pointers(self) -> Iterator[tuple[int, int, int]]:
        """(offset, storage, distance) for each address of a storage's memory among the parameters."""
        for offset in range(0, len(self.params) - 7, 4):
            address = int.from_bytes(self.params[offset : offset + 8], "little")
            storage = _storage_of(address, self.before)
            if storage is not None:
                yield offset, storage, address - storage


@dataclass
class Known:
    """A tensor, what it is called, and what exact arithmetic makes of it, if that is known."""

    name: str
    tensor: Tensor
    exact: Tensor | None = None


@dataclass
class Recorder:
    """An emulated device that remembers what ran since it was last told to `forget`."""

    packages: Sequence[str] = PACKAGES
    ran: list[Ran] = field(default_factory=list)
    known: dict[int, Known] = field(default_factory=dict)  # by the storage's address, which it keeps from reuse

    def __post_init__(self) -> None:
        self.recording = Recording({name: version(name) for name in self.packages})
        self._device = Device(ARCH, Options(schedule="late"))
        self._cubins: dict[str, bytes] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the seam tells of the cubins that the DSL makes, and of all tensors that are passed."""
        connect, convert = dsl.connect, dsl.as_device_arguments

        def connect_and_learn(*, learn: Callable[[bytes, str], None], **rest: Any) -> ExitStack:
            def learn_also(cubin: bytes, text: str) -> None:
                self._cubins[text] = cubin
                learn(cubin, text)

            return connect(learn=learn_also, **rest)

        def convert_and_remember(value: Any) -> Any:
            self._remember_all(value)
            return convert(value)

        with (
            mock.patch.object(dsl, "connect", connect_and_learn),
            mock.patch.object(dsl, "as_device_arguments", convert_and_remember),
        ):
            yield

    def remember(self, name: str, tensor: Tensor, exact: Tensor | None = None) -> None:
        """The first name that memory gets is the one in the recording."""
        self.known.setdefault(tensor.untyped_storage().data_ptr(), Known(name, tensor, exact))

    def _remember_all(self, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                self._remember_all(item)
        elif isinstance(tensor := getattr(value, "tensor", value), Tensor):
            shape = "x".join(map(str, tensor.shape))
            self.remember(f"unnamed {str(tensor.dtype).removeprefix('torch.')} {shape}", tensor)

    def run(self, launch: host.Launch) -> None:
        """The seam's `run`."""
        params = _parameters(launch)
        ran = Ran(launch, params, self._contents(), {})
        storages = {storage for _, storage, _ in ran.pointers()}
        before = {a: ran.before[a] for a in storages}
        self._device.memory = [(a, len(data)) for a, data in before.items() if data]
        self._device.launch(launch)
        after = self._contents()
        self.ran.append(Ran(launch, params, before, {a: after[a] for a in storages}))

    def _contents(self) -> dict[int, bytes]:
        return {
            address: ctypes.string_at(address, known.tensor.untyped_storage().nbytes())
            for address, known in self.known.items()
        }

    def record(self, name: str, ran: Sequence[Ran], bound: Callable[[str], Bound]) -> None:
        """Makes one step of launches that follow each other; bound: by a tensor's name."""
        before, after = {}, {}
        for one in ran:
            before = {**one.before, **before}
            after.update(one.after)
        storages = list(before)
        launches = [self._launch(one, storages) for one in ran]
        regions = [self._region(a, before[a], after[a], bound) for a in storages]
        self.recording.steps.append(Step(name, launches, regions))

    def _launch(self, ran: Ran, storages: Sequence[int]) -> Launch:
        launch = ran.launch
        text = launch.kernel.ptx
        return Launch(
            kernel=launch.kernel.name,
            cubin=self.recording.keep(self._cubins[text]),
            ptx_sha256=self.recording.hash(text.encode()),
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            shared=launch.smem_bytes,
            cooperative=launch.cooperative,
            programmatic=launch.programmatic,
            params=ran.params,
            pointers=tuple((o, storages.index(s), distance) for o, s, distance in ran.pointers()),
        )

    def _region(self, address: int, before: bytes, after: bytes, bound: Callable[[str], Bound]) -> Region:
        known, written, error = self.known[address], before != after, None
        if known.exact is not None and written:
            error = (known.tensor.double() - known.exact).square().mean().sqrt().item()
        return Region(
            name=known.name,
            dtype=known.tensor.dtype,
            address=address,
            before=self.recording.keep(before),
            after=self.recording.keep(after),
            bound=bound(known.name) if written else Bound(),
            error=error,
        )

    def forget(self) -> None:
        self.ran, self.known = [], {}


def _storage_of(address: int, storages: dict[int, bytes]) -> int | None:
    """The storage that the address is in, whose end counts as well."""
    return next((start for start, data in storages.items() if start <= address <= start + len(data)), None)


def _parameters(launch: host.Launch) -> bytes:
    kernel = _kernel(launch.kernel.ptx, launch.kernel.name)
    values = [ctypes.string_at(a, p.size) for a, p in zip(launch.args, kernel.params, strict=True)]
    return pack_parameters(kernel, values)


@functools.lru_cache
def _kernel(text: str, name: str) -> ptx.Kernel:
    return next(kernel for kernel in ptx.parse(text).kernels if kernel.name == name)


if __name__ == "__main__":
    raise SystemExit(main())
