"""The RNG state of dropout: generated on the device by torch's generator, so that torch controls it."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_rng_state(device: torch.device) -> Tensor:
    """A fresh int64 pair (seed, offset) on `device`.

    `torch.manual_seed` controls it, `torch.compile` functionalises it, CUDA graphs replay it with new
    numbers, and activation checkpointing restores it; the host never waits for its value. A compiled graph
    draws the same pair, by one kernel: with the argument `generator` the call is one that torch's compiler
    does not take apart into a seed and what is made of it.
    """
    bounds = -(2**63), 2**63 - 1
    return torch.randint(*bounds, (2,), generator=None, dtype=torch.int64, device=device)
