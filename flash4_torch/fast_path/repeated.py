"""Calls that repeat: what recognises one whose tensors are like those of the one before.

Torch checks all tensors at once, as for `recent`: types, dispatch keys, dtypes, devices, sizes, strides and
whether they require gradients. Sizes of a server's steps change, so that the oldest call gives way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from .recent import any_nested, guard

Call = TypeVar("Call")

_MOST = 3
"""Calls to recognise; each one takes time from those that follow."""


class Repeated(Generic[Call]):
    """The calls of one place in which a call followed one of its very sizes."""

    __slots__ = ("_last", "calls")

    def __init__(self) -> None:
        self.calls: list[tuple[TensorGuards, Call]] = []
        self._last: tuple[Any, ...] = ()

    def find(self, tensors: Sequence[Tensor]) -> Call | None:
        """The call whose tensors were like these. Guards see no addresses; here none may be null."""
        if self.calls and any_nested(tensors):
            return None
        for guards, call in self.calls:
            if guards.check(*tensors):
                return call if all([x.data_ptr() for x in tensors]) else None
        return None

    def follows_its_like(self, signature: Any, tensors: Sequence[Tensor]) -> bool:
        """Whether the last call that was asked about had these sizes, and an equal signature."""
        last, self._last = self._last, (*(x.shape for x in tensors), signature)
        return last == self._last

    def add(self, tensors: Sequence[Tensor], call: Call) -> None:
        """Remembers what serves tensors like these."""
        if len(self.calls) >= _MOST:
            del self.calls[0]
        guard(self.calls, tuple(tensors), call)
