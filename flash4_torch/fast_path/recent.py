"""Recognises a call by torch's own check of all of its tensors at once.

The check compares what a signature says of tensors (type, dispatch keys, dtype, device, sizes, strides,
whether they require gradients) in a third of the time that it takes to write that down.
"""

from __future__ import annotations

from typing import Any

from torch import is_grad_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo.guards import TensorGuards

from ..backends import ALIGNMENT
from .calls import Door, FastCall

Place = tuple[Any, ...]
"""The door, modes that no tensor shows, which tensors there are, the flags and their types."""

_MOST = 4
"""Calls to remember for each place; each one takes time from those that follow."""
_MOST_PLACES = 1024
"""Places to remember; when the memory is full, it is cleared."""

_calls: dict[Place, list[tuple[TensorGuards, FastCall]]] = {}


def place(
    door: Door, q: Any, k: Any, v: Any, others: tuple[Any, ...], flags: tuple[Any, ...]
) -> tuple[Place, tuple[Any, ...]]:
    """Where calls like one are, and its tensors to check: each once, though self-attention passes one
    cu_seqlens twice."""
    grad = is_grad_enabled()
    if len(others) == 2:
        x, y = others
        if x is y is None:
            return (door, grad, flags, *map(type, flags)), (q, k, v)
    tensors = (q, k, v, *[x for x in others if x is not None])
    if len(others) == 3 and others[0] is others[1]:
        del_one = (q, k, v, *[x for x in others[1:] if x is not None])
        return (door, grad, "same", others[2] is None, flags, *map(type, flags)), del_one
    return (door, grad, *[x is None for x in others], flags, *map(type, flags)), tensors


def find(place: Place, tensors: tuple[Any, ...]) -> FastCall | None:
    """The prepared call for these tensors, of which q, k and v come first; None if their signature must say.

    No autocast is active.
    """
    for guards, call in _calls.get(place, ()):
        if guards.check(*tensors):
            return call if _is_served(call, *tensors) else None
    return None


def _is_served(call: FastCall, q: Any, k: Any, v: Any, *others: Any) -> bool:
    """Whether what no check of types and sizes sees is as it was when the call was prepared."""
    q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (q_at | k_at | v_at) % ALIGNMENT or not (q_at and k_at and v_at):
        return False
    for x in others:
        if not x.data_ptr():
            return False
    return not (call.is_recorded and _top_saved_tensors_default_hooks(True) is not None)


def add(place: Place, tensors: tuple[Any, ...], call: FastCall) -> None:
    """Remembers the call that a signature of these tensors has led to."""
    if len(_calls) >= _MOST_PLACES:
        _calls.clear()
    calls = _calls.setdefault(place, [])
    if len(calls) < _MOST:
        # Without these keywords it crashes.
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if guards.check(*tensors):  # it never passes the same tensor twice
            calls.append((guards, call))


def clear() -> None:
    """Forgets all calls."""
    _calls.clear()
