"""Replaying dropout: the generator state that a call will take, and the mask that follows from a state."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import draw_rng_state
from ..reference.dropout import Dropout


def peek_rng_state(device: torch.device | str = "cpu") -> Tensor:
    """The int64 pair (seed, offset) that the next call with dropout takes; torch's generator stays put."""
    device = torch.device(device)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        return draw_rng_state(device)


def dropout_mask(rng_state: Tensor, B: int, Hq: int, Sq: int, Sk: int, p: float) -> Tensor:
    """Bool (B, Hq, Sq, Sk): the attention weights that a call with this state and dropout_p = p keeps.

    For `attention_varlen`, sequence b of the call is batch entry b here, with i and j counted from its start.
    """
    return Dropout(rng_state, p).keep(range(B), Hq, range(Sq), range(Sk))
