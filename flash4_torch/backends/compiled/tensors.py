"""Tensors that the kernels can read: in place if possible, else as padded copies; unpadded results."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from ...problem import Inputs, Problem

Allocator = Callable[[tuple[int, ...], torch.dtype], Callable[[], Tensor]]
"""Takes a contiguous tensor's shape and dtype, and returns what allocates one."""

_ALIGNMENT = 16
"""Bytes; TMA requires it of addresses and strides. It is eight elements."""
_STEP = _ALIGNMENT // 2


def is_readable(x: Tensor) -> bool:
    """Whether TMA can read `x` in place: contiguous rows, at multiples of 16 bytes.

    A stride of 0, as `expand` makes it, is not one that TMA is documented to accept.
    """
    *outer, last = x.stride()
    in_steps = all(stride > 0 and stride % _STEP == 0 for stride in outer)
    return last == 1 and in_steps and x.shape[-1] % _STEP == 0 and x.data_ptr() % _ALIGNMENT == 0


def readable(x: Tensor) -> Tensor:
    """`x` itself if TMA can read it in place, else a copy, zero-padded to a multiple of 8 columns."""
    if is_readable(x):
        return x
    D = x.shape[-1]
    # Not `contiguous`: it keeps the strides of dimensions of size 1.
    copy = x.new_empty(*x.shape[:-1], padded(D))
    copy[..., :D] = x
    copy[..., D:] = 0.0
    return copy


def padded(D: int) -> int:
    return -(-D // _STEP) * _STEP


def unpad(x: Tensor, D: int) -> Tensor:
    return x if x.shape[-1] == D else x[..., :D].contiguous()


def is_empty(inputs: Inputs, problem: Problem) -> bool:
    """Whether there are no queries or no keys."""
    return 0 in problem.extent or not (inputs.q.numel() and inputs.k.numel())


def allocator_like(x: Tensor) -> Allocator:
    """Allocates where `x` is, by the dispatcher, which observers see."""
    return lambda shape, dtype: partial(x.new_empty, shape, dtype=dtype)


def past_dispatcher(device: str) -> Allocator:
    """Allocates on the current device as torch's compiled graphs do."""
    empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")
    return lambda shape, dtype: partial(empty, shape, contiguous_strides(shape), dtype)


@cache
def new_past_dispatcher(device: str) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    """The same of shapes that are known at the call only."""
    empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")
    return lambda shape, dtype: empty(shape, contiguous_strides(shape), dtype)


def lengths(cu_seqlens: Tensor | None) -> Tensor | None:
    """Cumulative lengths as the kernels read them."""
    if cu_seqlens is None or (cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous()):
        return cu_seqlens
    return cu_seqlens.to(torch.int32).contiguous()


@lru_cache(maxsize=8192)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
