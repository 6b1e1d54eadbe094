"""The choice among backends: the first one, by priority, without a reason not to serve a call."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeVar

from .. import env
from ..errors import BackendError

_Problem = TypeVar("_Problem", contravariant=True)


class Candidate(Protocol[_Problem]):
    """What all kinds of backends have."""

    name: str

    def why_not(self, problem: _Problem) -> list[str]: ...


_Backend = TypeVar("_Backend", bound=Candidate[Any])
_logged: set[tuple[Hashable, ...]] = set()


def asked_for(backends: tuple[_Backend, ...], otherwise: str = "") -> tuple[_Backend, ...]:
    """The backends that FLASH4_BACKEND leaves: all if it is empty, else the one that it names.

    otherwise: the name of the backend to ask instead of one that serves other calls only.
    """
    forced = env.BACKEND.get()
    if not forced:
        return backends
    named = tuple(b for b in backends if b.name == forced)
    return named or tuple(b for b in backends if b.name == otherwise)


def reasons(
    backends: Sequence[Candidate[_Problem]], candidates: Sequence[Candidate[_Problem]], problem: _Problem
) -> dict[str, list[str]]:
    """The reasons why each backend does not serve the problem; those that are no candidates have one more."""
    forced = env.BACKEND.get()
    passed_over = f"{env.BACKEND.name}={forced} asks for another" if forced else "this thread excludes it"
    return {
        backend.name: [*backend.why_not(problem), *([] if backend in candidates else [passed_over])]
        for backend in backends
    }


def first(candidates: tuple[_Backend, ...], problem: object) -> _Backend:
    """The first candidate that can serve the problem.

    Raises:
        BackendError: none can.
    """
    for backend in candidates:
        if not backend.why_not(problem):
            return backend
    raise BackendError(str(problem), {b.name: b.why_not(problem) for b in candidates})


def log(problem: Hashable, name: str, how: str = "") -> str:
    """Print once for each problem who serves it, if FLASH4_LOG asks for it; returns what FLASH4_LOG asks for,
    or '' if nothing is printed.

    Raises:
        RangeError: FLASH4_LOG has a value that it cannot take.
    """
    wanted = env.LOG.get()
    if not wanted or (key := (problem, name, wanted)) in _logged:
        return ""
    _logged.add(key)
    print(f"flash4_torch: {name} serves {problem}{how}", file=sys.stderr)
    return wanted
