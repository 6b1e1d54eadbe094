"""Dropout's words for few weights: those of all calls of the generator are lanes of one Python integer.

A call into torch takes as long as the arithmetic of hundreds of words, and the generator needs two hundred of
them. Python's integers are as long as one wants. A word of 32 bits in a lane of 64 may be multiplied by 32
bits and shifted by 32 without reaching the next lane, so that one operation of Python does for all lanes at
once what `dropout` does for a tensor. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

MOST = 1 << 10
"""Lanes up to which this is faster than torch."""

_LANE = 64
_WORD = 0xFFFFFFFF


class Counters(NamedTuple):
    """Counter words that no seed and no offset changes."""

    j: int
    i: int
    head: int
    ones: int
    """1 in each lane."""
    num_bytes: int


@lru_cache(maxsize=64)
def counters(heads: tuple[int, ...], i_words: range, j_words: range) -> Counters:
    """Those of each call, in the order (heads, i_words, j_words) from the lowest lane on."""
    calls = [(j, i, head & _WORD) for head in heads for i in i_words for j in j_words]
    j, i, h = (_joined(list(words)) for words in zip(*calls, strict=True))
    return Counters(j, i, h, _joined([1] * len(calls)), len(calls) * _LANE // 8)


def _joined(words: list[int]) -> int:
    return int.from_bytes(b"".join(word.to_bytes(_LANE // 8, "little") for word in words), "little")


def philox(
    counters: Counters,
    offset: int,
    seed: int,
    multipliers: tuple[int, int],
    weyl: tuple[int, int],
    rounds: int,
) -> tuple[int, int, int, int]:
    """Philox 4x32 of each lane: `dropout.philox`."""
    x0, x1, x2, ones, _ = counters
    x3, words = ones * (offset & _WORD), ones * _WORD
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
        p0, p1 = x0 * multipliers[0], x2 * multipliers[1]
        # Bits above a word are masked off where they would matter.
        x0, x1 = ((p1 >> 32) ^ x1 ^ ones * k0) & words, p1
        x2, x3 = ((p0 >> 32) ^ x3 ^ ones * k1) & words, p0
        k0, k1 = (k0 + weyl[0]) & _WORD, (k1 + weyl[1]) & _WORD
    return x0, x1 & words, x2, x3 & words


class Lanes(NamedTuple):
    """What `keep` needs of `dropout`'s definition."""

    multipliers: tuple[int, int]
    weyl: tuple[int, int]
    rounds: int
    rotations: tuple[int, ...]
    turn: int

    def keep(self, counters: Counters, state: Sequence[int], threshold: tuple[int, int]) -> int:
        """Keep bits, 32 in a lane."""
        (seed, offset), (t, f) = state, threshold
        ones = counters.ones
        mask = ones * _WORD

        words = philox(counters, offset, seed, self.multipliers, self.weyl, self.rounds)
        # Not masked: what a rotation leaves above a word is masked off below.
        turned = [
            (word << by) | (word >> (32 - by))
            for word, by in zip(words[1:] + words[:2], self.rotations, strict=True)
        ]
        # Adding 2**32 - f carries into bit 32 where the word is at least f.
        carried = ((turned[0] ^ turned[1] ^ turned[2]) & mask) + ones * ((1 << 32) - f)
        kept = ((carried >> 32) & ones) * _WORD
        for k in range(4):
            plane = words[k] ^ turned[k] ^ turned[k + 1]
            kept = kept & plane if t >> k & 1 else kept | plane
        kept &= mask
        kept = ((kept << self.turn) | (kept >> (32 - self.turn))) & mask
        for k in range(4):
            kept = kept & words[k] if t >> 4 + k & 1 else kept | words[k]
        return kept


def words(lanes: int, num_bytes: int) -> bytearray:
    """Lanes as int64 numbers in memory."""
    return bytearray(lanes.to_bytes(num_bytes, "little"))


def bits(lanes: int, num_bytes: int) -> bytearray:
    """Each bit of the lanes as a byte: the lowest of all of their bytes, then the next ones."""
    lowest = _lowest(num_bytes)
    return bytearray().join([(lanes >> k & lowest).to_bytes(num_bytes, "little") for k in range(8)])


@lru_cache(maxsize=64)
def _lowest(num_bytes: int) -> int:
    """1 in each byte."""
    return int.from_bytes(b"\1" * num_bytes, "little")
