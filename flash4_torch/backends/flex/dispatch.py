"""The choice of a backend for programmable attention: the first one without a reason not to serve a call."""

from __future__ import annotations

import sys

from ... import env
from ...errors import BackendError
from ...flex_problem import FlexProblem
from ..compiled import SM80_FAMILY, SM80_ON_REQUEST, SM90A, SM100A, SM103A
from ..dispatch import observers
from .base import FlexBackend
from .compiled import Compiled, Emulated
from .tiled import Tiled

PRIORITY: tuple[FlexBackend, ...] = (
    Compiled("sm90", SM90A),
    Compiled("sm100", SM100A, SM103A),
    Compiled("sm80", *SM80_FAMILY, on_request=SM80_ON_REQUEST),
    Emulated(),
    Tiled(),
)
_logged: set[tuple[FlexProblem, str]] = set()


def reasons(problem: FlexProblem) -> dict[str, list[str]]:
    """The reasons why each backend, by priority, does not serve the problem; empty if it can.

    Raises:
        RangeError: FLASH4_BACKEND names no backend.
    """
    candidates, forced = _candidates(), env.BACKEND.get()
    passed_over = f"{env.BACKEND.name}={forced} asks for another"
    return {
        backend.name: [*backend.why_not(problem), *([] if backend in candidates else [passed_over])]
        for backend in PRIORITY
    }


def choose(problem: FlexProblem) -> FlexBackend:
    """The backend that serves the problem.

    Raises:
        BackendError: none can, or the one that FLASH4_BACKEND forces cannot.
        RangeError: FLASH4_BACKEND names no backend, or FLASH4_LOG has a value that it cannot take.
    """
    for backend in _candidates():
        if not backend.why_not(problem):
            for observer in observers:
                observer(problem, backend.name)
            if env.LOG.get() and (problem, backend.name) not in _logged:
                _logged.add((problem, backend.name))
                print(f"flash4_torch: {backend.name} serves {problem}", file=sys.stderr)
            return backend
    raise BackendError(str(problem), {b.name: b.why_not(problem) for b in _candidates()})


def _candidates() -> tuple[FlexBackend, ...]:
    """The backends to ask; one that serves only other calls leaves these to plain torch."""
    forced = env.BACKEND.get()
    if not forced:
        return PRIORITY
    own = tuple(b for b in PRIORITY if b.name == forced)
    return own or tuple(b for b in PRIORITY if b.name == Tiled.name)
