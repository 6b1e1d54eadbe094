"""Which attention weights dropout keeps: a pure function of (seed, offset, b, h, i, j).

So the mask depends on no tiling, device or direction, and the backward recomputes it instead of storing it.

The generator is Philox 4x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with 7
rounds, the fewest that pass BigCrush. One call turns a 128-bit counter into 16 bytes; each byte decides one
weight.

The mapping, fixed for every kernel
-----------------------------------
Write i = ... i4 i3 i2 i1 i0 in bits, and j likewise. The 16 weights of one call are the ones that differ only
in the bits i3, i0, j3, j0:

    counter = (j >> 4 : j2 j1,  i >> 4 : i2 i1,  b * Hq + h,  offset)     key = (seed low, seed high)
    word    = 2 * i3 + j3       byte of it = 2 * j0 + i0

(`x >> 4 : x2 x1` is `(x >> 4) * 4 + 2 * x2 + x1`.) The bits are chosen by what one GPU thread holds:

- wgmma accumulator, forward: rows r and r + 8 (i3), pairs of columns (j0), eight apart (j3 and up); the lane
  fixes i0. A thread holds 8 of a call's 16 weights; the other 8 belong to lane ^ 4, whose i0 differs. So each
  of the two lanes makes every second call and they swap halves: two shuffles a call, nothing wasted.
- the same accumulator of the transposed product (rows are keys, as in the backward): the same sentence with i
  and j exchanged, because word and byte are symmetric in them.
- tensor memory, one row (or, transposed, one key) a thread: j0 and j3 vary in the thread, i0 and i3 across
  lanes ^ 1 and ^ 8, so four lanes share their calls by two exchanges.
- two neighbouring columns (bf16x2 lanes) are two bytes of one word, so one byte permute with zero fill widens
  them into 16-bit lanes for a packed compare; transposed, two neighbouring rows are too.
- a call never reaches outside an aligned 16 x 16 tile, the smallest one either MMA has.

A byte alone would quantise p to 1/256. So let p * 256 = t + f with a whole t, and x be the xor of the call's
four words: dropped is `byte < t + (x < f * 2**32)`. x is independent of any one byte (of any three words),
hence each weight is dropped with probability exactly p, to 40 bits, for three instructions per 16 weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 7
BLOCK = 16
"""Calls of the generator stay inside aligned BLOCK x BLOCK tiles of (i, j)."""

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
        i_blocks = _block_ids(rows, device)[:, None]
        j_blocks = _block_ids(keys, device)
        first, last = ((b + self.first_batch) * Hq for b in (batch.start, batch.stop))
        heads = torch.arange(first, last, device=device)[:, None, None]
        words = philox(
            (j_blocks, i_blocks, heads & _LOW32, offset & _LOW32), (seed & _LOW32, (seed >> 32) & _LOW32)
        )
        t, f = thresholds(self.p)
        mixed = words[0] ^ words[1] ^ words[2] ^ words[3]
        limit = (t + (mixed < f)).to(torch.int16)
        # Bytes in 16-bit lanes: (i0, word: i3 j3, heads, i >> 4 i2 i1, j >> 4 j2 j1 j0), little-endian.
        as_int32 = torch.stack(words).to(torch.int32)
        lanes = torch.stack((as_int32 & 0x00FF00FF, (as_int32 >> 8) & 0x00FF00FF)).view(torch.int16)
        kept = lanes >= limit.repeat_interleave(2, -1)
        # Eight keys that differ only in j2, j1, j0 lie side by side, and move as one.
        i_tiles, j_tiles = i_blocks.shape[0] // 4, j_blocks.shape[0] // 4
        eights = kept.flatten().view(torch.int64).view(2, 2, 2, heads.shape[0], i_tiles, 4, j_tiles)
        # (heads, i >> 4, i3, i2 i1, i0, j >> 4, j3)
        eights = eights.permute(3, 4, 1, 5, 0, 6, 2).flatten()
        kept = eights.view(torch.bool).view(len(batch), Hq, BLOCK * i_tiles, BLOCK * j_tiles)
        i0, j0 = rows.start % BLOCK, keys.start % BLOCK
        return kept[:, :, i0 : i0 + len(rows), j0 : j0 + len(keys)]


def _block_ids(span: range, device: torch.device) -> Tensor:
    """The counter words of the aligned tiles that hold `span`: four per 16 positions."""
    return torch.arange(span.start // BLOCK * 4, (span.stop + BLOCK - 1) // BLOCK * 4, device=device)
