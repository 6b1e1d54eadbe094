"""The seam to CuTe-DSL: what its compiled functions load and launch arrives here instead of at a GPU.

    host.install(run)  # each launch calls run(launch), and is complete when that returns
    compiled = cute.compile(f, from_dlpack(cpu_tensor))
    compiled(from_dlpack(cpu_tensor))
    host.uninstall()

Functions must be compiled while the seam is installed: only then is their host code bound to the stand-in and
the PTX of their kernels known. Functions compiled at other times work as usual once the seam is uninstalled.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from flash4_torch import env
from flash4_torch.emulator import build, dsl
from flash4_torch.emulator.device import as_device
from flash4_torch.emulator.engine import DEVICE_SMS
from flash4_torch.emulator.errors import EmulatorError, LaunchError
from flash4_torch.emulator.limits import refuse_impossible
from flash4_torch.errors import RangeError

__all__ = ["ARCHITECTURES", "Kernel", "Launch", "LaunchError", "as_device", "install", "uninstall"]

Dim3 = tuple[int, int, int]

_LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure


@dataclass(frozen=True)
class Device:
    """What host code can ask of a device; `num_sms` is the default number of SMs."""

    major: int
    minor: int
    num_sms: int

    @property
    def number(self) -> int:
        """The architecture's number: 90 for sm_90a."""
        return 10 * self.major + self.minor


ARCHITECTURES = {
    "sm_90a": Device(9, 0, DEVICE_SMS[90]),
    "sm_100a": Device(10, 0, DEVICE_SMS[100]),
    "sm_103a": Device(10, 3, DEVICE_SMS[103]),
    "sm_80": Device(8, 0, DEVICE_SMS[80]),
    "sm_86": Device(8, 6, DEVICE_SMS[86]),
    "sm_87": Device(8, 7, DEVICE_SMS[87]),
    "sm_89": Device(8, 9, DEVICE_SMS[89]),
    "sm_120a": Device(12, 0, DEVICE_SMS[120]),
    "sm_121a": Device(12, 1, DEVICE_SMS[121]),
}


