"""The choice of a backend for attention over a KV cache: the first one without a reason not to serve it."""

from __future__ import annotations

from ...kvcache_problem import CacheProblem
from .. import candidates
from ..compiled import SM80_FAMILY, SM80_ON_REQUEST, SM90A, SM100A, SM103A
from .base import CacheBackend
from .compiled import Compiled
from .emulator import Emulator
from .gathered import Gathered

PRIORITY: tuple[CacheBackend, ...] = (
    Compiled("sm90", SM90A),
    Compiled("sm100", SM100A, SM103A),
    Compiled("sm80", *SM80_FAMILY, on_request=SM80_ON_REQUEST),
    Emulator(),
    Gathered(),
)


def reasons(problem: CacheProblem) -> dict[str, list[str]]:
    """The reasons why each backend, by priority, does not serve the problem; empty if it can.

    Raises:
        RangeError: FLASH4_BACKEND names no backend.
    """
    return candidates.reasons(PRIORITY, _candidates(), problem)


def choose(problem: CacheProblem) -> CacheBackend:
    """The backend that serves the problem.

    Raises:
        BackendError: none can, or the one that FLASH4_BACKEND forces cannot.
        RangeError: FLASH4_BACKEND names no backend, or FLASH4_LOG has a value that it cannot take.
    """
    backend = candidates.first(_candidates(), problem)
    candidates.log(problem, backend.name)
    return backend


def _candidates() -> tuple[CacheBackend, ...]:
    """The backends to ask; one that serves only other calls serves these with their keys gathered."""
    return candidates.asked_for(PRIORITY, otherwise=Gathered.name)
