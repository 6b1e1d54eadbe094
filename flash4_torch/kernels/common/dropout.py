"""Dropout in the kernels: the mask of `reference.dropout`, whose docstring fixes the mapping, bit for bit.

A tile of weights lies in a wgmma accumulator: lane l of a warp holds rows l // 4 and l // 4 + 8 of the warp's
16, and columns 2 (l % 4) + 8 j + (0, 1). Lanes l and l ^ 4 share all their calls of the generator, and make
them by turns: of every two blocks of 16 columns, the lane whose bit 2 is clear makes the call of the first,
the other lane that of the second.

    dropout = load(rng_state, rule.drop_byte, rule.drop_fraction)   once per thread
    rows = QueryRows.at(dropout, row, head, lane)                   once per tile of queries
    kept = rows.draw(key, N)                                        needs no scores: while they are made
    rows.drop(weights, kept)

Weights are only zeroed; 1 / (1 - p) belongs into a factor that something is multiplied by anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import nvvm

ROUNDS = 7
BLOCK = 16
"""Calls of the generator stay inside aligned BLOCK x BLOCK tiles."""

Words = tuple[Uint32, Uint32, Uint32, Uint32]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_EVERY_BYTE = 0x01010101
_TOP_BITS = 0x80808080
_MAJORITY = 0xE8  # of three bits, as lop3's table


class Dropout(NamedTuple):
    """What all weights of a call share."""

    keys: tuple[tuple[Uint32, Uint32], ...]
    """Of each round."""
    offset: Uint32
    fraction: Uint32
    limit: Uint32
    """In every byte t, or t - 128 from t = 128 on: what a byte's low seven bits are compared with."""
    either: Uint32
    """All ones for t < 128, where a byte's top bit is enough to keep its weight; else 0: it is needed."""

    def words(self, keys: Uint32, queries: Uint32, head: Uint32) -> Words:
        """One call of the generator, 16 bytes; its counter is made of j, of i, and b * Hq + h."""
        x0, x1, x2, x3 = keys, queries, head, self.offset
        for k0, k1 in self.keys:
            high0, low0 = _product(x0, _MULTIPLIERS[0])
            high1, low1 = _product(x2, _MULTIPLIERS[1])
            # What is the same in all calls of a loop is combined first, outside of it.
            x0, x1, x2, x3 = high1 ^ (x1 ^ k0), low1, high0 ^ (x3 ^ k1), low0
        return x0, x1, x2, x3

    def compare(self, words: Words) -> Words:
        """The top bit of each byte: whether its weight is kept. The other bits mean nothing."""
        x0, x1, x2, x3 = words
        limit = self.limit + Uint32((x0 ^ x1 ^ x2 ^ x3) < self.fraction) * Uint32(_EVERY_BYTE)
        # A byte with its top bit set is at least 128 and a limit at most that, so no byte borrows.
        low = ((x | Uint32(_TOP_BITS)) - limit for x in words)
        return tuple(cute.arch.lop3(x, y, self.either, _MAJORITY) for x, y in zip(words, low, strict=True))


@cute.jit
def load(rng_state: cute.Tensor, byte: Uint32, fraction: Uint32) -> Dropout:
    """rng_state: int64 (2,), seed and offset. byte, fraction: `thresholds(p)` of the reference."""
    k0, k1, offset = _uniform(rng_state[0]), _uniform(rng_state[0] >> 32), _uniform(rng_state[1])
    keys = tuple(
        (k0 + Uint32(r * _WEYL[0] % 2**32), k1 + Uint32(r * _WEYL[1] % 2**32)) for r in range(ROUNDS)
    )
    limit, either = byte, Uint32(0xFFFFFFFF)
    if byte >= 128:
        limit, either = byte - 128, Uint32(0)
    return Dropout(keys, offset, fraction, limit * Uint32(_EVERY_BYTE), either)


class Kept(NamedTuple):
    """Which weights of two blocks of 16 columns are kept, as top bits of bytes."""

    own: Words
    """Of the call that this lane made."""
    received: tuple[Uint32, ...]
    """Of the other lane's call, two bytes of each word; empty for a last block alone, which both call for."""


class _Rows(NamedTuple):
    """The 16 rows that a warp holds of an accumulator."""

    dropout: Dropout
    block: Uint32
    """The rows' part of the counter."""
    head: Uint32
    lane: Int32


