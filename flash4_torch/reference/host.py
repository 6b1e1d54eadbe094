"""Small tensors on the CPU that are made once, when the package is imported."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def constant(numbers: list[float] | list[int], dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Tensor:
    """A plain tensor on the CPU, whatever device or mode is active where a module is imported."""
    with _DisableTorchDispatch():
        return torch.tensor(numbers, dtype=dtype, device="cpu").view(shape)


_ADDED = {dtype: (constant([0.0], dtype), constant([-torch.inf], dtype)) for dtype in DTYPES}


def bias_of(mask: Tensor, dtype: torch.dtype, hides: bool = False) -> Tensor:
    """What a bool mask on the CPU adds to scores of `dtype`: 0, or -inf where it is False (`hides`: True)."""
    nothing, hidden = _ADDED[dtype]
    return torch.where(mask, hidden, nothing) if hides else torch.where(mask, nothing, hidden)
