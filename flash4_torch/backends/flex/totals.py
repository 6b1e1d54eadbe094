"""What the kernels add up gradients of captured tensors in."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.common.exact_sums import (
    FIELDS,
    INFINITE,
    LEAST_EXPONENT,
    MAX_ADDITIONS,
    MINUS_INFINITE,
    WORD_BITS,
    WORDS,
)
from ...problem import Extent

MAX_EXACT = 1 << 23
"""Exact sums of a call, of 96 bytes each, and 80 more while they are rounded."""


def limits(elements: int, extent: Extent, gathers: int) -> list[str]:
    """The reasons why a call has no exact sums, for that many elements and gathers.

    A gather adds to one place no more than once a score.
    """
    why = []
    if elements > MAX_EXACT:
        wanted = f"captured tensors want {elements} gradients"
        why.append(f"{wanted}, and it has deterministic sums for up to {MAX_EXACT}")
    scores = extent.B * extent.Hq * extent.Sq * extent.Sk
    if scores > MAX_ADDITIONS // gathers:
        wanted = f"captured tensors are read at {gathers} places for each of {scores} scores"
        why.append(f"{wanted}, and it has deterministic sums of up to {MAX_ADDITIONS} gradients")
    return why


def zeros(x: Tensor, *, exact: bool) -> Tensor:
    """Totals for a captured tensor, of one dimension at least: float32, or exact sums (..., FIELDS) int64."""
    shape = x.shape or (1,)
    if exact:
        return x.new_zeros(*shape, FIELDS, dtype=torch.int64)
    return x.new_zeros(shape, dtype=torch.float32)


def rounded(total: Tensor) -> Tensor:
    """Totals in float32, or in float64 if they are exact sums, whose words are overwritten."""
    if total.dtype != torch.int64:
        return total
    # Each word passes on once what exceeds its bits. Then a sum from the top is exact until it has 53 digits,
    # and what is left below is too small to cancel them.
    carries = total[..., : WORDS - 1] >> WORD_BITS
    total[..., : WORDS - 1] &= (1 << WORD_BITS) - 1
    total[..., 1:WORDS] += carries
    *words, special = total.unbind(-1)
    value = words.pop().double()
    while words:
        value = torch.add(words.pop(), value, alpha=2.0**WORD_BITS)
    value = value * 2.0**LEAST_EXPONENT
    value = torch.where(special == INFINITE, torch.inf, value)
    value = torch.where(special == MINUS_INFINITE, -torch.inf, value)
    return torch.where(special >= INFINITE | MINUS_INFINITE, torch.nan, value)
