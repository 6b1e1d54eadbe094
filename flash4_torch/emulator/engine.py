"""The C++ engine, seen from Python: programs, launches and their reports."""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flash4_torch.emulator import build, ptx
from flash4_torch.emulator.errors import EmulatorError, LaunchError
from flash4_torch.emulator.limits import max_shared, refuse_impossible
from flash4_torch.emulator.lower import SHARED_BASE, lower
from flash4_torch.emulator.report import PIPES, Counters, Finding, Line, Place, Report

Dim3 = tuple[int, int, int]

SCHEDULES = ("eager", "late", "fuzz")
STRICT = frozenset({"uninitialised", "wait_ld", "exit", "lanes"})
_SLICE = 50  # milliseconds that the engine runs before Python looks at signals and the clock
_PLAIN = "it must be contiguous and in the CPU's memory"
DEVICE_SMS = {80: 108, 86: 84, 87: 16, 89: 142, 90: 132, 100: 148, 103: 148, 120: 188, 121: 48}


@dataclass(frozen=True)
class Options:
    """How to run a launch.

    Attributes:
        schedule: "eager" does asynchronous work when it is issued, "late" as late as the program allows,
            "fuzz" at random moments derived from `seed`, which also decides which warp runs next.
        races: check the order of accesses to shared memory and TMEM.
        strict: names of checks that correct programs may fail: "uninitialised" (reading shared memory or TMEM
            that nobody wrote), "wait_ld" (using what tcgen05.ld loads before tcgen05.wait::ld), "exit"
            (leaving before a bulk store has read its shared memory), "lanes" (a lane that speaks for its warp
            after tcgen05.wait without bar.warp.sync).
        compact: let PTX registers share space in the engine.
        max_instructions: number of warp-instructions after which a launch counts as run away.
        timeout: seconds of wall time on this machine after which a launch ends with a finding that says where
            every warp is; None: no limit. Ctrl-C ends a launch at any time.
        num_sms: how many SMs the device has, and so how many CTAs it holds at a time; None: that of the
            architecture's largest GPU, DEVICE_SMS.
    """

    schedule: str = "eager"
    seed: int = 0
    races: bool = True
    strict: frozenset[str] = frozenset()
    compact: bool = True
    max_instructions: int = 20_000_000_000
    timeout: float | None = None
    num_sms: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; it must be one of {', '.join(SCHEDULES)}")
        unknown = set(self.strict) - STRICT
        if unknown:
            raise ValueError(f"strict names {sorted(unknown)}; known are {sorted(STRICT)}")
        for name, low, bits in (("seed", 0, 64), ("max_instructions", 0, 64), ("num_sms", 1, 32)):
            value = getattr(self, name)
            if value is None and name == "num_sms":
                continue
            if not isinstance(value, int) or not low <= value < 2**bits:
                raise ValueError(f"{name} is {value!r}; it must be an integer from {low} to 2**{bits} - 1")
        if self.timeout is not None and not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise ValueError(f"timeout is {self.timeout!r}; it must be a number of seconds above 0")


_ARRAYS = (
    *("operation", "guard", "guard_negated", "reg_begin", "regs", "writes", "attr_begin", "attrs"),
    "reconverge",
)


class _ProgramText(ctypes.Structure):
    """`ProgramText` in csrc_stubs/no_gpu/program.h."""

    _fields_ = (
        ("ops", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("inits", ctypes.c_uint32),
        *((f"init_{name}", ctypes.c_void_p) for name in ("kind", "bytes", "offset", "value")),
        *((name, ctypes.c_uint32) for name in ("register_bytes", "static_shared_bytes", "register_cap")),
    )


_CHECKS = ("check_races", "strict_uninitialised", "strict_wait_ld", "strict_exit", "strict_lanes")


class _LaunchText(ctypes.Structure):
    """`LaunchText` in csrc_stubs/no_gpu/api.cpp."""

    _fields_ = (
        ("program", ctypes.c_void_p),
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block", "cluster")),
        ("dynamic_shared", ctypes.c_uint32),
        ("params", ctypes.c_void_p),
        ("param_bytes", ctypes.c_uint64),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("bounded", "schedule", "arch", "max_resident")),
        *((name, ctypes.c_uint64) for name in ("seed", "max_instructions")),
        *((name, ctypes.c_uint8) for name in _CHECKS),
    )


