"""The short way from `attention` to a kernel, for calls that have been made before.

Arguments' checks, the dispatcher and the choice of a backend take several times as long as a launch. They
look at no tensor's numbers, so for the same sizes, strides, dtypes and flags they end the same. The law here:
the short way may only ever do what the long way would do. So it is taken

- if the long way has served a call of the same signature, and its backend could `prepare` a launch for it;
- where nobody listens whom it would pass by: no tangent is asked for, no mode, subclass, transform, tracer or
  profiler is at work, autocast would change no tensor, fresh memory is not filled (deterministic algorithms),
  no environment variable or context chooses or observes a backend, no hook takes what autograd saves.

An observer of operators that torch has no flag for is passed by: a `torch.profiler.ExecutionTraceObserver`
by itself sees the first calls only. One that `torch.profiler.profile` is given sees all.

What is left are two allocations and the launch, with dropout its numbers' state, and autograd where gradients
are wanted: `fast_path_gradients`. A
kernel that somebody registers anew for `torch.ops.flash4.attention` is not seen from here.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor, is_grad_enabled
from torch._C import (
    _are_functorch_transforms_active,
    _get_deterministic_algorithms,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import _profiler_enabled, forward_ad
from torch.compiler import is_dynamo_compiling

from . import backends
from .backends import ALIGNMENT, Launch, OutAndLse, Prepares
from .fast_path_gradients import FastAutograd
from .ops import autocast_inputs, draw_rng_state
from .ops.impl import CallOptions, dense_extent, describe
from .problem import Inputs

Signature = tuple[Any, ...]
"""What the long way's decisions depend on, types last: True == 1 == 1.0, and they are not served alike."""

_MOST = 1024
"""Signatures that are remembered; after so many it starts anew."""
_FLAG_TYPES = slice(-8, None)
"""Where they are in a signature."""
_WANTS_GRAD = 12
"""Behind what tells of three tensors."""
_PLAIN = frozenset({bool, int, float, type(None), tuple, list})
"""Types whose equal values stay equal. A tensor among the flags would also be kept alive."""

FastCall = Callable[[Tensor, Tensor, Tensor], OutAndLse]
"""What serves q, k and v."""

_calls: dict[Signature, FastCall | None] = {}
_on_gpu = attrgetter("is_cuda")


def lookup(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    window: Any,
    causal: Any,
    scale: Any,
    softcap: Any,
    dropout_p: Any,
    deterministic: Any,
) -> tuple[Signature | None, FastCall | None]:
    """The call's signature, None if it must go the long way, and what serves it, if anything."""
    if (
        # Other tracers show themselves by their subclasses and modes.
        is_dynamo_compiling()
        or not type(q) is type(k) is type(v) is Tensor
        or attn_mask is not None
        or not _on_gpu(q)
        or must_take_slow_path()
        or (_is_any_autocast_enabled() and _casts(q, k, v))
    ):
        return None, None
    wants_grad = is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if wants_grad and _top_saved_tensors_default_hooks(True) is not None:
        return None, None
    try:
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (
            (q_at | k_at | v_at) % ALIGNMENT
            # Zeros without memory, and numbers that are the negatives of those in memory: the dispatcher
            # makes tensors of them. (Conjugates are complex, of which nothing is prepared.)
            or not (q_at and k_at and v_at)
            or q.is_neg()
            or k.is_neg()
            or v.is_neg()
        ):
            return None, None
        left, right = window
        # Flat, and each flag by its name: tuples in tuples and a loop take a third longer.
        call = (
            q.shape, q.stride(), q.dtype, q.get_device(),
            k.shape, k.stride(), k.dtype, k.get_device(),
            v.shape, v.stride(), v.dtype, v.get_device(),
            wants_grad, left, right, causal, scale, softcap, dropout_p, deterministic,
            type(window), type(left), type(right),
            type(causal), type(scale), type(softcap), type(dropout_p), type(deterministic),
        )  # fmt: skip
        return call, _calls.get(call)
    except (TypeError, ValueError, RuntimeError):
        # A flag that is no number, a tensor without strides: the long way has the words for it.
        return None, None


def must_take_slow_path() -> bool:
    return (
        _len_torch_dispatch_stack() > 0
        or _is_torch_function_mode_enabled()
        or _are_functorch_transforms_active()
        or _is_tracing()
        or _profiler_enabled()
        or forward_ad._current_level >= 0
        or _get_deterministic_algorithms()  # which fill fresh memory
        or not backends.is_plain()
    )


def _casts(*tensors: Tensor) -> bool:
    """Whether autocast would make copies in another dtype."""
    return any(new is not old for new, old in zip(autocast_inputs(*tensors), tensors, strict=True))


def record(call: Signature, q: Tensor, k: Tensor, v: Tensor, options: CallOptions) -> None:
    """After the long way has served a call: prepares those of the same signature."""
    if not _PLAIN.issuperset(call[_FLAG_TYPES]) or call in _calls:
        return
    problem = describe(q, v, dense_extent(q, k), None, options)
    backend = backends.choose(problem)
    launch = backend.prepare(Inputs(q, k, v), problem) if isinstance(backend, Prepares) else None
    fast_call: FastCall | None = launch
    if launch is not None and call[_WANTS_GRAD]:
        fast_call = FastAutograd(launch, options, must_take_slow_path)
    elif launch is not None and problem.spec.dropout:
        fast_call = _with_rng_state(launch)
    if len(_calls) >= _MOST:
        _calls.clear()
    _calls[call] = fast_call


def _with_rng_state(launch: Launch) -> FastCall:
    def drawn(q: Tensor, k: Tensor, v: Tensor) -> OutAndLse:
        return launch(q, k, v, draw_rng_state(q.device))

    return drawn


def clear() -> None:
    """Empties the memory; the next call of every signature goes the long way."""
    _calls.clear()
