"""The choice of a backend for a call: the first one, by priority, that has no reason not to serve it."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .. import env
from ..flex_problem import FlexProblem
from ..problem import Problem
from . import candidates
from .base import Backend, Explains
from .compiled import SM80_FAMILY, SM80_ON_REQUEST, SM90A, SM100A, SM103A, WIDEST, Compiled
from .compiled.served import INSTALL as _INSTALL
from .cpu import Cpu
from .efficient import Efficient
from .emulator import Emulator
from .sdpa import Sdpa
from .tiled import Tiled


def _only_sm80(problem: Problem) -> bool:
    """Whether, of our kernels, those by mma.sync alone serve a call, on GPUs that have others, too."""
    spec = problem.spec
    return spec.dtype == torch.float32 or max(spec.D, spec.Dv) > WIDEST


PRIORITY: tuple[Backend, ...] = (
    Cpu(),
    Compiled("sm90", SM90A),
    Compiled("sm100", SM100A, SM103A),
    # Above torch's flash attention: at 1.00 to 1.29 times its speed on an H200 from 1k tokens on.
    Compiled("sm80", *SM80_FAMILY, on_request=SM80_ON_REQUEST, unasked=_only_sm80),
    Sdpa(),
    Efficient(),
    Tiled(),
    Emulator(),
)

Observer = Callable[[Problem | FlexProblem, str], None]
observers: list[Observer] = []
"""Functions called with (problem, backend name) on every dispatch, from the thread that serves it."""


class _Excluded(threading.local):
    names: tuple[str, ...] = ()


_excluded = _Excluded()
# Module globals, because every call on the fast path reads them.
_environment, _BACKEND, _LOG = env.NAMES, env.BACKEND.key, env.LOG.key
_warned: set[str] = set()


def reasons(problem: Problem) -> dict[str, list[str]]:
    """The reasons why each backend, by priority, does not serve the problem; empty if it can.

    Raises:
        RangeError: FLASH4_BACKEND names no backend.
    """
    return candidates.reasons(PRIORITY, _candidates(), problem)


def choose(problem: Problem) -> Backend:
    """The backend that serves the problem; observers and the log are told.

    Raises:
        BackendError: none can, or the one that FLASH4_BACKEND forces cannot.
        RangeError: FLASH4_BACKEND names no backend, or FLASH4_LOG has a value that it cannot take.
    """
    backend = first(problem)
    announce(problem, backend)
    if backend.name == Tiled.name:
        _warn_without_compiler(problem)
    return backend


def first(problem: Problem) -> Backend:
    """The backend that `choose` would name, for callers who may not use it; raises as that does."""
    return candidates.first(_candidates(), problem)


def _warn_without_compiler(problem: Problem) -> None:
    """Warn once that dropout is slow, if our kernels would serve it but for the compiler.

    Other calls without it go to torch's fused kernels where these can serve them.
    """
    spec = problem.spec
    if not spec.dropout or spec.device != "cuda" or Tiled.name in _warned or env.BACKEND.get():
        return
    ours = next((b for b in PRIORITY if isinstance(b, Compiled) and b.is_made_for(spec.capability)), None)
    why = [] if ours is None else ours.why_not(problem)
    if why and all(_INSTALL in sentence for sentence in why):
        _warned.add(Tiled.name)
        message = f"attention with dropout runs in plain torch, which is slow: {why[0]}"
        warnings.warn(message, UserWarning, stacklevel=2)


def _candidates() -> tuple[Backend, ...]:
    left_out = () if env.BACKEND.get() else _excluded.names
    asked_for = candidates.asked_for(PRIORITY)
    return tuple(b for b in asked_for if b.name not in left_out) if left_out else asked_for


def own_backend(capability: tuple[int, int]) -> str:
    """The backend of our kernels for GPUs of that compute capability; empty if there is none.

    FLASH4_BACKEND can name another one whose kernels such a GPU can run.
    """
    ours = [backend for backend in PRIORITY if isinstance(backend, Compiled)]
    forced = env.BACKEND.get()
    for backend in ours:
        if backend.name == forced and backend.can_serve(capability):
            return forced
    return next((backend.name for backend in ours if backend.is_made_for(capability)), "")


def is_plain() -> bool:
    """Whether the choice depends on the problem alone, and no observer is active."""
    return not (observers or _excluded.names or _BACKEND in _environment or _LOG in _environment)


@contextmanager
def excluding(*names: str) -> Iterator[None]:
    """Excludes backends from this thread's dispatch, so that code called by one cannot call it back."""
    before = _excluded.names
    _excluded.names = (*before, *names)
    try:
        yield
    finally:
        _excluded.names = before


def announce(problem: Problem, backend: Backend) -> None:
    """Tell observers and the log that the backend serves the problem."""
    for observer in observers:
        observer(problem, backend.name)
    how = f" by {backend.kernels()}" if isinstance(backend, Emulator) else ""
    if candidates.log(problem, backend.name, how) == "config" and isinstance(backend, Explains):
        print(*(f"    {line}" for line in backend.explain(problem)), sep="\n", file=sys.stderr)
