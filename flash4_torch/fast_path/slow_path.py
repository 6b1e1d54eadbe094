"""Who must see every call, and is not asked in the fast path."""

from __future__ import annotations

from torch._C import (
    _are_functorch_transforms_active,
    _get_deterministic_algorithms,
    _is_torch_function_mode_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch.autograd import _profiler_enabled, forward_ad

from .. import backends


def must_take_slow_path() -> bool:
    """Whether an observer is active whom the fast path would bypass."""
    return (
        _len_torch_dispatch_stack() > 0
        or _is_torch_function_mode_enabled()
        or _are_functorch_transforms_active()
        or _is_tracing()
        or _profiler_enabled()
        or forward_ad._current_level >= 0
        or _get_deterministic_algorithms()  # they fill fresh memory
        or not backends.is_plain()
    )
