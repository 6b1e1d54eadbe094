"""Masks and score mods that researchers use, those of attention-gym among them, for calls of any sizes.

The benchmark times them, and the tests compare them with torch's definition.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Mod = Callable[..., Tensor]

_LONG = 1024
"""Positions from which on windows, documents and pictures have the sizes of models."""


class Sizes(NamedTuple):
    """The call that a mask or a score mod is made for: S queries and keys."""

    S: int
    B: int = 2
    H: int = 4
    """Query heads."""
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    """The dtype of what score mods learn."""
    learns: bool = True
    """Whether that requires a gradient."""

    @property
    def is_long(self) -> bool:
        return self.S >= _LONG

    def choose(self, small: int, usual: int) -> int:
        """A size: the usual one, or a small one where there are few positions."""
        return usual if self.is_long else small

    def arange(self) -> Tensor:
        return torch.arange(self.S, device=self.device)

    def learned(self, x: Tensor) -> Tensor:
        return x.to(self.device, self.dtype).requires_grad_(self.learns)

    def parameter(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).requires_grad_(self.learns)


def causal(sizes: Sizes) -> Mod:
    return lambda b, h, i, j: i >= j


def window_of(sizes: Sizes) -> int:
    """The keys before its own that a row of `sliding_window` sees."""
    return sizes.choose(sizes.S // 4, 511)


def sliding_window(sizes: Sizes) -> Mod:
    width = window_of(sizes)
    return lambda b, h, i, j: (i >= j) & (i - j <= width)


def document_of(sizes: Sizes) -> Tensor:
    """The document of each position; where there are few, some documents continue behind others."""
    return sizes.arange() // 700 if sizes.is_long else (sizes.arange() * 7 // (2 * sizes.S)) % 3


def documents(sizes: Sizes) -> Mod:
    document = document_of(sizes)
    return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)


def prefix_lm(sizes: Sizes) -> Mod:
    lengths = torch.linspace(sizes.S // 3, sizes.S // 2, sizes.B).to(torch.int64)
    prefix = lengths.to(sizes.device)
    return lambda b, h, i, j: (j < prefix[b]) | (i >= j)


def natten(sizes: Sizes) -> Mod:
    """Neighbours in a picture, whose rows follow one another."""
    kernel = sizes.choose(3, 13)
    width = 1 << math.ceil(math.log2(sizes.S) / 2)
    height = sizes.S // width

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # The centre of a window stays inside of the picture.
        x = (i % width).clamp(kernel // 2, width - 1 - kernel // 2)
        y = (i // width).clamp(kernel // 2, height - 1 - kernel // 2)
        return ((j % width - x).abs() <= kernel // 2) & ((j // width - y).abs() <= kernel // 2)

    return near


def dilated(sizes: Sizes) -> Mod:
    reach, step = sizes.choose(12, 512), sizes.choose(3, 4)
    return lambda b, h, i, j: ((i - j).abs() <= reach) & ((i - j) % step == 0)


def global_and_window(sizes: Sizes) -> Mod:
    tokens, width = sizes.choose(4, 64), sizes.choose(9, 256)
    return lambda b, h, i, j: (j < tokens) | (i < tokens) | ((i - j).abs() < width)


def block_diffusion(sizes: Sizes) -> Mod:
    half, block = sizes.S // 2, sizes.choose(8, 32)

    def diffuses(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        clean_i, clean_j = i >= half, j >= half
        block_i = torch.where(clean_i, (i - half) // block, i // block)
        block_j = torch.where(clean_j, (j - half) // block, j // block)
        same_noisy = (block_i == block_j) & (clean_i == clean_j)
        noisy_sees_earlier = ~clean_i & clean_j & (block_i > block_j)
        return same_noisy | noisy_sees_earlier | (clean_i & clean_j & (block_i >= block_j))

    return diffuses


def shared_prefix(sizes: Sizes) -> Mod:
    prefix, answer = sizes.S // 4, sizes.S // 8

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same_answer = (i - prefix) // answer == (j - prefix) // answer
        return (i >= j) & ((j < prefix) | same_answer)

    return sees


def flamingo(sizes: Sizes) -> Mod:
    """Text that sees the tokens of the image before it."""
    every, tokens = sizes.choose(10, 256), sizes.choose(6, 64)
    latest = sizes.arange() // every
    return lambda b, h, i, j: j // tokens == latest[i]


def sliding_tile(sizes: Sizes) -> Mod:
    """Tiles of a picture, each with its tokens one after another, that see the tiles around them."""
    tokens = sizes.choose(4, 64)
    tiles = sizes.S // tokens
    columns = 1 << int(math.log2(tiles)) // 2
    rows = tiles // columns

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = (i // tokens // columns).clamp(1, rows - 2)
        column = (i // tokens % columns).clamp(1, columns - 2)
        return ((j // tokens // columns - row).abs() <= 1) & ((j // tokens % columns - column).abs() <= 1)

    return sees


MASKS: tuple[Callable[[Sizes], Mod], ...] = (
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
)


class MadeMod(NamedTuple):
    """A score mod, and what it learns."""

    mod: Mod
    learned: list[Tensor]
    for_torch: Mod | None = None
    """The same without what torch has no gradient for, in memory of the order of the scores."""


def alibi(sizes: Sizes) -> MadeMod:
    slopes = sizes.learned(torch.exp2(-8.0 * torch.arange(1, sizes.H + 1) / sizes.H))
    return MadeMod(lambda score, b, h, i, j: score + slopes[h] * (j - i), [slopes])


CAP = 30.0


def softcap(sizes: Sizes) -> MadeMod:
    cap = CAP if sizes.is_long else 2.0
    return MadeMod(lambda score, b, h, i, j: cap * torch.tanh(score / cap), [])


def sandwich(sizes: Sizes) -> MadeMod:
    scale = sizes.parameter(1)
    frequencies = 1 / 100 ** torch.linspace(0, 1, 5, dtype=sizes.dtype, device=sizes.device)

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + scale[0] * torch.cos((i - j) * frequencies).sum()

    return MadeMod(modify, [scale])


def graphormer(sizes: Sizes) -> MadeMod:
    shape = sizes.B, sizes.S, sizes.S
    distances = torch.randint(0, 6, shape, dtype=torch.int32, device=sizes.device)
    embedding = sizes.parameter(6, sizes.H)
    return MadeMod(lambda score, b, h, i, j: score + embedding[distances[b, i, j], h], [embedding])


def relative_position(sizes: Sizes) -> MadeMod:
    S, table = sizes.S, sizes.parameter(sizes.H, 2 * sizes.S)
    return MadeMod(lambda score, b, h, i, j: score + table[h, i - j + S], [table])


def bucketed(sizes: Sizes) -> MadeMod:
    embedding = nn.Embedding(sizes.choose(8, 16), sizes.H, dtype=sizes.dtype, device=sizes.device)
    embedding.requires_grad_(sizes.learns)
    last = embedding.num_embeddings - 1

    class Bias(nn.Module):
        """T5's: an embedding for each power of two of the distance."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = embedding

        def forward(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            bucket = torch.log2((i - j).abs() + 1.0).to(torch.int64).clamp(max=last)
            return score + self.embedding.weight[bucket, h]

    return MadeMod(Bias(), [embedding.weight])


def rope_part(sizes: Sizes) -> MadeMod:
    """Multi-head latent attention: a part of the score is a product of rotated vectors."""
    D = sizes.choose(3, 8)
    query, key = sizes.parameter(sizes.B, sizes.H, sizes.S, D), sizes.parameter(sizes.B, sizes.S, D)
    for_torch: Mod | None = None
    if not sizes.is_long:
        products = torch.einsum("bhid,bjd->bhij", query, key)
        for_torch = lambda score, b, h, i, j: score + products[b, h, i, j]  # noqa: E731
    return MadeMod(
        lambda score, b, h, i, j: score + torch.dot(query[b, h, i], key[b, j]), [query, key], for_torch
    )


def factored(sizes: Sizes) -> MadeMod:
    """A function of captured tensors alone, and a partial."""
    raw, gain = sizes.parameter(sizes.H, 2), sizes.parameter()

    def modify(weights: Tensor, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = torch.exp(-(i - j).abs() * torch.sigmoid(raw)[h, 0])
        return score * weights[h] + near * gain

    weights = torch.linspace(0.5, 1.5, sizes.H, dtype=sizes.dtype, device=sizes.device)
    return MadeMod(functools.partial(modify, weights), [raw, gain])


MODS: tuple[Callable[[Sizes], MadeMod], ...] = (
    alibi,
    softcap,
    sandwich,
    graphormer,
    relative_position,
    bucketed,
    rope_part,
    factored,
)


class Case(NamedTuple):
    """A call's functions; a score mod stands beside a causal mask."""

    mask: Mod
    batches: int | None
    """Batch entries that the mask tells apart, None if it does not."""
    score_mod: Mod | None = None
    learned: tuple[Tensor, ...] = ()


def _of_mask(make: Callable[[Sizes], Mod]) -> Callable[[Sizes], Case]:
    return lambda sizes: Case(make(sizes), sizes.B if make is prefix_lm else None)


def _of_mod(make: Callable[[Sizes], MadeMod]) -> Callable[[Sizes], Case]:
    def made(sizes: Sizes) -> Case:
        found = make(sizes)
        return Case(causal(sizes), None, found.mod, tuple(found.learned))

    return made


CASES: Mapping[str, Callable[[Sizes], Case]] = {
    **{mask.__name__: _of_mask(mask) for mask in MASKS},
    **{mod.__name__: _of_mod(mod) for mod in MODS},
}
"""Everything that is timed, by name."""


def each(mod: Mod) -> Any:
    """A mask or score mod as a function of tensors of places, called for one place as it may need it."""

    def of_tensors(*places: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(*(x.shape for x in places))
        flat = (x.expand(shape).flatten() for x in places)
        found: Tensor = torch.vmap(mod)(*flat)
        return found.view(shape)

    return of_tensors
