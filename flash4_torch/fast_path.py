"""The fast path from `attention` to a kernel, for calls like one that was made before.

Argument checks, the dispatcher and the choice of a backend take several times as long as a launch. They do
not look at any tensor's values, so their result is the same for the same sizes, strides, dtypes and flags.
The law here: the fast path may only do what the slow path would do. So it is taken if

- the slow path has served a call of the same signature, and its backend could `prepare` a launch for it;
- no observer is active that it would bypass: no tangent is requested; no mode, subclass, transform, tracer or
  profiler is active; autocast would change no tensor; fresh memory is not filled (deterministic algorithms);
  no environment variable or context chooses or observes a backend; no hook takes the tensors autograd saves.

An observer of operators for which torch has no flag is bypassed: a `torch.profiler.ExecutionTraceObserver`
by itself sees only the first calls. One that is passed to `torch.profiler.profile` sees all.

What remains is two allocations and the launch, with dropout also the RNG state, and autograd if gradients are
needed (`fast_path_gradients`). A kernel that somebody else registers for `torch.ops.flash4.attention` is not
seen from here.
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
from .ops.impl import dense_extent, describe
from .problem import CallOptions, Inputs

Signature = tuple[Any, ...]
"""Everything that the slow path's decisions depend on. Types come last: True == 1 == 1.0, and each is served
differently."""

_MOST = 1024
"""Signatures to remember; when the memory is full, it is cleared."""
_FLAG_TYPES = slice(-8, None)
"""Place of the flags' types in a signature."""
_WANTS_GRAD = 12
"""Index of `wants_grad` in a signature, after four entries for each of three tensors."""
_PLAIN = frozenset({bool, int, float, type(None), tuple, list})
"""Flag types whose equal values stay equal. A tensor among the flags would also be kept alive."""

FastCall = Callable[[Tensor, Tensor, Tensor], OutAndLse]
"""A prepared call: q, k and v to out and lse."""

_calls: dict[Signature, FastCall | None] = {}
_on_gpu = attrgetter("is_cuda")


def lookup(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    sinks: Any,
    window: Any,
    causal: Any,
    scale: Any,
    softcap: Any,
    dropout_p: Any,
    deterministic: Any,
) -> tuple[Signature | None, FastCall | None]:
    """The call's signature (None if it must take the slow path), and the prepared call, if there is one."""
    if (
        # Other tracers are recognised by their subclasses and modes.
        is_dynamo_compiling()
        or not type(q) is type(k) is type(v) is Tensor
        or attn_mask is not None
        or sinks is not None
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
            # Zero tensors without memory, and lazy negatives of the values in memory: the dispatcher
            # materialises them. (Conjugates are complex, and no complex call is prepared.)
            or not (q_at and k_at and v_at)
            or q.is_neg()
            or k.is_neg()
            or v.is_neg()
        ):
            return None, None
        left, right = window
        # A flat tuple with each flag written out: nested tuples and a loop take a third longer.
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
        # A flag that is no number, or a tensor without strides: the slow path reports it.
        return None, None


def must_take_slow_path() -> bool:
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


def _casts(*tensors: Tensor) -> bool:
    """Whether autocast would copy any tensor into another dtype."""
    return any(new is not old for new, old in zip(autocast_inputs(*tensors), tensors, strict=True))


def record(call: Signature, q: Tensor, k: Tensor, v: Tensor, options: CallOptions) -> None:
    """Prepares calls of this signature, after the slow path has served one."""
    if not _PLAIN.issuperset(call[_FLAG_TYPES]) or call in _calls:
        return
    problem = describe(q, v.shape[-1], dense_extent(q, k), None, None, options)
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
    """Forgets all signatures; the next call of each takes the slow path."""
    _calls.clear()