class QueryRows(_Rows):
    """Rows are queries, columns are keys."""

    _BYTES = ((0, 2), (1, 3))
    """Of a word, those of a pair of columns, in lanes whose bit 2 is clear and set."""

    @classmethod
    def at(cls, dropout: Dropout, row: Int32, head: Int32, lane: Int32) -> QueryRows:
        """row: the warp's first, a multiple of 16. head: b * Hq + h; for varlen b counts sequences."""
        return cls(dropout, (Uint32(row) >> 2) + (Uint32(lane) >> 3), Uint32(head), lane)

    def draw(self, column: Int32, N: int) -> tuple[Kept, ...]:
        """For N columns from `column` on, both multiples of 16; N is static."""
        first = (Uint32(column) >> 2) + Uint32(self.lane) % 4
        blocks = [self._two_blocks(first + Uint32(4 * m)) for m in range(0, N // BLOCK - 1, 2)]
        if N % (2 * BLOCK):
            blocks.append(Kept(self._call(first + Uint32(N // 4 - 4)), ()))
        return tuple(blocks)

    def drop(self, weights: cute.Tensor, kept: tuple[Kept, ...]) -> None:
        """Zero the others of `weights`, the thread's N / 2 numbers of 16 or 32 bits, a flat register tensor.

        In the accumulator's order: two columns of two rows of each 8 columns. 16 bits take half the time.
        """
        together = 32 // weights.element_type.width
        count = cute.size(weights) // together
        words = cute.make_tensor(cute.recast_ptr(weights.iterator, dtype=Uint32), cute.make_layout(count))
        for i in range(count):
            pair, columns = (i, (0, 0, 1, 1)) if together == 2 else (i // 2, (i % 2,) * 4)
            words[i] = words[i] & self._mask(kept, pair, columns)

    def _two_blocks(self, first: Uint32) -> Kept:
        own = self._call(first + _by_turn(self.lane, 0, 4))
        theirs = (_selector((*pair, *(4 + byte for byte in pair))) for pair in reversed(self._BYTES))
        sent = _by_turn(self.lane, *theirs)
        received = (_permute(*own[:2], sent), _permute(*own[2:], sent))
        return Kept(own, tuple(cute.arch.shuffle_sync_bfly(word, 4) for word in received))

    def _call(self, column_block: Uint32) -> Words:
        return self.dropout.compare(self.dropout.words(column_block, self.block, self.head))

    def _mask(self, kept: tuple[Kept, ...], pair: int, columns: tuple[int, ...]) -> Uint32:
        """Four bytes of ones or zeros, each for column 0 or 1 of a pair of columns."""
        block, group, half = pair // 4, pair // 2 % 2, pair % 2
        own, received = kept[block // 2]
        word = self._word(group, half)
        if not received:
            mine = (_selector(bytes_[c] | 8 for c in columns) for bytes_ in self._BYTES)
            return _permute(own[word], own[word], _by_turn(self.lane, *mine))
        theirs = (4, 5) if word % 2 == 0 else (6, 7)
        sources = (self._BYTES[0], theirs) if block % 2 == 0 else (theirs, self._BYTES[1])
        selectors = (_selector(bytes_[c] | 8 for c in columns) for bytes_ in sources)
        return _permute(own[word], received[word // 2], _by_turn(self.lane, *selectors))

    @staticmethod
    def _word(group: int, half: int) -> int:
        """Of a call, the one for that group of 8 columns and of 8 rows."""
        return 2 * half + group


class KeyRows(QueryRows):
    """The transposed product: rows are keys, columns are queries."""

    _BYTES = ((0, 1), (2, 3))

    def _call(self, column_block: Uint32) -> Words:
        return self.dropout.compare(self.dropout.words(self.block, column_block, self.head))

    @staticmethod
    def _word(group: int, half: int) -> int:
        return 2 * group + half


@cute.jit
def _by_turn(lane: Int32, first: int, second: int) -> Uint32:
    """A number that depends on bit 2 of the lane."""
    return cutlass.select_(lane & 4 == 0, Uint32(first), Uint32(second))


def _selector(bytes_) -> int:
    return sum(byte << 4 * n for n, byte in enumerate(bytes_))


def _permute(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Bytes chosen of eight; with 8 added to an index, that byte's top bit eight times."""
    return Uint32(
        nvvm.prmt(low.ir_value(), selector.ir_value(), nvvm.PermuteMode.DEFAULT, hi=high.ir_value())
    )


def _product(x: Uint32, factor: int) -> tuple[Uint32, Uint32]:
    """The high and the low word."""
    product = Uint64(x) * Uint64(factor)
    return Uint32(product >> 32), Uint32(product)


def _uniform(word: Int64) -> Uint32:
    """Its low 32 bits, known to be the same in all lanes."""
    return Uint32(cute.arch.make_warp_uniform(Int32(word)))
