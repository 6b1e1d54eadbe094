"""Masks and score mods that researchers use, for calls of S queries and keys, and torch's own results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Mod = Callable[..., Tensor]
H = 4
"""Query heads."""


def causal(S: int) -> Mod:
    return lambda b, h, i, j: i >= j


def sliding_window(S: int) -> Mod:
    width = S // 4
    return lambda b, h, i, j: (i >= j) & (i - j <= width)


def documents(S: int) -> Mod:
    document = (torch.arange(S) * 7 // (2 * S)) % 3
    return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)


def prefix_lm(S: int) -> Mod:
    prefix = torch.tensor([S // 3, S // 2])
    return lambda b, h, i, j: (j < prefix[b]) | (i >= j)


def natten(S: int) -> Mod:
    width, kernel = 8, 3

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # The centre of a window stays inside of the picture.
        x = (i % width).clamp(kernel // 2, width - 1 - kernel // 2)
        y = (i // width).clamp(kernel // 2, S // width - 1 - kernel // 2)
        return ((j % width - x).abs() <= kernel // 2) & ((j // width - y).abs() <= kernel // 2)

    return near


def dilated(S: int) -> Mod:
    return lambda b, h, i, j: ((i - j).abs() <= 12) & ((i - j) % 3 == 0)


def global_and_window(S: int) -> Mod:
    return lambda b, h, i, j: (j < 4) | (i < 4) | ((i - j).abs() < 9)


def block_diffusion(S: int) -> Mod:
    half, block = S // 2, 8

    def diffuses(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        clean_i, clean_j = i >= half, j >= half
        block_i = torch.where(clean_i, (i - half) // block, i // block)
        block_j = torch.where(clean_j, (j - half) // block, j // block)
        same_noisy = (block_i == block_j) & (clean_i == clean_j)
        noisy_sees_earlier = ~clean_i & clean_j & (block_i > block_j)
        return same_noisy | noisy_sees_earlier | (clean_i & clean_j & (block_i >= block_j))

    return diffuses


def shared_prefix(S: int) -> Mod:
    prefix, answer = S // 4, S // 8

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same_answer = (i - prefix) // answer == (j - prefix) // answer
        return (i >= j) & ((j < prefix) | same_answer)

    return sees


def flamingo(S: int) -> Mod:
    images = torch.zeros(S, dtype=torch.int64)
    images[::10] = 1
    latest = images.cumsum(0) - 1
    tokens = 6
    return lambda b, h, i, j: j // tokens == latest[i]


def sliding_tile(S: int) -> Mod:
    width, tile = 8, 2
    columns = width // tile

    def tile_of(x: Tensor) -> tuple[Tensor, Tensor]:
        return x // width // tile, x % width // tile % columns

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        (row_i, column_i), (row_j, column_j) = tile_of(i), tile_of(j)
        return ((row_i - row_j).abs() <= 1) & ((column_i - column_j).abs() <= 1)

    return sees


MASKS: list[Callable[[int], Mod]] = [
    causal,
    sliding_window,
    documents,
    prefix_lm,
    natten,
    dilated,
    global_and_window,
    block_diffusion,
    shared_prefix,
    flamingo,
    sliding_tile,
]


def parameter(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


class MadeMod(NamedTuple):
    """A score mod, and what it learns."""

    mod: Mod
    learned: list[Tensor]
    for_torch: Mod | None = None
    """The same without what torch has no gradient for."""


def alibi(S: int) -> MadeMod:
    slopes = parameter(H)
    return MadeMod(lambda score, b, h, i, j: score + slopes[h] * (j - i), [slopes])


def softcap(S: int) -> MadeMod:
    cap = 2.0
    return MadeMod(lambda score, b, h, i, j: cap * torch.tanh(score / cap), [])


def sandwich(S: int) -> MadeMod:
    scale = parameter(1)
    frequencies = 1 / 100 ** torch.linspace(0, 1, 5, dtype=scale.dtype)

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + scale[0] * torch.cos((i - j) * frequencies).sum()

    return MadeMod(modify, [scale])


def graphormer(S: int) -> MadeMod:
    distances = torch.randint(0, 6, (2, S, S))
    embedding = parameter(6, H)
    return MadeMod(lambda score, b, h, i, j: score + embedding[distances[b, i, j], h], [embedding])


def relative_position(S: int) -> MadeMod:
    table = parameter(H, 2 * S)
    return MadeMod(lambda score, b, h, i, j: score + table[h, i - j + S], [table])


def bucketed(S: int) -> MadeMod:
    embedding = nn.Embedding(8, H, dtype=torch.float64)

    class Bias(nn.Module):
        """T5's: an embedding for each power of two of the distance."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = embedding

        def forward(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            bucket = torch.log2((i - j).abs() + 1.0).to(torch.int64).clamp(max=7)
            return score + self.embedding.weight[bucket, h]

    return MadeMod(Bias(), [embedding.weight])


def rope_part(S: int) -> MadeMod:
    """Multi-head latent attention: a part of the score is a product of rotated vectors."""
    query, key = parameter(2, H, S, 3), parameter(2, S, 3)
    products = torch.einsum("bhid,bjd->bhij", query, key)
    return MadeMod(
        lambda score, b, h, i, j: score + torch.dot(query[b, h, i], key[b, j]),
        [query, key],
        lambda score, b, h, i, j: score + products[b, h, i, j],
    )


def factored(S: int) -> MadeMod:
    """A function of captured tensors alone, and a partial."""
    raw, gain = parameter(H, 2), parameter()

    def modify(weights: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = torch.exp(-(i - j).abs() * torch.sigmoid(raw)[h, 0])
        return score * weights[h] + near * gain

    weights = torch.linspace(0.5, 1.5, H, dtype=torch.float64)
    return MadeMod(functools.partial(modify, weights), [raw, gain])


MODS: list[Callable[[int], MadeMod]] = [
    alibi,
    softcap,
    sandwich,
    graphormer,
    relative_position,
    bucketed,
    rope_part,
    factored,
]


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
