"""Tensors as kernels read and write them in place: rows side by side in memory, at multiples of a vector."""

from __future__ import annotations

from torch import Tensor


def in_rows(x: Tensor, step: int) -> Tensor | None:
    """`x` if its rows are contiguous and begin at multiples of `step` elements, which is also the address's
    alignment; else None.

    It is a view of `x` where dimensions of size 1 have other strides, which are never used.
    """
    *strides, last = x.stride()
    if last != 1 or x.data_ptr() % (step * x.element_size()):
        return None
    for stride in strides:
        if stride % step:
            return _with_even_strides(x, strides, step)
    return x


def _with_even_strides(x: Tensor, strides: list[int], step: int) -> Tensor | None:
    """A view whose strides are multiples of `step` where only dimensions of size 1 have others; else None."""
    pairs = list(zip(x.shape, strides, strict=False))
    if any(stride % step and size > 1 for size, stride in pairs):
        return None
    return x.as_strided(x.shape, (*(0 if size == 1 else stride for size, stride in pairs), 1))


def copied_to_rows(x: Tensor, step: int) -> Tensor:
    """`x` in rows, if need be as a copy."""
    found = in_rows(x, step)
    # Not `contiguous`: it keeps the strides of dimensions of size 1, and the address of what is contiguous.
    return x.new_empty(x.shape).copy_(x) if found is None else found
