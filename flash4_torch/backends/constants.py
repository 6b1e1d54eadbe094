"""Tensors that never change, made once for each device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from . import tile_counters

_ones: dict[torch.device, Tensor] = {}


def one(device: torch.device) -> Tensor:
    """The float32 tensor () of 1 on a device, which every stream sees.

    A captured launch gets one of its own in the graph's memory, unless there is one already. While
    torch.compile prepares a CUDA graph, this thread's allocations come from the graph's memory, where
    nothing may stay; another thread's allocations do not.
    """
    found = _ones.get(device)
    if found is None:
        if device.type == "cuda" and tile_counters.is_capturing(device.index):
            return _make(device)
        with ThreadPoolExecutor(max_workers=1) as other_thread:
            found = _ones[device] = other_thread.submit(_make, device, wait=True).result()
    return found


def _make(device: torch.device, wait: bool = False) -> Tensor:
    x = torch.ones((), dtype=torch.float32, device=device)
    if wait and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return x
