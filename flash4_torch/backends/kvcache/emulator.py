"""Our compiled kernels, run on CPU tensors by the emulator, where FLASH4_BACKEND=emulator asks for it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kvcache_problem import CacheProblem
from ..compiled.targets import Find, Target
from ..compiled.tensors import past_dispatcher
from ..compiled.workspace import Need, Workspace, allocated
from ..emulator import emulated_find, emulated_num_sms, emulated_target, why_not_emulated
from . import decode_kernel
from .compiled import Compiled

_CPU = -1
"""Index of the device of CPU tensors."""


class Emulator(Compiled):
    """The backend of the GPU that FLASH4_ARCH names, with the emulator in place of the GPU."""

    def __init__(self) -> None:
        super().__init__("emulator")

    def why_not(self, problem: CacheProblem) -> list[str]:
        return why_not_emulated(problem.spec.device) or list(
            decode_kernel.limits(problem, emulated_target().decode)
        )

    def target(self, problem: CacheProblem) -> Target:
        return emulated_target()

    def find(self, problem: CacheProblem) -> Find:
        return emulated_find

    def sms(self, index: int) -> int:
        return emulated_num_sms()

    def current_device(self) -> int:
        return _CPU

    def workspace(self, index: int, needs: tuple[Need, ...]) -> Workspace:
        return allocated(needs, past_dispatcher("cpu"))

    def counters(self, index: int, number: int) -> Tensor:
        return torch.zeros(number, dtype=torch.int32)
