"""Recognises a call by torch's own check of all of its tensors at once.

The check compares what a signature says of tensors (type, dispatch keys, dtype, device, sizes, strides,
whether they require gradients) in a third of the time that it takes to write that down. Dispatch keys are
those that a call would have here and now: modes, transforms, tracers and autocast change them, and lead past
what was remembered without. Nested tensors, which have no strides, would end the process; so somebody asks
for them before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, is_grad_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo.guards import TensorGuards

from ..backends import ALIGNMENT
from .calls import Door, FastCall

Place = tuple[Any, ...]
"""The door, whether gradients are recorded, which tensors there are, the flags and their types."""

Signature = tuple[Any, ...]
"""Everything that the slow path's decisions depend on. Types come last: True == 1 == 1.0, and each is served
differently."""

_MOST = 4
"""Calls to remember for each place; each one takes time from those that follow."""
_MOST_PLACES = 1024
"""Places to remember; when the memory is full, it is cleared."""

_Found = TypeVar("_Found")
Known = dict[Place, list[tuple[TensorGuards, _Found]]]
"""What serves calls like those before, by their place."""


class Memory:
    """Prepared calls: by their signatures, which say everything, and by what recognises them sooner."""

    __slots__ = ("calls", "recent")

    def __init__(self) -> None:
        self.calls: dict[Signature, FastCall | None] = {}
        self.recent: Known[FastCall] = {}

    def clear(self) -> None:
        self.calls.clear()
        self.recent.clear()


def find(
    known: Known[FastCall],
    door: Door,
    q: Any,
    k: Any,
    v: Any,
    others: tuple[Any, ...],
    flags: tuple[Any, ...],
) -> tuple[FastCall | None, Place, tuple[Any, ...]]:
    """The prepared call, or None if the signature must say; the call's place, and its tensors, each one
    once.
    """
    tensors: tuple[Any, ...] = q, k, v
    if others[0] is not None or others[1] is not None or len(others) > 2:
        others, more = _pattern(others)
        tensors += more
    place = door, is_grad_enabled(), others, flags, *map(type, flags)
    calls = known.get(place, ())
    if q.is_nested or k.is_nested or v.is_nested or (len(tensors) > 3 and any_nested(tensors)):
        return None, place, tensors
    for guards, call in calls:
        if guards.check(*tensors):
            # What no check of types and sizes sees must be as it was when the call was prepared.
            q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
            if (q_at | k_at | v_at) % ALIGNMENT or not (q_at and k_at and v_at):
                break
            for x in tensors[3:]:
                if not x.data_ptr():
                    return None, place, tensors
            if call.is_recorded and _top_saved_tensors_default_hooks(True) is not None:
                break
            return call, place, tensors
    return None, place, tensors


def any_nested(tensors: Iterable[Tensor]) -> bool:
    """Whether a tensor is nested, so that no guards may see it."""
    return any([x.is_nested for x in tensors])


def _pattern(others: tuple[Any, ...]) -> tuple[tuple[int | None, ...], tuple[Any, ...]]:
    """The tensors that there are, and these, each one once: self-attention passes one cu_seqlens twice."""
    pattern: tuple[int | None, ...] = ()
    tensors: tuple[Any, ...] = ()
    for x in others:
        place = None if x is None else len(tensors)
        for i, y in enumerate(tensors):
            if y is x:
                place = i
        if place == len(tensors):
            tensors += (x,)
        pattern += (place,)
    return pattern, tensors


def remember(known: Known[_Found], place: Place, tensors: tuple[Any, ...], found: _Found) -> None:
    """Adds what serves calls of tensors like these."""
    if len(known) >= _MOST_PLACES:
        known.clear()
    guard(known.setdefault(place, []), tensors, found)


def guard(calls: list[tuple[TensorGuards, _Found]], tensors: tuple[Any, ...], found: _Found) -> None:
    """Adds what serves tensors like these."""
    if len(calls) < _MOST:
        # Without these keywords it crashes.
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if guards.check(*tensors):  # it never passes the same tensor twice
            calls.append((guards, found))
