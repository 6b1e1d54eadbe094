"""The choice of a backend for programmable attention: the first one without a reason not to serve a call."""

from __future__ import annotations

import torch

from ...flex_problem import FlexProblem
from .. import candidates
from ..compiled import SM80_FAMILY, SM80_ON_REQUEST, SM90A, SM100A, SM103A
from ..compiled.targets import Find
from ..dispatch import observers
from .base import FlexBackend
from .compiled import Compiled, Emulated
from .cpu import Cpu
from .tiled import Tiled

PRIORITY: tuple[FlexBackend, ...] = (
    Compiled("sm90", SM90A),
    Compiled("sm100", SM100A, SM103A),
    Compiled("sm80", *SM80_FAMILY, on_request=SM80_ON_REQUEST),
    Emulated(),
    Cpu(),
    Tiled(),
)


def reasons(problem: FlexProblem) -> dict[str, list[str]]:
    """The reasons why each backend, by priority, does not serve the problem; empty if it can.

    Raises:
        RangeError: FLASH4_BACKEND names no backend.
    """
    return candidates.reasons(PRIORITY, _candidates(), problem)


def choose(problem: FlexProblem) -> FlexBackend:
    """The backend that serves the problem.

    Raises:
        BackendError: none can, or the one that FLASH4_BACKEND forces cannot.
        RangeError: FLASH4_BACKEND names no backend, or FLASH4_LOG has a value that it cannot take.
    """
    backend = candidates.first(_candidates(), problem)
    for observer in observers:
        observer(problem, backend.name)
    candidates.log(problem, backend.name)
    return backend


def find_on(device: torch.device) -> Find | None:
    """What finds kernels of ours on a GPU, None if none serve it."""
    capability = torch.cuda.get_device_capability(device)
    made_for = (backend for backend in _candidates() if isinstance(backend, Compiled))
    return next((find for backend in made_for if (find := backend.find_on(capability)) is not None), None)


def _candidates() -> tuple[FlexBackend, ...]:
    """The backends to ask; one that serves only other calls leaves these to plain torch, and `Cpu` those that
    it cannot serve.
    """
    asked = candidates.asked_for(PRIORITY, otherwise=Tiled.name)
    return (*asked, PRIORITY[-1]) if [x.name for x in asked] == [Cpu.name] else asked
