"""How much arithmetic attention is, and how much the machine can do."""

from __future__ import annotations

import torch

from .settings import Settings
from .timing import Spread, compare

BACKWARD = 2.5
"""The backward has five matrix products where the forward has two."""


def forward(B: int, S: int, H: int, D: int, causal: bool) -> float:
    """FLOPs of attention's forward: two products of S x S x D, half of it visible if causal."""
    return 4.0 * B * H * S * S * D / (2 if causal else 1)


def matmul_roof(dtype: torch.dtype, settings: Settings) -> float:
    """FLOP/s of a large square matrix product: what no attention kernel exceeds."""
    n = 8192 if settings.on_gpu else 2048
    a, b = (torch.randn(n, n, dtype=dtype, device=settings.device) for _ in range(2))
    seconds: Spread = compare({"matmul": lambda: a @ b}, settings).seconds["matmul"]
    return 2.0 * n**3 / seconds.median
