"""An emulated device that records everything needed to repeat its launches on a GPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from unittest import mock

from torch import Tensor

from flash4_torch.emulator import dsl, host, ptx
from flash4_torch.emulator.emulate import Device
from flash4_torch.emulator.engine import Options

from .recording import Bound, Launch, Recording, Region, Step

ARCH = "sm_90a"
PACKAGES = ("torch", "nvidia-cutlass-dsl")


@dataclass(frozen=True)
class Ran:
    """A launch that has run, and the storages that its parameters point to, by address."""

    launch: host.Launch
    params: tuple[bytes, ...]
    before: dict[int, bytes]
    after: dict[int, bytes]

    def pointers(self) -> Iterator[tuple[int, int, int, int]]:
        """(parameter, offset, storage, distance) for each address in a storage among the parameters."""
        for number, data in enumerate(self.params):
            for offset in range(0, len(data) - 7, 8):
                address = int.from_bytes(data[offset : offset + 8], "little")
                storage = _storage_of(address, self.before)
                if storage is not None:
                    yield number, offset, storage, address - storage


@dataclass
class Known:
    """A tensor and its name, with the exact result and the result of a model of the GPU, where known."""

    name: str
    tensor: Tensor
    exact: Tensor | None = None
    model: Tensor | None = None


@dataclass
class Recorder:
    """An emulated device that remembers what ran since `forget` was last called.

    known: tensors by their storage's address; being here saves them from reuse.
    """

    packages: Sequence[str] = PACKAGES
    ran: list[Ran] = field(default_factory=list)
    known: dict[int, Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recording = Recording({name: version(name) for name in self.packages})
        self._device = Device(ARCH, Options(schedule="late"))
        self._cubins: dict[str, bytes] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the seam reports the cubins that the DSL makes and all tensors that are passed."""
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

    def remember(
        self, name: str, tensor: Tensor, exact: Tensor | None = None, model: Tensor | None = None
    ) -> None:
        """Names a tensor's memory; the first name that memory gets is the one in the recording."""
        self.known.setdefault(tensor.untyped_storage().data_ptr(), Known(name, tensor, exact, model))

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
        storages = {storage for _, _, storage, _ in ran.pointers()}
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
        storages = [address for address in self.known if address in before]
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
            pointers=tuple((p, o, storages.index(s), distance) for p, o, s, distance in ran.pointers()),
        )

    def _region(self, address: int, before: bytes, after: bytes, bound: Callable[[str], Bound]) -> Region:
        known, written = self.known[address], before != after
        region = Region(
            name=known.name,
            dtype=known.tensor.dtype,
            address=address,
            before=self.recording.keep(before),
            after=self.recording.keep(after),
        )
        if written:
            region.bound = bound(known.name)
            region.error = _rms(known.tensor, known.exact)
            if known.model is not None:
                region.model = self.recording.keep(known.model.contiguous().numpy().tobytes())
        return region

    def forget(self) -> None:
        self.ran, self.known = [], {}


def _rms(result: Tensor, exact: Tensor | None) -> float | None:
    return None if exact is None else (result.double() - exact).square().mean().sqrt().item()


def _storage_of(address: int, storages: dict[int, bytes]) -> int | None:
    """The storage that contains the address; its end counts as well."""
    return next((start for start, data in storages.items() if start <= address <= start + len(data)), None)


def _parameters(launch: host.Launch) -> tuple[bytes, ...]:
    kernel = _kernel(launch.kernel.ptx, launch.kernel.name)
    return tuple(ctypes.string_at(a, p.size) for a, p in zip(launch.args, kernel.params, strict=True))


@functools.lru_cache
def _kernel(text: str, name: str) -> ptx.Kernel:
    return next(kernel for kernel in ptx.parse(text).kernels if kernel.name == name)
