"""Whether a call may take the fast path: who must see it, and who serves it."""

from __future__ import annotations

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
from ..backends.base import CallsTorch
from ..problem import Problem


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
    """The backend that serves the problem, if it can prepare calls.

    Below the operators there is no autocast; here there may be, and it would change calls into torch.
    """
    backend = backends.choose(problem)
    if isinstance(backend, CallsTorch) and _is_any_autocast_enabled():
        return None
    return backend if isinstance(backend, Prepares) else None
