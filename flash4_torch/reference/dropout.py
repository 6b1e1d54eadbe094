"""Which attention weights dropout keeps: a pure function of (seed, offset, b, h, i, j).

So the mask depends on no tiling, device or direction, and the backward recomputes it instead of storing it.

The generator is Philox 4x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with
7 rounds, the fewest that pass BigCrush. One call turns a 128-bit counter into four words of 32 bits. The
eight words of two calls are the bits of 32 numbers from 0 to 255, one for each of 32 weights.

The mapping, fixed for every kernel
-----------------------------------
Write i = ... i4 i3 i2 i1 i0 in bits, and j likewise. The 32 weights of two calls are the ones that differ
only in the bits i3, i1, i0, j3, j0:

    counter = (j >> 4 : j2 j1,  i >> 4 : i2 call,  b * Hq + h,  offset)     key = (seed low, seed high)
    words   = w0, w1, w2, w3 of call 0 and w4, w5, w6, w7 of call 1
    number  = bit e of each word, w0's counting 1 and w7's 128;   e = i1 i0 j0 j3 i3 in binary

(`x >> 4 : x2 x1` is `(x >> 4) * 4 + 2 * x2 + x1`.) A number alone would quantise p to 1/256. So let
p * 256 = t + f with a whole t, and x = w0 ^ rotate(w1, 16): dropped is `number < t + (x < f * 2**32)`. Every
bit of x takes its two from different numbers, and no two bits of x share one: whatever a number is, each bit
of x has one left that is random. So x is independent of any one number, and each weight is dropped with
probability exactly p, to 40 bits, for four instructions per 32 weights, which share x.

The words need not be taken apart. Go up through the bits: what has been compared of a number is less than
what has been of t (plus 1, where x says so) if two of three are true: the number's bit is 0, t's is 1, it was
so without these bits. That is one instruction of a GPU for a bit of 32 numbers.

The 32 weights are chosen by what one GPU thread holds:

- wgmma accumulator, forward: rows r and r + 8 (i3), pairs of columns (j0), eight apart (j3 and up); the lane
  fixes the rest. A thread holds 8 of the 32, which are a byte of the result, its lane's i1 and i0 say which.
- the same accumulator of the transposed product (rows are keys, as in the backward): i0, i3 and j3 vary in
  the thread. It holds 8 of the 32 again: half a byte for each i0, of those that its lane's i1 and j0 say.
- they lie in an aligned 16 x 16 tile, the smallest one either MMA has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 7
BLOCK = 16
"""Calls of the generator stay inside aligned BLOCK x BLOCK tiles of (i, j)."""
PLANES = 8
"""Bits of the number that decides on a weight."""

_LOW32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32: four words out of four counter words and two key words.

    All words are int64 tensors holding 32-bit values; they broadcast, so words that vary along few
    dimensions stay small through the first rounds.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The product of two 32-bit words wraps in int64, but its 64 bits are right. What x1 and x3 have above
        # 32 bits is masked off where they are used.
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = ((p1 >> 32) ^ x1 ^ k0) & _LOW32, p1
        x2, x3 = ((p0 >> 32) ^ x3 ^ k1) & _LOW32, p0
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return x0, x1 & _LOW32, x2, x3 & _LOW32


def thresholds(p: float) -> tuple[int, int]:
    """p as (t, f): p = (t + f / 2**32) / 256, to 40 bits."""
    return divmod(round(p * 2**40), 2**32)


@dataclass(frozen=True)
class Dropout:
    """Dropout of one call: probability p, and the int64 pair (seed, offset) as a device tensor.

    `first_batch` is added to batch indices: a sequence of a varlen call counts as its own batch entry.
    """

    rng_state: Tensor
    p: float
    first_batch: int = 0

    @property
    def scale(self) -> float:
        """What kept weights are multiplied by, 1 / (1 - p); 0 when nothing is kept."""
        return 0.0 if self.p >= 1.0 else 1.0 / (1.0 - self.p)

    def keep(self, batch: range, Hq: int, rows: range, keys: range) -> Tensor:
        """Bool (len(batch), Hq, len(rows), len(keys)), True where the weight is kept."""
        device = self.rng_state.device
        seed, offset = self.rng_state[0], self.rng_state[1]
        i_words = _counter_words(rows, device)[:, None]
        j_words = _counter_words(keys, device)
        first, last = ((b + self.first_batch) * Hq for b in (batch.start, batch.stop))
        heads = torch.arange(first, last, device=device)[:, None, None]
        words = philox(
            (j_words, i_words, heads & _LOW32, offset & _LOW32), (seed & _LOW32, (seed >> 32) & _LOW32)
        )
        tiles = _in_place(self._compare(words))
        kept = tiles.view(len(batch), Hq, BLOCK * (len(i_words) // 4), BLOCK * (len(j_words) // 4))
        i0, j0 = rows.start % BLOCK, keys.start % BLOCK
        return kept[:, :, i0 : i0 + len(rows), j0 : j0 + len(keys)]

    def _compare(self, words: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """Int32 (heads, i >> 4 : i2, j >> 4 : j2 j1): the bit e says whether weight e is kept."""
        heads, rows, columns = words[0].shape
        first, second = zip(*(w.view(heads, rows // 2, 2, columns).unbind(2) for w in words), strict=True)
        mixed = first[0] ^ (first[1] >> 16) ^ (first[1] << 16 & _LOW32)
        t, f = thresholds(self.p)
        kept = (mixed >= f).to(torch.int32).neg_()
        for k, plane in enumerate((*first, *second)):
            # The majority of the plane, of t's bit inverted, and of what the lower bits say.
            merge = torch.bitwise_and if t >> k & 1 else torch.bitwise_or
            kept = merge(kept, plane.to(torch.int32), out=kept)
        return kept if t < 2**PLANES else kept.zero_()


def _in_place(kept: Tensor) -> Tensor:
    """Bool, the bits of (heads, i >> 4 : i2, j >> 4 : j2 j1) words in the order (heads, i, j)."""
    heads, rows, columns = kept.shape
    # Words of 16 bits i0 j0 j3 i3, and of four of them, which differ in j2 and j1, one word: little-endian.
    halves = kept.view(torch.int16).view(heads, rows, columns, 2).transpose(2, 3)
    fours = halves.flatten().view(torch.int64)
    # j0 before i0: eight weights that differ in j2, j1, j0 are then bits of different bytes, in their order.
    moved = (fours ^ (fours >> 4)) & 0x00F000F000F000F0
    fours ^= moved | (moved << 4)
    fours = fours.view(heads, rows // 2, 2, 2, columns // 4, 1, 1, 1)
    shifts = torch.arange(8, device=kept.device).view(2, 2, 2)
    eights = torch.empty(heads, rows // 2, 2, 2, 2, 2, columns // 4, 2, dtype=torch.int64, device=kept.device)
    # (heads, i >> 4, i3, i2, i1, i0, j >> 4, j3) from (heads, i >> 4, i2, i1, j >> 4, i0, j3, i3)
    torch.bitwise_right_shift(fours, shifts, out=eights.permute(0, 1, 3, 4, 6, 5, 7, 2))
    eights &= 0x0101010101010101
    return eights.view(torch.bool)


def _counter_words(span: range, device: torch.device) -> Tensor:
    """Of the aligned tiles that hold `span`: four per 16 positions."""
    return torch.arange(span.start // BLOCK * 4, (span.stop + BLOCK - 1) // BLOCK * 4, device=device)
