"""The fast path from a public function to a kernel, for calls like one that was made before.

Argument checks, the dispatcher and the choice of a backend take several times as long as a launch. They do
not look at any tensor's values, so their result is the same for the same sizes, strides, dtypes and flags.
The law here: the fast path may only do what the slow path would do. Exceptions differ by a rounding. On a
CPU, all small: output and weights are computed in one go, modules in evaluation make the same call into torch
as stock ones (`nn/fused.py`), and steps that return or drop weights save them for the backward
(`nn/materialized.py`). On a GPU, too: encoder layers in evaluation make theirs (`nn/encoder.py`). So it is
taken if

- the slow path has served a call of the same signature, and its backend could `prepare` a launch for it
  (where roundings may differ, it is taken from the first one on, so that calls repeat bit for bit);
- no observer is active that it would bypass: no tangent is requested; no mode, subclass, transform, tracer or
  profiler is active; autocast would change no tensor; fresh memory is not filled (deterministic algorithms);
  no environment variable or context chooses or observes a backend; no hook takes the tensors autograd saves.

An observer of operators for which torch has no flag is bypassed: a `torch.profiler.ExecutionTraceObserver`
by itself sees only the first calls. One that is passed to `torch.profiler.profile` sees all.

What remains is the allocation of results and the launch, with a mask that of its tables, too, with dropout
the RNG state, and autograd if gradients are needed (`gradients`). A kernel that somebody else registers for
`torch.ops.flash4.attention` is not seen from here.

A function that takes this path looks a call up, and records it after the slow path has served it:

    signature, call = fast_path.lookup(DOOR, q, k, v, others, flags)
    if call is not None:
        return call.run(q, k, v, *others)
    ...
    fast_path.record(signature, DOOR, inputs, options)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, float32, is_grad_enabled
from torch._C import _is_any_autocast_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ..backends import ALIGNMENT, Launch, Order, Shares
from ..backends.views import view as view
from ..ops import autocast_inputs
from ..ops.impl import describe_inputs, weights_of
from ..problem import CallOptions, Inputs, Problem, allows_tf32
from . import flex, graphs, recent
from .calls import Door, FastCall, Returned, forward_then_weights
from .conditions import below_autocast, guards_would_miss, guards_would_see, prepares
from .gradients import FastAutograd
from .recent import Memory, Signature

RETURNED = Returned()

_MOST = 1024
"""Signatures to remember; when the memory is full, it is cleared."""
_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Flag types whose equal values stay equal. A tensor among the flags would also be kept alive."""

_WANTS_GRAD = 13
"""Index of `wants_grad` in a signature, after the door and four entries for each of three tensors."""
_FLAG_TYPES = 16
"""Index of the flags' types, after the other tensors and the flags."""

MEMORY = Memory()
"""The calls that are kept with nothing else."""


def lookup(
    door: Door,
    q: Any,
    k: Any,
    v: Any,
    others: tuple[Any, ...],
    flags: tuple[Any, ...],
    memory: Memory = MEMORY,
) -> tuple[Signature | None, FastCall | None]:
    """The call's signature, and the prepared call, if there is one.

    There is no signature if the call must take the slow path, or if it needs none to be found.

    others: the tensors besides q, k and v, or None in their place, two at least. flags: everything else, all
    of it scalars. memory: where such calls are kept.
    """
    # Other tracers are recognised by their subclasses and modes.
    if is_dynamo_compiling() or guards_would_miss():
        return None, None
    if getattr(q, "dtype", None) is float32 and allows_tf32(float32):
        flags = (*flags, "tf32")
    try:
        call, place, tensors = recent.find(memory.recent, door, q, k, v, others, flags)
        if call is not None:
            return None, call
        if guards_would_see():
            return None, None
        if _is_any_autocast_enabled():
            return _by_signature(memory, door, q, k, v, others, flags, ("autocast",))
        signature, call = _by_signature(memory, door, q, k, v, others, flags, ())
        if call is not None:
            recent.remember(memory.recent, place, tensors, call)
        return signature, call
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # A flag that is no number, or a tensor without strides: the slow path reports it.
        return None, None


