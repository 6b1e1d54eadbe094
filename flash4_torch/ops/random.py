"""The RNG state of dropout: generated on the device by torch's generator, so that torch controls it."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_rng_state(device: torch.device) -> Tensor:
    """A fresh int64 pair (seed, offset) on `device`.

    `torch.manual_seed` controls it, `torch.compile` functionalises it, CUDA graphs replay it with new
    numbers, and activation checkpointing restores it; the host never waits for its value.
    """
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)