class _FindingText(ctypes.Structure):
    """`FindingText` in csrc_stubs/no_gpu/api.cpp."""

    _fields_ = (
        ("kind", ctypes.c_char_p),
        ("message", ctypes.c_char_p),
        ("cta", ctypes.c_uint32 * 3),
        *(
            (n, ctypes.c_uint32)
            for n in ["rank", "warp", "op", "has_other", "other_rank", "other_warp", "other_op"]
        ),
        ("times", ctypes.c_uint64),
    )


_COUNTERS = (
    *("shared_read", "shared_written", "global_read", "global_written", "mma", "mma_flops"),
    *("barrier_waits", "instructions", "async_bytes"),
)


class _Counters(ctypes.Structure):
    """`Counters` in csrc_stubs/no_gpu/machine.h."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in _COUNTERS)


class _Engine:
    """The shared object with its functions' types, and the table of operations."""

    def __init__(self) -> None:
        lib = build.load(build.engine())
        pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
        for name, result, arguments in (
            ("operation_count", u64, []),
            ("operation_name", ctypes.c_char_p, [u64]),
            ("operation_pipe", ctypes.c_uint32, [u64]),
            ("program_new", pointer, [ctypes.POINTER(_ProgramText)]),
            ("program_free", None, [pointer]),
            ("launch_new", pointer, [ctypes.POINTER(_LaunchText)]),
            ("launch_run", ctypes.c_uint32, [pointer, ctypes.c_uint32]),
            ("launch_give_up", None, [pointer, ctypes.c_char_p, ctypes.c_char_p]),
            ("launch_free", None, [pointer]),
            ("finished_ctas", u64, [pointer]),
            ("finding_count", u64, [pointer]),
            ("finding", None, [pointer, u64, ctypes.POINTER(_FindingText)]),
            ("counters", ctypes.POINTER(_Counters), [pointer]),
            ("counts", ctypes.POINTER(u64), [pointer, ctypes.POINTER(u64)]),
            ("shared_bytes", ctypes.POINTER(u64), [pointer]),
            ("shared_passes", ctypes.POINTER(u64), [pointer]),
        ):
            function = getattr(lib, f"flash4_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        count = self.operation_count()
        self.operations = {self.operation_name(i).decode(): i for i in range(count)}
        self.pipes = [PIPES[self.operation_pipe(i)] for i in range(count)]

    def __getattr__(self, name: str) -> Any:  # the functions set above
        raise AttributeError(name)


@functools.cache
def engine() -> _Engine:
    """Builds and loads the engine on first use; raises BuildError where there is no compiler."""
    return _Engine()


class Program:
    """One PTX kernel, ready to launch. Programs are immutable and may be launched any number of times."""

    def __init__(self, kernel: ptx.Kernel, *, arch: int, compact: bool = True):
        self.kernel = kernel
        self.arch = arch
        lowered = lower(kernel, engine().operations, compact=compact)
        self._static_shared = lowered.static_shared_bytes - SHARED_BASE
        if self._static_shared > max_shared(arch):
            shared = f"{self._static_shared} bytes of static shared memory"
            raise LaunchError(f"{kernel.name} has {shared}; a CTA can have {max_shared(arch)}")
        self.pipes = [engine().pipes[op] for op in lowered.operation]
        inits = list(lowered.start.inits())
        columns = [
            np.array([init[i] for init in inits], dtype)
            for i, dtype in enumerate((np.uint8, np.uint8, np.uint32, np.int64))
        ]
        arrays = [getattr(lowered, name) for name in _ARRAYS]
        text = _ProgramText(
            len(kernel.instructions),
            *(a.ctypes.data for a in arrays),
            len(inits),
            *(c.ctypes.data for c in columns),
            lowered.start.bytes,
            lowered.static_shared_bytes,
            _register_cap(kernel),
        )
        self._handle = engine().program_new(ctypes.byref(text))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            engine().program_free(self._handle)

    def launch(
        self,
        params: bytes,
        *,
        grid: Dim3,
        block: Dim3,
        cluster: Dim3 = (1, 1, 1),
        dynamic_shared: int = 0,
        regions: Iterable[tuple[int, int]] | None = None,
        options: Options | None = None,
    ) -> Report:
        """Runs all CTAs and returns what was found and counted; raises for nothing that the kernel does.

        params: the kernel's parameters as the driver would pack them.
        regions: (address, bytes) of the global memory that the kernel may touch in addition to its module's
        variables; None: anything, so that a wrong address may end the process.
        Raises LaunchError for what the launch call of a GPU refuses.
        """
        options = options or Options()
        refuse_impossible(grid, block, cluster, dynamic_shared, self._static_shared, self.arch)
        spans = _spans([*(regions or ()), *((v.address, v.data.nbytes) for v in self.kernel.variables)])
        buffer = ctypes.create_string_buffer(params, max(len(params), 1))
        text = _LaunchText(
            self._handle,
            grid,
            block,
            cluster,
            dynamic_shared,
            ctypes.addressof(buffer),
            len(params),
            spans.ctypes.data,
            len(spans) // 2,
            regions is not None,
            SCHEDULES.index(options.schedule),
            self.arch,
            options.num_sms or DEVICE_SMS.get(self.arch, DEVICE_SMS[90]),
            options.seed,
            options.max_instructions,
            options.races,
            "uninitialised" in options.strict,
            "wait_ld" in options.strict,
            "exit" in options.strict,
            "lanes" in options.strict,
        )
        handle = engine().launch_new(ctypes.byref(text))
        if not handle:
            raise MemoryError(f"no memory for a launch of {self.kernel.name}")
        try:
            _run(handle, options.timeout)
            report = self._report(handle)
            finished, ctas = engine().finished_ctas(handle), math.prod(grid)
        finally:
            engine().launch_free(handle)
        if finished != ctas and not report.findings:
            raise EmulatorError(f"{self.kernel.name}: {finished} of {ctas} CTAs ran, for no known reason")
        return report

    def _report(self, handle: int) -> Report:
        lib = engine()
        length = ctypes.c_uint64()
        counts = lib.counts(handle, ctypes.byref(length))
        tables = [
            np.ctypeslib.as_array(numbers, (length.value,)).reshape(-1, len(self.pipes)).T.copy()
            for numbers in (counts, lib.shared_bytes(handle), lib.shared_passes(handle))
        ]
        raw = lib.counters(handle).contents
        by_pipe: dict[str, int] = dict.fromkeys(PIPES, 0)
        for pipe, count in zip(self.pipes, tables[0].sum(1).tolist(), strict=True):
            by_pipe[pipe] += count
        fields = {name: getattr(raw, name) for name in _COUNTERS}
        fields["instructions"] = sum(by_pipe.values())
        return Report(
            kernel=self.kernel.name,
            findings=[self._finding(handle, i) for i in range(lib.finding_count(handle))],
            counters=Counters(by_pipe=by_pipe, **fields),
            make_lines=functools.partial(_lines, self.kernel.instructions, self.pipes, tables),
        )

    def _finding(self, handle: int, index: int) -> Finding:
        raw = _FindingText()
        engine().finding(handle, index, ctypes.byref(raw))
        x, y, z = raw.cta
        at = self._place((x, y, z), raw.rank, raw.warp, raw.op)
        other = self._place(None, raw.other_rank, raw.other_warp, raw.other_op) if raw.has_other else None
        return Finding(raw.kind.decode(), self._with_lines(raw.message.decode()), at, other, raw.times)

    def _place(self, cta: Dim3 | None, rank: int, warp: int, op: int) -> Place:
        ins = self.kernel.instructions[min(op, len(self.kernel.instructions) - 1)]
        return Place(cta, rank, warp, ins.line, ins.text, ins.source)

    def _with_lines(self, message: str) -> str:
        """`message` with source lines: the engine writes @op:N for the instruction with index N."""
        head, *rest = message.split("@op:")
        for part in rest:
            digits = len(part) - len(part.lstrip("0123456789"))
            ins = self.kernel.instructions[int(part[:digits])]
            head += f"PTX line {ins.line} ({ins.text.strip()}){part[digits:]}"
        return head


def _lines(
    instructions: Sequence[ptx.Instruction], pipes: Sequence[str], tables: Sequence[np.ndarray]
) -> list[Line]:
    rows = (table.tolist() for table in tables)
    return [
        Line(ins.line, ins.text, ins.source, pipe, *map(tuple, numbers))
        for ins, pipe, *numbers in zip(instructions, pipes, *rows, strict=True)
    ]


def _run(handle: int, timeout: float | None) -> None:
    """Runs a launch to its end. Between slices Python handles signals, so that Ctrl-C ends it."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    while not engine().launch_run(handle, _SLICE):
        if time.monotonic() >= end:
            engine().launch_give_up(handle, b"timeout", f"the launch has not ended in {timeout} s:".encode())


def _spans(regions: Sequence[tuple[int, int]]) -> np.ndarray:
    """Begins and ends of memory regions, ascending; overlapping regions are merged into one span."""
    spans: list[list[int]] = []
    for begin, size in sorted(regions):
        if spans and begin < spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], begin + size)
        else:
            spans.append([begin, begin + size])
    return np.array(spans, np.uint64).ravel()


def _register_cap(kernel: ptx.Kernel) -> int:
    """The largest register count per thread at launch that the kernel's directives allow; 0: unknown."""
    raised = [
        ins.operands[0].value
        for ins in kernel.instructions
        if ins.opcode.startswith("setmaxnreg.inc") and isinstance(ins.operands[0], ptx.Immediate)
    ]
    return min([n for n in (kernel.max_registers, *raised) if n], default=0)


def pack_parameters(kernel: ptx.Kernel, values: Sequence[bytes]) -> bytes:
    """The parameters' bytes at the offsets that the kernel declares."""
    if len(values) != len(kernel.params):
        raise LaunchError(f"{kernel.name} takes {len(kernel.params)} parameters, got {len(values)}")
    for parameter, value in zip(kernel.params, values, strict=True):
        if len(value) != parameter.size:
            raise LaunchError(f"{kernel.name}: {parameter.name} has {parameter.size} bytes, got {len(value)}")
    size = max((p.offset + p.size for p in kernel.params), default=0)
    packed = bytearray(size)
    for parameter, value in zip(kernel.params, values, strict=True):
        packed[parameter.offset : parameter.offset + len(value)] = value
    return bytes(packed)


def run_ptx(
    text: str,
    args: Sequence[Any] = (),
    *,
    grid: Dim3 = (1, 1, 1),
    block: Dim3 = (32, 1, 1),
    cluster: Dim3 = (1, 1, 1),
    dynamic_shared: int = 0,
    options: Options | None = None,
    check: bool = True,
) -> Report:
    """Runs the only kernel of a PTX text.

    Args:
        args: for each parameter a contiguous CPU tensor or NumPy array (its address is passed, and the kernel
            may touch no other memory than these), or the parameter's bytes (`numpy.int32(3)` or `b"..."`).
        check: raise EmulationError for findings.

    Raises:
        PtxError: a text that is not PTX.
        UnsupportedInstruction: an instruction that the emulator does not implement.
        LaunchError: a launch that no GPU would accept.
    """
    module = ptx.parse(text)
    if len(module.kernels) != 1:
        raise LaunchError(f"run_ptx runs the only kernel of a text; this one has {len(module.kernels)}")
    (kernel,) = module.kernels
    program = Program(kernel, arch=module.arch, compact=(options or Options()).compact)
    regions, values = [], []
    for arg in args:
        address = _address(arg)
        if address is None:
            values.append(_bytes_of(arg))
        else:
            regions.append((address, arg.nbytes))
            values.append(address.to_bytes(8, "little"))
    report = program.launch(
        pack_parameters(kernel, values),
        grid=grid,
        block=block,
        cluster=cluster,
        dynamic_shared=dynamic_shared,
        regions=regions,
        options=options,
    )
    if check:
        report.raise_findings()
    return report


def _bytes_of(arg: Any) -> bytes:
    if isinstance(arg, bytes):
        return arg
    if isinstance(arg, np.generic):
        return arg.tobytes()
    raise LaunchError(f"an argument is {arg!r}; it must be a tensor, an array, a NumPy number or bytes")


def _address(arg: Any) -> int | None:
    if hasattr(arg, "data_ptr"):
        if arg.device.type != "cpu" or not arg.is_contiguous():
            raise LaunchError(f"an argument is a tensor of strides {arg.stride()} on {arg.device}; {_PLAIN}")
        return int(arg.data_ptr())
    if isinstance(arg, np.ndarray):
        if not arg.flags.c_contiguous:
            raise LaunchError(f"an argument is an array of strides {arg.strides}; {_PLAIN}")
        return int(arg.ctypes.data)
    return None
