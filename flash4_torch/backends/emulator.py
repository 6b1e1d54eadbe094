"""Our compiled kernels, run on CPU tensors by the emulator: slow, for tests and for work without a GPU.

This backend serves only where FLASH4_BACKEND=emulator asks for it. FLASH4_ARCH names the GPU whose kernels
run, launched exactly as that GPU's backend launches them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import env, forks
from ..compile import Function, jit
from ..problem import Inputs, Problem, Saved, SavedWeights
from ..reference.weights import WeightsGradients
from .base import DqSums, Grads, Results, RunningOut
from .compiled import SM80_ON_REQUEST, TARGETS, Compiled, Target, backward, forward, limits
from .compiled import weights as weights_launch
from .compiled.served import why_missing
from .compiled.targets import Find

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

    def kernels(self) -> str:
        """Names the kernels that serve."""
        return f"the kernels for {_arch()}"

    def explain(self, problem: Problem) -> list[str]:
        return _emulated.explain(problem)

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        return _emulated.forward(inputs, problem)

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        return _emulated.backward(saved, inputs, problem)

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
        return _target(problem)

    def find(self, problem: Problem) -> Find:
        return emulated_find

    def sms(self, index: int | None = None) -> int:
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
    why += why_missing(exported=False)
    if device != "cpu":
        why.append(f"the tensors are on {device}, and it serves cpu")
    return why


def _is_asked_for() -> bool:
    return env.BACKEND.get() == Emulator.name


def _target(problem: Problem) -> Target:
    """The target of the current architecture, or the one whose kernels serve what its own refuse."""
    own = emulated_target()
    other = next((target for target in SM80_ON_REQUEST if target.arch == own.arch), None)
    return other if other is not None and limits(own, problem) and not limits(other, problem) else own


def _no_kernels(problem: Problem) -> list[str]:
    """Reasons why the architecture's kernels cannot serve a problem."""
    return [f"{sentence} (the kernels for {_arch()})" for sentence in limits(_target(problem), problem)]


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
