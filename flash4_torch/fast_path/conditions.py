"""Whether a call may take the fast path: who must see it, and who serves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._C import (
    _are_functorch_transforms_active,
    _get_deterministic_algorithms,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch.autograd import _profiler_enabled, forward_ad

from .. import backends
from ..backends import Prepares
from ..ops.autocast import no_autocast
from ..problem import Problem

_Launch = TypeVar("_Launch", bound=Callable[..., Any])


def must_take_slow_path() -> bool:
    """Whether an observer is active whom the fast path would bypass."""
    return guards_would_miss() or guards_would_see()


def guards_would_miss() -> bool:
    """Whether an observer is active of whom `recent`'s guards know nothing."""
    return (
        _is_torch_function_mode_enabled()
        or _profiler_enabled()
        or forward_ad._current_level >= 0
        or _get_deterministic_algorithms()  # they fill fresh memory
        or not backends.is_plain()
    )


def guards_would_see() -> bool:
    """Whether an observer is active who changes the dispatch keys of this thread, which guards compare."""
    return _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active() or _is_tracing()


def prepares(problem: Problem) -> Prepares | None:
    """The backend that serves the problem, if it can prepare calls."""
    backend = backends.choose(problem)
    return backend if isinstance(backend, Prepares) else None


def below_autocast(launch: _Launch) -> _Launch:
    """The launch without autocast, if that is on: below the operators there is none, and it would change
    calls into torch.
    """
    if not _is_any_autocast_enabled():
        return launch

    def launched(*args: Any) -> Any:
        with no_autocast():
            return launch(*args)

    return cast(_Launch, launched)
