"""Masks and score mods to compose, beside those of the benchmark, and torch's own results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flash4_torch.backends.flex.compiled import derivative_of
from flash4_torch.bench.flex_cases import MASKS, MODS, MadeMod, Mod, Sizes, causal
from flash4_torch.configs.types import Mods
from flash4_torch.flex.attention import traced

__all__ = [
    "MASKS",
    "MODS",
    "H",
    "MadeMod",
    "Mod",
    "Parts",
    "Sizes",
    "causal",
    "drawn_mask",
    "of_kernels",
    "torchs",
]

H = 4
"""Query heads."""


class Parts:
    """Score mods to compose; tensors are their parameters, for up to 80 queries and keys."""

    NAMES = ("alibi", "cap", "bias", "gained", "same_document")

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.slopes = torch.randn(H).to(dtype).requires_grad_()
        self.table = torch.randn(H, 80).to(dtype).requires_grad_()
        self.gain = torch.rand(()).to(dtype).requires_grad_()
        self.document = torch.arange(80) // 11

    @property
    def learned(self) -> list[Tensor]:
        return [self.slopes, self.table, self.gain]

    def exact(self) -> Parts:
        """The same parameters in float64, with gradients of their own."""
        copy = Parts()
        for name in ("slopes", "table", "gain"):
            setattr(copy, name, getattr(self, name).detach().double().requires_grad_())
        return copy

    def score_mod(self, names: Sequence[str], number: float) -> Mod:
        def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            for name in names:
                score = getattr(self, name)(score, number, b, h, i, j)
            return score

        return modify

    def alibi(self, score: Tensor, number: float, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return score + self.slopes[h] * (j - i) * number

    def cap(self, score: Tensor, number: float, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return torch.tanh(score / number) * number

    def bias(self, score: Tensor, number: float, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return score + self.table[h, (i - j).abs()]

    def gained(self, score: Tensor, number: float, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return torch.where((i + b) % 2 == 0, score * self.gain.exp(), score - number)

    def same_document(self, score: Tensor, number: float, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return torch.where(self.document[i] == self.document[j], score, -float("inf"))


def drawn_mask(width: int, period: int, length: int) -> Mod:
    """A band or a comb or a part of documents; every query sees the key at its own place, and the first."""
    document = torch.arange(512) // length
    return lambda b, h, i, j: (
        (i == j)
        | (j == 0)
        | (((i - j).abs() <= width) & ((i + j + h) % period == 0))
        | ((document[i] == document[j]) & (i >= j + b))
    )


def torchs(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod, block_mask: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of torch's flex_attention, eager, which is differentiable by plain autograd on a CPU."""
    from torch._higher_order_ops.flex_attention import math_attention

    scale = 1 / math.sqrt(q.shape[-1])
    out, lse, _ = math_attention(q, k, v, score_mod, block_mask.as_tuple(), scale, {})
    return out, lse * math.log(2)


def of_kernels(*, gradients: bool) -> Iterator[Mods]:
    """Functions of a score with gradients of captured tensors, with none, with a mask; a mask alone; a ramp.

    Each comes without blocks and with them.
    """
    q, slopes, table = torch.empty(1, 64, 2, 64), torch.ones(2), torch.ones(64)
    third: Mod = lambda b, h, i, j: (i - j) % 3 < 2  # noqa: E731
    alibi: Mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
    for score_mod, mask_mod, wanted, ramp in (
        (lambda s, b, h, i, j: s + table[(i - j).clamp(0, 63)], None, (True,), False),
        (lambda s, b, h, i, j: 30 * torch.tanh(s / 30), None, (), False),
        (alibi, third, (True,), False),
        (None, third, (), False),
        (alibi, None, (True,), True),
    ):
        mods = traced(q, q, score_mod, mask_mod)
        derived = derivative_of(mods.score_mod, wanted).text() if score_mod and gradients else ""
        for blocks in ("", "rows"):
            yield Mods(mods.score_mod, mods.mask_mod, blocks, derived, ramp=ramp)
