"""Autocast: attention runs in the autocast dtype, as torch's own does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import schema

no_autocast = torch._C._DisableAutocast
"""Context without any autocast, in a sixth of the time of `torch.autocast`."""

DEVICES = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}
# Queried once: torch.compile cannot trace the query.
_WITH_AUTOCAST = frozenset(
    device
    for device in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")
    if torch.amp.is_autocast_available(device)
)
_TENSORS = {
    "attention_and_weights": 3,
    "attention": 3,
    "attention_varlen": 3,
    "attention_weights": 2,
    "attention_weights_signed": 2,
    "attention_backward": 0,
    "attention_varlen_backward": 0,
    "attention_weights_backward": 0,
}
"""Number of leading arguments of each operator that are cast. A backward computes in its inputs' dtypes under
any autocast; without a rule its own matmuls would be cast."""


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype to which autocast casts on a kind of device, None if it is off there."""
    if device not in _WITH_AUTOCAST or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, cast to the autocast dtype of their device if autocast is on there; float64 stays."""
    dtype = autocast_dtype(tensors[0].device.type) if tensors else None
    if dtype is None:
        return tensors
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def casting(op: Callable[..., Any], n: int, device: str) -> Callable[..., Any]:
    """An operator's autocast kernel: casts the first `n` arguments, and computes as if autocast were off."""

    def call(*args: Any) -> Any:
        cast = autocast_inputs(*args[:n])
        with torch.autocast(device, enabled=False):
            return op(*cast, *args[n:])

    return call


for _key, _device in DEVICES.items():
    for _name, _n in _TENSORS.items():
        schema.LIBRARY.impl(_name, casting(getattr(schema, _name), _n, _device), _key)
