"""Dropout's words for few weights: those of all calls of the generator are lanes of one Python integer.

A call into torch takes as long as the arithmetic of hundreds of words, and the generator needs two hundred of
them. Python's integers are as long as one wants. A word of 32 bits in a lane of 64 may be multiplied by 32
bits and shifted by 32 without reaching the next lane, so that one operation of Python does for all lanes at
once what `dropout` does for a tensor. The bits are the same.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 1 << 10
"""Lanes up to which this is faster than torch."""

_LANE = 64
_WORD = 0xFFFFFFFF


class _Counters(NamedTuple):
    """Counter words that no seed and no offset changes."""

    j: int
    i: int
    head: int
    ones: int
    """1 in each lane."""


@lru_cache(maxsize=64)
def _counters(heads: tuple[int, ...], i_words: range, j_words: range) -> _Counters:
    """Those of each call, in the order (heads, i_words, j_words) from the lowest lane on."""
    calls = [(j, i, head & _WORD) for head in heads for i in i_words for j in j_words]
    j, i, h = (_joined(list(words)) for words in zip(*calls, strict=True))
    return _Counters(j, i, h, _joined([1] * len(calls)))


def _joined(words: list[int]) -> int:
    return int.from_bytes(b"".join(word.to_bytes(_LANE // 8, "little") for word in words), "little")


def philox(
    counters: _Counters,
    offset: int,
    seed: int,
    multipliers: tuple[int, int],
    weyl: tuple[int, int],
    rounds: int,
) -> tuple[int, int, int, int]:
    """Philox 4x32 of each lane: `dropout.philox`."""
    x0, x1, x2, ones = counters
    x3, words = ones * (offset & _WORD), ones * _WORD
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
        p0, p1 = x0 * multipliers[0], x2 * multipliers[1]
        x0, x1 = ((p1 >> 32) & words) ^ x1 ^ ones * k0, p1 & words
        x2, x3 = ((p0 >> 32) & words) ^ x3 ^ ones * k1, p0 & words
        k0, k1 = (k0 + weyl[0]) & _WORD, (k1 + weyl[1]) & _WORD
    return x0, x1, x2, x3


class Lanes(NamedTuple):
    """What `keep` needs of `dropout`'s definition."""

    multipliers: tuple[int, int]
    weyl: tuple[int, int]
    rounds: int
    rotations: tuple[int, ...]
    turn: int

    def keep(
        self,
        heads: tuple[int, ...],
        i_words: range,
        j_words: range,
        state: tuple[int, int],
        threshold: tuple[int, int],
    ) -> Tensor:
        """Keep bits, int32 (heads, i >> 4 : i2, j >> 4 : j2 j1), on the CPU."""
        (seed, offset), (t, f) = state, threshold
        counters = _counters(heads, i_words, j_words)
        ones = counters.ones
        mask = ones * _WORD

        def rotated(word: int, by: int) -> int:
            return ((word << by) | (word >> (32 - by))) & mask

        words = philox(counters, offset, seed, self.multipliers, self.weyl, self.rounds)
        turned = [rotated(words[(k + 1) % 4], by) for k, by in enumerate(self.rotations)]
        # Adding 2**32 - f carries into bit 32 where the word is at least f.
        carried = (turned[0] ^ turned[1] ^ turned[2]) + ones * ((1 << 32) - f)
        kept = ((carried >> 32) & ones) * _WORD
        for k in range(4):
            plane = words[k] ^ turned[k] ^ turned[k + 1]
            kept = kept & plane if t >> k & 1 else kept | plane
        kept = rotated(kept, self.turn)
        for k in range(4):
            kept = kept & words[k] if t >> 4 + k & 1 else kept | words[k]
        shape = len(heads), len(i_words), len(j_words)
        found = bytearray(kept.to_bytes(_LANE // 8 * shape[0] * shape[1] * shape[2], "little"))
        return torch.frombuffer(found, dtype=torch.int64).view(shape).to(torch.int32)