@dataclass(frozen=True)
class Kernel:
    """An entry `name` of a PTX text, with its number of parameters."""

    name: str
    ptx: str
    parameters: int


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    grid, block: in CTAs and threads. cluster: in CTAs.
    smem_bytes: bytes of dynamic shared memory.
    cooperative: all CTAs must be resident at once.
    programmatic: the kernel may start before the previous one has ended (programmatic dependent launch).
    args: the address of each parameter's value, valid during the launch.
    """

    kernel: Kernel
    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int
    cooperative: bool
    programmatic: bool
    args: tuple[int, ...]


def install(run: Callable[[Launch], None], arch: str | None = None, num_sms: int | None = None) -> None:
    """Sends launches to `run`, lets CuTe-DSL compile for `arch`, and lets CPU tensors pass for the device's.

    arch: one of `ARCHITECTURES`, as "sm_90a"; default: FLASH4_ARCH.
    num_sms: how many SMs the device seems to have; default: those of the architecture's largest GPU.
    Persistent kernels launch that many CTAs, so a small number makes them quick to run.

    An exception that `run` raises reaches the caller of the compiled function. A second call replaces what
    the first one set. Raises RangeError for another architecture, BuildError if the C++ part cannot be built,
    and ImportError without CuTe-DSL.
    """
    arch = arch or env.ARCH.get()
    if arch not in tuple(ARCHITECTURES):
        raise RangeError("arch", repr(arch), f"the emulator plays {' or '.join(ARCHITECTURES)}")
    uninstall()
    _seam().connect(run, arch, num_sms or ARCHITECTURES[arch].num_sms)


def uninstall() -> None:
    """Restores CuTe-DSL; functions compiled while the seam was installed can no longer be launched."""
    if _seam.cache_info().currsize:
        _seam().disconnect()


@functools.cache
def _seam() -> _Seam:
    return _Seam()


class _LaunchRecord(ctypes.Structure):
    """`Launch` in csrc_stubs/no_gpu/runtime.cpp."""

    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("library", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint64),
        ("cooperative", ctypes.c_int32),
        ("programmatic", ctypes.c_int32),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
    )


_LoadCallback = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
_LaunchCallback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(_LaunchRecord))


class _Seam:
    """The stand-in for the runtime library, and what is known of the cubins that pass through it."""

    def __init__(self) -> None:
        self._path = str(build.runtime())
        self._library = ctypes.CDLL(self._path)
        self._library.flash4_last_error.restype = ctypes.c_char_p
        self._run: Callable[[Launch], None] = _run_nothing
        self._device = ARCHITECTURES["sm_90a"]
        self._connection = ExitStack()
        self._ptx: dict[bytes, str] = {}  # by the cubin's hash, since two kernels can share a name
        self._loaded = [""]  # PTX by library number, which starts at 1 as 0 means failure
        self._kernels: dict[tuple[int, str], Kernel] = {}
        self._raised = threading.local()
        # The library keeps only the addresses of these, so they must stay alive.
        self._callbacks = (
            _LoadCallback(self._keeping_errors(self._load, 0)),
            _LaunchCallback(self._keeping_errors(self._launch, _LAUNCH_FAILURE)),
        )
        self._library.flash4_set_load_callback(self._callbacks[0])
        self._library.flash4_set_launch_callback(self._callbacks[1])

    def connect(self, run: Callable[[Launch], None], arch: str, num_sms: int) -> None:
        self._run = run
        self._device = device = ARCHITECTURES[arch]
        self._library.flash4_set_device(device.major, device.minor, num_sms)
        self._connection = dsl.connect(
            library=self._path,
            arch=arch,
            num_sms=num_sms,
            learn=self.learn,
            calling=self.calling,
            device_attribute=self.device_attribute,
        )

    def disconnect(self) -> None:
        self._run = _run_nothing
        self._connection.close()

    def learn(self, cubin: bytes, ptx: str) -> None:
        """Records the cubin and the PTX that each compilation makes."""
        self._ptx[_key(cubin)] = ptx

    def device_attribute(self, attribute: int) -> int:
        value = ctypes.c_int32()
        if self._library.flash4_cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0):
            raise EmulatorError(self._library.flash4_last_error().decode())
        return value.value

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A context around a call of a compiled function: a kept error replaces the CUDA error code."""
        self._forget_error()
        try:
            yield
        except Exception as failure:
            reason = self._raised.error or self._reason_of_the_library()
            self._forget_error()
            if reason is None:
                raise
            raise reason from failure

    def _reason_of_the_library(self) -> EmulatorError | None:
        text = self._library.flash4_last_error().decode()
        return EmulatorError(text) if text else None

    def _forget_error(self) -> None:
        self._raised.error = None
        self._library.flash4_set_error(b"")

    def _keeping_errors(self, action: Callable[..., int], failed: int) -> Callable[..., int]:
        """`action` for C to call: keeps an error for `calling`, and its text for calls that bypass that."""

        def call(*args: Any) -> int:
            try:
                return action(*args)
            except BaseException as error:
                self._raised.error = error
                self._library.flash4_set_error(f"{type(error).__name__}: {error}".encode())
                return failed

        return call

    def _load(self, address: int, size: int) -> int:
        ptx = self._ptx.get(_key(ctypes.string_at(address, size)))
        if ptx is None:
            raise EmulatorError("the function was compiled before the emulator was installed: no PTX of it")
        self._loaded.append(ptx)
        return len(self._loaded) - 1

    def _launch(self, record: Any) -> int:
        raw = record.contents
        kernel = self._kernel(raw.library, raw.kernel.decode())
        launch = Launch(
            kernel=kernel,
            grid=tuple(raw.grid),
            block=tuple(raw.block),
            cluster=tuple(raw.cluster),
            smem_bytes=raw.dynamic_shared,
            cooperative=bool(raw.cooperative),
            programmatic=bool(raw.programmatic),
            args=tuple(raw.args[: kernel.parameters]),
        )
        sizes = launch.grid, launch.block, launch.cluster, launch.smem_bytes
        refuse_impossible(*sizes, arch=self._device.number)
        self._run(launch)
        return 0

    def _kernel(self, library: int, name: str) -> Kernel:
        key = library, name
        if key not in self._kernels:
            ptx = self._loaded[library]
            self._kernels[key] = Kernel(name, ptx, _parameter_count(ptx, name))
        return self._kernels[key]


def _run_nothing(launch: Launch) -> None:
    raise EmulatorError(f"{launch.kernel.name} was launched after the emulator was uninstalled")


def _key(cubin: bytes) -> bytes:
    return hashlib.sha256(cubin).digest()


def _parameter_count(ptx: str, kernel: str) -> int:
    entry = re.search(rf"\.entry\s+{re.escape(kernel)}\s*(?:\(([^)]*)\))?", ptx)
    if not entry:
        raise EmulatorError(f"the PTX of a launched function has no kernel {kernel}")
    return (entry[1] or "").count(".param")
