"""Our compiled kernels, run on CPU tensors by the emulator: slow, for tests and for work without a GPU.

This backend serves only where FLASH4_BACKEND=emulator asks for it. FLASH4_ARCH names the GPU whose kernels
run. Wherever those kernels can serve, they are launched exactly as that GPU's backend launches them;
everything else goes to small kernels that are the same for every GPU.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import env, forks
from ..compile import Function, jit
from ..problem import Inputs, Problem, Saved, SavedWeights
from ..reference.weights import WeightsGradients
from . import sequences
from .base import DqSums, Grads, Results, RunningOut
from .compiled import SM80_ON_REQUEST, TARGETS, Compiled, Target, backward, forward, limits
from .compiled import weights as weights_launch
from .compiled.targets import Find

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_D = 128
_NEEDED = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
_FARTHEST = 1 << 30
"""The kernels' largest bound; a wider bound is no bound at all."""

_one_at_a_time = forks.Lock()
"""The DSL has one target and one runtime library per process, so one thread compiles and launches at a time.
"""


class Emulator:
    name = "emulator"

    def why_not(self, problem: Problem) -> list[str]:
        spec = problem.spec
        why = why_not_emulated(spec.device)
        # FLASH4_ARCH is read only if this backend was asked for; otherwise a wrong value does not matter.
        return why + _no_kernels(problem) if _is_asked_for() else why

    def kernels(self, problem: Problem) -> str:
        """Names the kernels that serve a problem."""
        if _serves(problem):
            return f"the kernels for {_arch()}"
        return "the small kernel for any GPU"

    def explain(self, problem: Problem) -> list[str]:
        return _emulated.explain(problem) if _serves(problem) else []

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        if _serves(problem):
            return _emulated.forward(inputs, problem)
        if problem.spec.varlen:
            return sequences.forward(inputs, problem, lambda dense: self)
        q, k, v = (_unit_stride(t) for t in inputs[:3])
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
        if out.numel() and k.numel():
            _run("forward", problem, q, k, v, out, lse)
        return Results(out, lse)

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if _serves(problem):
            return _emulated.backward(saved, inputs, problem)
        if problem.spec.varlen:
            return sequences.backward(saved, inputs, problem, lambda dense: self)
        q, k, v, out, dout = (_unit_stride(t) for t in (*inputs[:3], saved.out, saved.dout))
        dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
        if out.numel() and k.numel():
            lse = saved.lse.contiguous().detach()
            dlse = None if saved.dlse is None else saved.dlse.contiguous().detach()
            delta = torch.empty_like(lse)
            _run("backward", problem, q, k, v, out, lse, dout, dlse, delta, dq, dk, dv)
        return Grads(dq, dk, dv)

    def running_out(self, q: Tensor, Dv: int) -> RunningOut:
        return _emulated.running_out(q, Dv)

    def dq_sums(self, q: Tensor, saved: Saved) -> DqSums:
        return _emulated.dq_sums(q, saved)

    def weights(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> Tensor:
        return _emulated.weights(saved, inputs, problem)

    def weights_backward(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> WeightsGradients:
        return _emulated.weights_backward(saved, inputs, problem)


class _Emulated(Compiled):
    """The backend of the GPU that FLASH4_ARCH names, with the emulator in place of the GPU."""

    def __init__(self) -> None:
        super().__init__("emulated", *TARGETS.values())
        self._counter = torch.zeros(1, dtype=torch.int32)

    def target(self, problem: Problem) -> Target:
        return _target(problem) or emulated_target()

    def limits(self, problem: Problem) -> tuple[str, ...]:
        if _target(problem) is None:
            return (f"there are no kernels for {_arch()}",)
        return super().limits(problem)

    def find(self, problem: Problem) -> Find:
        return emulated_find

    def sms(self) -> int:
        return emulated_num_sms()

    def kernel(self, problem: Problem, index: int) -> forward.Kernel:
        return forward.decide(self.target(problem), problem, emulated_num_sms(), emulated_find)

    def weights_kernel(self, problem: Problem, average_heads: bool) -> weights_launch.Kernel:
        return weights_launch.decide(self.target(problem), problem, average_heads, emulated_find)

    def backward_kernels(self, problem: Problem, index: int) -> backward.Kernels:
        return backward.decide(self.target(problem), problem, emulated_num_sms(), emulated_find)

    def counter(self, index: int) -> Tensor:
        """One counter for all launches: a launch that does not leave it at 0 spoils the next one."""
        return self._counter


_emulated = _Emulated()


def why_not_emulated(device: str) -> list[str]:
    """The reasons why the emulator runs nothing for tensors on that kind of device."""
    why = [] if _is_asked_for() else [f"it serves only where {env.BACKEND.name}={Emulator.name} asks for it"]
    if missing := _missing():
        why.append(f"{' and '.join(missing)} must be installed (pip install 'flash4_torch[kernels]')")
    if device != "cpu":
        why.append(f"the tensors are on {device}, and it serves cpu")
    return why


@functools.cache
def _missing() -> list[str]:
    """Required packages that are not installed."""
    return [package for module, package in _NEEDED.items() if not importlib.util.find_spec(module)]


def _is_asked_for() -> bool:
    return env.BACKEND.get() == Emulator.name


def _target(problem: Problem) -> Target | None:
    """The target whose kernels serve the problem, on the current architecture; None if it has no kernels."""
    own = TARGETS.get(_arch())
    other = next((target for target in SM80_ON_REQUEST if own is not None and target.arch == own.arch), None)
    return other if other is not None and limits(own, problem) and not limits(other, problem) else own


def _serves(problem: Problem) -> bool:
    """Whether the architecture's own kernels serve the problem."""
    target = _target(problem)
    return target is not None and not limits(target, problem)


def _no_kernels(problem: Problem) -> list[str]:
    """Reasons why neither the architecture's own kernels nor the kernel for every GPU can serve a problem."""
    target, small = _target(problem), _limits(problem)
    beyond = limits(target, problem) if target else ()
    if not small or (target and not beyond):
        return []
    return [
        *(f"{sentence} (the kernels for {_arch()})" for sentence in beyond),
        *(f"{sentence} (the small kernel for any GPU)" for sentence in small),
    ]


def _limits(problem: Problem) -> list[str]:
    """Reasons why the kernel for every GPU cannot serve the problem."""
    spec = problem.spec
    why = []
    if spec.dtype not in _DTYPES:
        why.append(f"the dtype is {spec.dtype}, and it serves bfloat16, float16 and float32")
    if max(spec.D, spec.Dv) > _MAX_D:
        why.append(f"D is {spec.D} and Dv is {spec.Dv}, and it serves up to {_MAX_D}")
    if spec.mask:
        why.append("it takes no attn_mask")
    if spec.dropout:
        why.append("it has no dropout")
    if spec.sinks:
        why.append("it has no sinks")
    if spec.weights:
        why.append("it has no attention weights")
    return why


def _arch() -> str:
    """The architecture of the active device, or of the one that a call would make."""
    from ..emulator import emulate

    device = emulate.active()
    return device.arch if device else env.ARCH.get()


def emulated_target() -> Target:
    """The target whose kernels the emulator runs."""
    return TARGETS[_arch()]


def emulated_num_sms() -> int:
    """SMs of the emulated GPU."""
    from ..emulator import emulate, host

    device = emulate.active()
    return (device and device.options.num_sms) or host.ARCHITECTURES[_arch()].num_sms


def emulated_find(entry: str, static: tuple[object, ...]) -> Function:
    """The kernel of an entry and its static arguments; calling it runs it in the emulator."""
    return functools.partial(_launch, entry, static)


def _launch(entry: str, static: tuple[object, ...], *args: Any) -> None:
    """Compiles if needed and launches; raises EmulationError if the kernel does something wrong."""
    from ..emulator import emulate

    args = _detached(args)
    with _one_at_a_time.held(), emulate.active_or_new() as device:
        compiled = _compiled(device.arch, entry, static)
        with device.touching(*_tensors(args)):
            compiled(*args)


@functools.cache
def _compiled(arch: str, entry: str, static: tuple[object, ...]) -> Function:
    """The compiled function; a device of that architecture must be active."""
    with jit.quiet():
        return jit.resolve(entry)(*static)


def _detached(args: Any) -> Any:
    """The arguments with every tensor detached: DLPack refuses tensors that require a gradient."""
    if isinstance(args, tuple):
        return tuple(map(_detached, args))
    return args.detach() if isinstance(args, Tensor) else args


def _tensors(args: Any) -> Iterator[Tensor]:
    """All tensors among the arguments, including those inside tuples."""
    if isinstance(args, Tensor):
        yield args
    elif isinstance(args, tuple):
        for arg in args:
            yield from _tensors(arg)


def _unit_stride(tensor: Tensor) -> Tensor:
    """The tensor with unit stride in its last dimension, as the kernels need it, and detached for DLPack."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).detach()


def _run(direction: str, problem: Problem, *tensors: Tensor | None) -> None:
    """Compiles if needed and launches; raises EmulationError if the kernel does something wrong."""
    from ..emulator import emulate

    s = problem.spec
    dtype = str(s.dtype).removeprefix("torch.")
    with _one_at_a_time.held(), emulate.active_or_new() as device:
        compiled = _compile(device.arch, direction, dtype, s.D, s.Dv, s.left, s.right, s.softcap, s.dlse)
        with device.touching(*(t for t in tensors if t is not None)):
            compiled(*tensors, _rule(problem), 0)


@functools.cache
def _compile(arch: str, direction: str, dtype: str, *static: Any) -> Any:
    """The compiled kernels; a device of that architecture must be active."""
    from ..kernels.aux_kernels import rowwise

    *plan, dlse = static
    if direction == "forward":
        return rowwise.compile_forward(dtype, rowwise.Plan(*plan))
    return rowwise.compile_backward(dtype, rowwise.Plan(*plan), dlse=dlse)


def _rule(problem: Problem) -> tuple[float, float, int, int]:
    left, right = (0 if b is None else max(-_FARTHEST, min(b, _FARTHEST)) for b in problem.band)
    return problem.scale, problem.softcap, left, right