def _by_signature(
    memory: Memory,
    door: Door,
    q: Any,
    k: Any,
    v: Any,
    others: tuple[Any, ...],
    flags: tuple[Any, ...],
    more: tuple[Any, ...],
) -> tuple[Signature | None, FastCall | None]:
    """What `lookup` returns where no observer is active. more: begins what is said of other tensors."""
    if not type(q) is type(k) is type(v) is Tensor or (more and _casts(q, k, v)):
        return None, None
    may_need_grad = is_grad_enabled()
    wants_grad = may_need_grad and (q.requires_grad or k.requires_grad or v.requires_grad)
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
    for x in others:
        if x is None:
            more += (None,)
            continue
        if (type(x) is not Tensor and type(x) is not Parameter) or not x.data_ptr() or x.is_neg():
            return None, None
        needs_grad = may_need_grad and x.requires_grad
        wants_grad = wants_grad or needs_grad
        more += ((x.shape, x.stride(), x.dtype, x.get_device(), needs_grad),)
    if wants_grad and _top_saved_tensors_default_hooks(True) is not None:
        return None, None
    # A flat tuple: nested tuples take longer.
    signature = (
        door, q.shape, q.stride(), q.dtype, q.get_device(),
        k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        wants_grad, more, flags, *map(type, flags),
    )  # fmt: skip
    return signature, memory.calls.get(signature)


def _casts(*tensors: Tensor) -> bool:
    """Whether autocast would copy any tensor into another dtype."""
    return any(new is not old for new, old in zip(autocast_inputs(*tensors), tensors, strict=True))


def record(
    call: Signature | None,
    door: Door,
    inputs: Inputs,
    options: CallOptions,
    max_seqlens: tuple[int, int] | None = None,
    returned: Returned = RETURNED,
) -> None:
    """Prepares calls of this signature, after the slow path has served one or at least checked it.

    inputs: the tensors in the backends' layout; no RNG state is needed. max_seqlens: of a varlen call.
    """
    if call is None or call in MEMORY.calls or not _PLAIN.issuperset(call[_FLAG_TYPES:]):
        return
    keep(call, _prepared(call, door, inputs, options, max_seqlens, returned))


def wants_grad(signature: Signature) -> bool:
    """Whether calls of this signature are recorded for autograd."""
    found: bool = signature[_WANTS_GRAD]
    return found


def keep(signature: Signature, call: FastCall | None, memory: Memory = MEMORY) -> None:
    """Serves calls of this signature by `call` from now on; None: by the slow path."""
    if len(memory.calls) >= _MOST:
        memory.calls.clear()
    memory.calls[signature] = call


def _prepared(
    call: Signature,
    door: Door,
    inputs: Inputs,
    options: CallOptions,
    max_seqlens: tuple[int, int] | None,
    returned: Returned,
) -> FastCall | None:
    mask = inputs.attn_mask
    wants_grad = call[_WANTS_GRAD]
    mask_grad = wants_grad and mask is not None and mask.requires_grad
    if mask_grad and (returned.average_heads is None or not inputs.q.is_cpu):
        return None
    problem = describe_inputs(inputs, options, max_seqlens)
    launch = _launch(problem, inputs, door.order, returned.average_heads)
    if launch is None:
        return None
    launch = below_autocast(launch)
    if wants_grad:
        return FastAutograd(door, launch, options, inputs, returned, problem, mask_grad)
    return FastCall(door, launch, options, inputs, returned)


def _launch(problem: Problem, inputs: Inputs, order: Order, average_heads: bool | None) -> Launch | None:
    """The launch of a call; there are weights only where q, k and v are (B, S, H, D)."""
    backend = prepares(problem)
    if backend is None:
        return None
    if average_heads is None:
        return backend.prepare(inputs, problem, order)
    if isinstance(backend, Shares):
        both = backend.prepare_both(inputs, problem, average_heads)
        if both is not None:
            return both
    of_weights = weights_of(problem)
    forward, weights_backend = backend.prepare(inputs, problem), prepares(of_weights)
    if forward is None or weights_backend is None:
        return None
    weights = weights_backend.prepare_weights(inputs, of_weights, average_heads)
    return None if weights is None else forward_then_weights(forward, weights, inputs, average_heads)


def clear() -> None:
    """Forgets all signatures; the next call of each takes the slow path."""
    MEMORY.clear()
    graphs.clear()
    flex.clear()
