"""Views of tensors past the dispatcher, in a third of the time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

view = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""The view of a tensor with the given sizes and strides, from its first element on; autograd and version
counters do not know it."""


def no_view(x: Tensor) -> Tensor:
    """The tensor, or its values and memory as a tensor that autograd does not know as a view.

    A function's results may be changed in place if they are none.
    """
    if not x._is_view():
        return x
    made: Tensor = view(x, x.shape, x.stride())
    return made


class Layout(NamedTuple):
    """Sizes and strides of a view."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        return cls(tuple(x.shape), x.stride())

    def view(self, x: Tensor) -> Tensor:
        """`x` laid out like this; see `view`."""
        seen: Tensor = view(x, self.sizes, self.strides)
        return seen
