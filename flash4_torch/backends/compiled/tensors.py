"""What the kernels may read in place, and results of the shapes they write."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...problem import Inputs, Problem

_ALIGNMENT = 16
"""Bytes; what the copy engine wants of addresses and strides, and eight of our elements."""
_STEP = _ALIGNMENT // 2


def is_readable(x: Tensor) -> bool:
    """Whether the copy engine reads `x` in place: rows of neighbours, at multiples of 16 bytes.

    A stride of 0, as `expand` makes it, is none that it promises to take.
    """
    *outer, last = x.stride()
    in_steps = all(stride > 0 and stride % _STEP == 0 for stride in outer)
    return last == 1 and in_steps and x.shape[-1] % _STEP == 0 and x.data_ptr() % _ALIGNMENT == 0


def readable(x: Tensor) -> Tensor:
    """`x` itself if the copy engine reads it in place, else a copy; zeros fill its head size up to eights."""
    if is_readable(x):
        return x
    D = x.shape[-1]
    # Not `contiguous`: that returns dimensions of 1 with the strides they have.
    copy = x.new_empty(*x.shape[:-1], padded(D))
    copy[..., :D] = x
    copy[..., D:] = 0.0
    return copy


def padded(D: int) -> int:
    return -(-D // _STEP) * _STEP


def unpad(x: Tensor, D: int) -> Tensor:
    return x if x.shape[-1] == D else x[..., :D].contiguous()


def is_empty(inputs: Inputs, problem: Problem) -> bool:
    """Whether there is nothing to attend from, or nothing to attend to."""
    return 0 in problem.extent or not (inputs.q.numel() and inputs.k.numel())


def lengths(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous()


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
