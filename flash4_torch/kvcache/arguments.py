"""Checks that the functions around a KV cache share; each error names argument, value and limit."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError
from ..ops import check

FLOAT8 = torch.float8_e4m3fn


def tensor(name: str, x: Tensor, *, device: torch.device | None = None, of: str = "k's") -> None:
    """Requires a dense tensor, on the device of the argument `of`."""
    if not isinstance(x, Tensor):
        raise ArgumentError(name, type(x).__name__, "it must be a tensor")
    if not check.is_dense(x):
        raise check.not_dense(name, x)
    if device is not None and x.device != device:
        raise DeviceError(name, x.device, f"it must be on {of} device, {device}")


def dtype(name: str, x: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        *others, last = (str(one).removeprefix("torch.") for one in allowed)
        words = f"{', '.join(others)} or {last}" if others else last
        raise DtypeError(name, x.dtype, f"it must be {words}")


def shape(name: str, x: Tensor, wanted: tuple[int, ...], letters: str) -> None:
    if tuple(x.shape) != wanted:
        raise ShapeError(name, tuple(x.shape), f"it must be {letters} = {wanted}")
