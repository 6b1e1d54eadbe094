"""What the kernels add up gradients of captured tensors in."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.common.exact_sums import (
    FIELDS,
    INFINITE,
    LEAST_EXPONENT,
    MINUS_INFINITE,
    WORD_BITS,
    WORDS,
)

MAX_EXACT = 1 << 23
"""Exact sums of a call, of 80 bytes each."""


def zeros(x: Tensor, *, exact: bool) -> Tensor:
    """Totals for a captured tensor, of one dimension at least: float32, or exact sums (..., FIELDS) int64."""
    shape = x.shape or (1,)
    if exact:
        return x.new_zeros(*shape, FIELDS, dtype=torch.int64)
    return x.new_zeros(shape, dtype=torch.float32)


def rounded(total: Tensor) -> Tensor:
    """Totals in float32, or in float64 if they are exact sums."""
    if total.dtype != torch.int64:
        return total
    *words, special = total.unbind(-1)
    # First no word but the last is negative or exceeds its bits. Then a sum from the top has no digits to
    # cancel: it is exact until it has 53 of them.
    for n in range(WORDS - 1):
        words[n + 1] = words[n + 1] + (words[n] >> WORD_BITS)
        words[n] = words[n] & ((1 << WORD_BITS) - 1)
    value = words.pop().double()
    while words:
        value = value * 2.0**WORD_BITS + words.pop()
    value = value * 2.0**LEAST_EXPONENT
    value = torch.where(special == INFINITE, torch.inf, value)
    value = torch.where(special == MINUS_INFINITE, -torch.inf, value)
    return torch.where(special >= INFINITE | MINUS_INFINITE, torch.nan, value)
