"""Tensors that never change, made once for each device, and each size."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import forks
from . import tile_counters

_Make = Callable[..., Tensor]
"""Function from sizes and a device to a new tensor."""

_MOST = 1 << 14
"""Tensors to keep. Launches under way and captured ones may read them, so that none is ever given up, and
beyond these each call has its own."""
_kept: dict[tuple[Any, ...], Tensor] = {}
_making = forks.Lock()


def one(device: torch.device) -> Tensor:
    """The float32 tensor () of 1."""
    return _constant(device, _one)


def false(device: torch.device) -> Tensor:
    """The bool tensor () of False."""
    return _constant(device, _false)


def even_ends(device: torch.device, B: int, S: int) -> Tensor:
    """Cumulative lengths (B + 1,), int32, of B sequences of length S, 1 or more."""
    return _constant(device, _even_ends, B, S)


def even_lengths(device: torch.device, B: int, S: int) -> Tensor:
    """Lengths (B,), int32, of B sequences of length S."""
    return _constant(device, _even_lengths, B, S)


def own_pages(device: torch.device, B: int) -> Tensor:
    """A block table (B, 1), int32, in which each sequence has the page of its number."""
    return _constant(device, _own_pages, B)


def all_partial(device: torch.device, NB: int) -> Tensor:
    """The tables (2 NB + 1,), int32, of a floating mask of which each row of blocks has NB partial ones."""
    return _constant(device, _all_partial, NB)


def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def _false(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=device)


def _even_ends(B: int, S: int, device: torch.device) -> Tensor:
    return torch.arange(0, B * S + 1, S, dtype=torch.int32, device=device)


def _even_lengths(B: int, S: int, device: torch.device) -> Tensor:
    return torch.full((B,), S, dtype=torch.int32, device=device)


def _own_pages(B: int, device: torch.device) -> Tensor:
    return torch.arange(B, dtype=torch.int32, device=device)[:, None]


def _all_partial(NB: int, device: torch.device) -> Tensor:
    numbers = torch.arange(NB + 1, dtype=torch.int32, device=device)
    return torch.cat((2 * numbers[:NB] + 1, numbers))


def _constant(device: torch.device, make: _Make, *sizes: int) -> Tensor:
    """The tensor of these sizes on a device, which every stream sees.

    A captured launch gets one of its own in the graph's memory, unless there is one already. While
    torch.compile prepares a CUDA graph, this thread's allocations come from the graph's memory, where
    nothing may stay; another thread's allocations do not.
    """
    key = device, make, *sizes
    found = _kept.get(key)
    if found is not None:
        return found
    captured = device.type == "cuda" and tile_counters.is_capturing(device.index)
    if captured or len(_kept) >= _MOST:
        return make(*sizes, device=device)
    with _making.held():
        if key not in _kept:
            with ThreadPoolExecutor(max_workers=1) as other_thread:
                _kept[key] = other_thread.submit(_make, device, make, sizes).result()
        return _kept[key]


def _make(device: torch.device, make: _Make, sizes: tuple[int, ...]) -> Tensor:
    """The tensor, copied to a GPU on a stream that waits for no other work."""
    x = make(*sizes, device=torch.device("cpu"))
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        x = x.to(device)
    if stream is not None:
        stream.synchronize()
    return x
