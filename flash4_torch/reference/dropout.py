"""The dropout mask of attention weights: a pure function of (seed, offset, b, h, i, j).

So the mask does not depend on tiling, device or direction, and the backward recomputes it instead of loading
it.

The generator is Philox 4x32 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with
7 rounds, the fewest that pass BigCrush. One call turns a 128-bit counter into four words of 32 bits: the
upper halves of 32 numbers from 0 to 255, one for each of 32 weights. The lower halves are mixed from the same
words. They matter to a weight only if the upper half of its number equals p's, which happens once in 16.

The mapping, fixed for every kernel
-----------------------------------
Write i = ... i4 i3 i2 i1 i0 in bits, and j likewise. The 32 weights of a call are those that differ only in
the bits i3, i1, i0, j3, j0::

    counter = (j >> 4 : j2 j1,  i >> 4 : i2,  b * Hq + h,  offset)     key = (seed low, seed high)
    y0 .. y4 = w1 <<< 12,  w2 <<< 3,  w3 <<< 19,  w0 <<< 24,  w1 <<< 8
    m0 .. m3 = (w0 ^ y0 ^ y1,  w1 ^ y1 ^ y2,  w2 ^ y2 ^ y3,  w3 ^ y3 ^ y4) <<< 16
    number   = bit e of each of m0 .. m3, w0 .. w3, m0's counting 1, w3's 128;   e = i1 i0 j0 j3 i3 in binary

(`x >> 4 : x2 x1` is `(x >> 4) * 4 + 2 * x2 + x1`, and `<<<` rotates a word to the left.) A number alone would
quantise p to 1/256. So let p * 256 = t + f with an integer t, and x = y0 ^ y1 ^ y2: a weight is dropped if
`number < t + (x < f * 2**32)`. Each weight is dropped with probability exactly p, to 40 bits, for three
instructions per 32 weights, which share x.

Guarantees
----------
Assume that a call's words are 128 independent random bits. Everything derived from them is a sum modulo 2, so
matrix ranks decide independence, and a test counts them all. Independent are:

- any two and any three of the 32 numbers, and all sets of four except 216 of 35960,
- the upper halves of all 32 numbers,
- x together with any two numbers, and together with any three except 128 of 4960.

Beyond that, dependencies affect only weights whose upper half ties (through the lower half), and those whose
whole number is t (through x).

How to compare
--------------
The words need not be unpacked. Go through the bits from the lowest: the part of a number compared so far is
less than that of t (plus 1 where x < f * 2**32) if at least two of three hold: the number's bit is 0, t's bit
is 1, it was less before this bit. That is one GPU instruction for one bit of 32 numbers. The lower halves'
result is rotated once, instead of each mixed word.

The choice of the 32 weights follows from the fragment that one GPU thread holds:

- wgmma accumulator, forward: rows r and r + 8 (i3), pairs of columns (j0), eight apart (j3 and up); the lane
  fixes the rest. A thread holds 8 of the 32, one byte of the result, which its lane's i1 and i0 select.
- the same accumulator of the transposed MMA (rows are keys, as in the backward): i0, i3 and j3 vary in the
  thread. It again holds 8 of the 32: half a byte for each i0, selected by its lane's i1 and j0.
- the 32 weights lie in an aligned 16 x 16 tile, the smallest tile of either MMA.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import forks
from . import lanes
from .host import constant

ROUNDS = 7
BLOCK = 16
"""Side of the aligned tiles of (i, j): a call of the generator stays inside one."""
PLANES = 8
"""Bits of the number that decides on a weight."""
ROTATIONS = (12, 3, 19, 24, 8)
"""Left rotations that turn w(k+1) into yk."""
TURN = 16
"""Left rotation that turns the mixed words into the lower halves."""

STATE = 2
"""Numbers of a state, seed and offset, of a call that is no part of a larger one."""

_LOW32 = 0xFFFFFFFF
_SIGN = -(2**31)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

_LANES = lanes.Lanes(_MULTIPLIERS, _WEYL, ROUNDS, ROTATIONS, TURN)

_SMALL = 1 << 22
"""Weights of a call whose mask is remembered, a byte each."""


class _Masks:
    """The masks of the last small calls on a CPU: at most `COUNT`, and `WEIGHTS` in all."""

    COUNT = 256
    WEIGHTS = 1 << 25

    def __init__(self) -> None:
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._weights = 0
        self._lock = forks.Lock()

    def of(self, call: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        """The mask of a call, made now if it is not among them."""
        mask = self._masks.get(call)
        if mask is None:
            mask = make()
            with self._lock.held():
                if call not in self._masks:
                    self._masks[call] = mask
                    self._weights += mask.numel()
                while len(self._masks) > self.COUNT or self._weights > self.WEIGHTS:
                    self._weights -= self._masks.pop(next(iter(self._masks))).numel()
        return mask


_masks = _Masks()


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32: four words from four counter words and two key words.

    All words are int64 tensors that hold 32-bit values; they broadcast, so words that vary along few
    dimensions stay small through the first rounds.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The product of two 32-bit words wraps in int64, but its 64 bits are right. The bits of x1 and x3
        # above 32 are masked off where they are used.
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = ((p1 >> 32) ^ x1 ^ k0) & _LOW32, p1
        x2, x3 = ((p0 >> 32) ^ x3 ^ k1) & _LOW32, p0
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return x0, x1 & _LOW32, x2, x3 & _LOW32


def thresholds(p: float) -> tuple[int, int]:
    """p as two integers (t, f): p = (t + f / 2**32) / 256, to 40 bits."""
    return divmod(round(p * 2**40), 2**32)


def keeps_some(p: float) -> bool:
    """Whether any weight can be kept: not with 1, nor with what rounds to it in 40 bits."""
    return round(p * 2**40) < 2**40


def scale(p: float) -> float:
    """Factor on kept weights, 1 / (1 - p); 0 when nothing is kept."""
    return 1.0 / (1.0 - p) if keeps_some(p) else 0.0


class Dropout(NamedTuple):
    """Dropout of one call: probability p, and the int64 pair (seed, offset) as a device tensor.

    `first_batch` is added to batch indices: each sequence of a varlen call counts as a batch entry. A state
    of seven numbers says that the call is a part of a larger one: (seed, offset, first row, first key, h, H,
    Hq). Its head 0 of batch entry 0 then has index h there, where batch entries have H heads; Hq is for
    kernels.
    """

    rng_state: Tensor
    p: float
    first_batch: int = 0

    @property
    def scale(self) -> float:
        """Factor on kept weights, 1 / (1 - p); 0 when nothing is kept."""
        return scale(self.p)

    def keep(self, batch: range, Hq: int, rows: range, keys: range) -> Tensor:
        """The mask, bool (len(batch), Hq, len(rows), len(keys)), True where the weight is kept."""
        first_row, first_key, first_head, heads_each = self._origin(Hq)
        rows, keys = _moved(rows, first_row), _moved(keys, first_key)
        i_words, j_words = _counter_words(rows, 2), _counter_words(keys, 4)
        count = len(batch) * Hq * len(i_words) * len(j_words)
        if self.rng_state.device.type == "cpu" and 0 < count <= lanes.MOST:
            entries = [entry + self.first_batch for entry in batch]
            heads = tuple([e * heads_each + h for e in entries for h in range(first_head, first_head + Hq)])
            seed, offset = self.rng_state[:STATE].tolist()
            counters = lanes.counters(heads, i_words, j_words)
            kept = _keep_lanes(counters, (seed, offset), self.p)
            words = lanes.words(kept, counters.num_bytes)
            bits = torch.frombuffer(words, dtype=torch.int64).to(torch.int32)
            bits = bits.view(len(heads), len(i_words), len(j_words))
        else:
            bits = self._keep_bits(batch, Hq, i_words, j_words, first_head, heads_each)
        in_place = _in_place(bits).view(
            len(batch), Hq, BLOCK * (len(i_words) // 2), BLOCK * (len(j_words) // 4)
        )
        i0, j0 = rows.start % BLOCK, keys.start % BLOCK
        return in_place[:, :, i0 : i0 + len(rows), j0 : j0 + len(keys)]

    def keep_all(self, B: int, Hq: int, Sq: int, Sk: int) -> Tensor:
        """`keep` of all rows and keys, contiguous, as bytes, which multiply several times faster."""
        few = None if self.first_batch else _Few.of(B * Hq, Sq, Sk)
        if few is not None and self.rng_state.is_cpu:
            state = self.rng_state.tolist()
            if len(state) == STATE:
                return few.kept(state, self.p).view(B, Hq, Sq, Sk)
        return self.keep(range(B), Hq, range(Sq), range(Sk)).contiguous().view(torch.uint8)

    def _keep_bits(
        self, batch: range, Hq: int, i_words: range, j_words: range, first_head: int, heads_each: int
    ) -> Tensor:
        """Keep bits as in `_compare`."""
        device = self.rng_state.device
        seed, offset = self.rng_state[0], self.rng_state[1]
        i, j = (torch.arange(words.start, words.stop, device=device) for words in (i_words, j_words))
        entries = torch.arange(batch.start, batch.stop, device=device)[:, None] + self.first_batch
        heads = entries * heads_each + torch.arange(first_head, first_head + Hq, device=device)
        heads = heads.flatten()[:, None, None]
        words = philox(
            (j, i[:, None], heads & _LOW32, offset & _LOW32), (seed & _LOW32, (seed >> 32) & _LOW32)
        )
        return self._compare(words)

    def _origin(self, Hq: int) -> tuple[int, int, int, int]:
        """First row, first key, first head, and heads of a batch entry."""
        if len(self.rng_state) == STATE:
            return 0, 0, 0, Hq
        first_row, first_key, first_head, heads, _ = self.rng_state[2:].tolist()
        return first_row, first_key, first_head, heads

    def factors(self, keep: Tensor, dtype: torch.dtype) -> Tensor:
        """What a mask multiplies weights by: `scale` or 0."""
        # Bytes convert to floats several times faster than booleans do.
        return keep.view(torch.uint8).to(dtype).mul_(self.scale)

    def tile(self, sizes: tuple[int, int, int, int], batch: range, rows: range, keys: range) -> Tensor:
        """`keep` of a tile, all heads, of a call whose B, Hq, Sq and Sk are `sizes`.

        A small call's mask on a CPU is made whole and remembered: the backward asks for it again.
        """
        if self.rng_state.device.type != "cpu" or math.prod(sizes) > _SMALL:
            return self.keep(batch, sizes[1], rows, keys)
        call = (*self.rng_state.tolist(), self.p, self.first_batch, *sizes)
        whole = _masks.of(call, lambda: self.keep_all(*sizes).view(torch.bool))
        return whole[batch.start : batch.stop, :, rows.start : rows.stop, keys.start : keys.stop]

    def _compare(self, words: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """Keep bits, int32 (heads, i >> 4 : i2, j >> 4 : j2 j1): bit e says whether weight e is kept."""
        t, f = thresholds(self.p)
        high = [word.to(torch.int32) for word in words]
        turned = [_rotate(high[(k + 1) % 4], by) for k, by in enumerate(ROTATIONS)]
        # The words are unsigned, torch's integers are not: the top bit is inverted on both sides.
        x = turned[0] ^ turned[1] ^ turned[2] ^ _SIGN
        kept = (x >= f + _SIGN).to(torch.int32).neg_()
        for k in range(4):
            kept = _compare_bit(kept, high[k] ^ turned[k] ^ turned[k + 1], t >> k & 1)
        kept = _rotate(kept, TURN)
        for k in range(4):
            kept = _compare_bit(kept, high[k], t >> 4 + k & 1)
        return kept if keeps_some(self.p) else kept.zero_()


def _keep_lanes(counters: lanes.Counters, state: Sequence[int], p: float) -> int:
    """Keep bits as in `lanes`, none set where nothing is kept."""
    return _LANES.keep(counters, state, thresholds(p)) if keeps_some(p) else 0


class _Few(NamedTuple):
    """What is known of all masks of few words and one size: where each weight's bit is."""

    counters: lanes.Counters
    place: Tensor
    """The index of each weight in `lanes.bits`."""

    @staticmethod
    @lru_cache(maxsize=64)
    def of(heads: int, Sq: int, Sk: int) -> _Few | None:
        """None if the words are not few. heads: those of all batch entries."""
        i_words, j_words = _counter_words(range(Sq), 2), _counter_words(range(Sk), 4)
        shape = heads, len(i_words), len(j_words)
        if not 0 < math.prod(shape) <= _FEW:
            return None

        def numbers(words_of: list[Tensor]) -> Tensor:
            """A number for each weight, given words whose bits are its bits, the lowest first."""
            bits = [_in_place(words).view(heads, BLOCK * (shape[1] // 2), -1) for words in words_of]
            whole = sum(bit.long() << k for k, bit in enumerate(bits))
            return torch.as_tensor(whole)[:, :Sq, :Sk].flatten()

        every = torch.arange(math.prod(shape), dtype=torch.int32, device="cpu").view(shape)
        word = numbers([-(every >> k & 1) for k in range(_FEW.bit_length())])
        of_bit = [sum(1 << e for e in range(32) if e >> k & 1) for k in range(5)]
        bit = numbers([torch.full_like(every, x - (x >> 31 << 32)) for x in of_bit])
        counters = lanes.counters(tuple(range(heads)), i_words, j_words)
        num_words = math.prod(shape)
        return _Few(
            counters, bit % 8 * counters.num_bytes + word * (counters.num_bytes // num_words) + bit // 8
        )

    def kept(self, state: list[int], p: float) -> Tensor:
        """The mask as bytes, in one dimension."""
        kept = _keep_lanes(self.counters, state, p)
        bits = torch.frombuffer(lanes.bits(kept, self.counters.num_bytes), dtype=torch.uint8)
        return bits.index_select(0, self.place)


def keep_each(rng_state: Tensor, p: float, B: int, Hq: int, Sq: int, Sk: int) -> Tensor:
    """The whole mask, bool (B, Hq, Sq, Sk), for graphs that fuse it with what uses it.

    Nothing is done in place, and sizes may be symbolic. On a GPU each weight has a call of the generator for
    itself, on a CPU 32 share one. rng_state: int64 (2,), of a call that is no part of a larger one.
    """
    device = rng_state.device
    if not keeps_some(p):
        return torch.zeros(B, Hq, Sq, Sk, dtype=torch.bool, device=device)
    # The indices of a CPU are as wide as the words that it reads.
    index = torch.int32 if device.type == "cpu" else torch.int64
    i, j = (torch.arange(n, dtype=index, device=device) for n in (Sq, Sk))
    i, heads = i[:, None], torch.arange(B * Hq, device=device)
    if device.type == "cpu":
        bits = _spread_bits(rng_state, p, heads, Sq, Sk).view(B, Hq, Sq, Sk)
    else:
        # What is computed once for rows alone would be a kernel for itself, whose launch takes longer.
        i, j, heads = torch.broadcast_tensors(i, j, heads.view(B, Hq, 1, 1))
        # A mask of bits keeps torch's compiler from multiplying an index in 32 bits.
        words = (j >> 4 << 2) | (j >> 1 & 3), (i >> 4 << 1) | (i >> 2 & 1)
        bits = _bits_of_words(rng_state, p, *words, heads)
    place = ((i & 3) << 3) | ((j & 1) << 2) | ((j >> 3 & 1) << 1) | (i >> 3 & 1)
    return (bits >> place & 1) != 0


def _spread_bits(rng_state: Tensor, p: float, heads: Tensor, Sq: int, Sk: int) -> Tensor:
    """The int32 word of keep bits that each weight reads its own from, (heads, Sq, Sk)."""
    rows, columns = (Sq + BLOCK - 1) // BLOCK, (Sk + BLOCK - 1) // BLOCK
    i, j = (torch.arange(n, device=heads.device) for n in (rows * 2, columns * 4))
    bits = _bits_of_words(rng_state, p, j, i[:, None], heads[:, None, None]).to(torch.int32)
    # A strided view is of memory: a graph makes each word once, and not for each of its weights.
    bits = bits.as_strided(bits.shape, bits.stride()).view(-1, rows, 1, 2, 1, columns, 1, 4, 1)
    spread = bits.expand(-1, -1, 2, -1, 4, -1, 2, -1, 2)
    return spread.reshape(-1, rows * BLOCK, columns * BLOCK)[:, :Sq, :Sk]


def _bits_of_words(rng_state: Tensor, p: float, j: Tensor, i: Tensor, heads: Tensor) -> Tensor:
    """Keep bits as in `Dropout._compare`, the lower 32 of int64, of counter words that broadcast."""
    seed, offset = rng_state[0], rng_state[1] & _LOW32
    words = philox((j, i, heads & _LOW32, offset), (seed & _LOW32, (seed >> 32) & _LOW32))
    turned = [_rotate_left(words[(k + 1) % 4], by) for k, by in enumerate(ROTATIONS)]
    t, f = thresholds(p)
    kept = -((turned[0] ^ turned[1] ^ turned[2]) >= f).long()
    low = [_rotate_left(words[k] ^ turned[k] ^ turned[k + 1], TURN) for k in range(4)]
    for k, plane in enumerate((*low, *words)):
        kept = kept & plane if t >> k & 1 else kept | plane
    return kept


def _rotate_left(word: Tensor, by: int) -> Tensor:
    """The 32 bits in an int64, rotated to the left."""
    return (word << by | word >> 32 - by) & _LOW32


def _compare_bit(kept: Tensor, plane: Tensor, bit: int) -> Tensor:
    """The majority of the plane, t's bit inverted, and the lower bits' result; in place."""
    return kept.bitwise_and_(plane) if bit else kept.bitwise_or_(plane)


def _rotate(word: Tensor, by: int) -> Tensor:
    """The int32 words, rotated to the left."""
    return (word << by).bitwise_or_((word >> 32 - by).bitwise_and_((1 << by) - 1))


def _in_place(kept: Tensor) -> Tensor:
    """The bits of (heads, i >> 4 : i2, j >> 4 : j2 j1) words as bools in the order (heads, i, j)."""
    heads, rows, columns = kept.shape
    if heads * rows * columns <= _FEW and kept.device.type == "cpu":
        return (kept.view(heads, rows // 2, 1, 2, 1, 1, columns // 4, 1, 2, 2, 1) & _EACH_BIT).bool()
    # Words of 16 bits i0 j0 j3 i3; four of them, which differ in j2 and j1, make one word: little-endian.
    halves = kept.view(torch.int16).view(heads, rows, columns, 2).transpose(2, 3)
    fours = halves.flatten().view(torch.int64)
    # j0 before i0: eight weights that differ in j2, j1, j0 are then bits of different bytes, in order.
    moved = (fours ^ (fours >> 4)) & 0x00F000F000F000F0
    fours ^= moved | (moved << 4)
    fours = fours.view(heads, rows // 2, 2, 2, columns // 4, 1, 1, 1)
    shifts = torch.arange(8, device=kept.device).view(2, 2, 2)
    eights = torch.empty(heads, rows // 2, 2, 2, 2, 2, columns // 4, 2, dtype=torch.int64, device=kept.device)
    # (heads, i >> 4, i3, i2, i1, i0, j >> 4, j3) from (heads, i >> 4, i2, i1, j >> 4, i0, j3, i3)
    torch.bitwise_right_shift(fours, shifts, out=eights.permute(0, 1, 3, 4, 6, 5, 7, 2))
    eights &= 0x0101010101010101
    return eights.view(torch.bool)


def _each_bit() -> Tensor:
    """The words in which one weight alone is 1, in the order (i3, i2, i1, i0, j >> 4, j3, j2, j1, j0)."""
    places = [
        (i1 << 4) + (i0 << 3) + (j0 << 2) + (j3 << 1) + i3
        for i3, i1, i0, j3, j0 in itertools.product(range(2), repeat=5)
    ]
    words = [(1 << place) - (place == 31) * 2**32 for place in places]
    return constant(words, torch.int32, (2, 1, 2, 2, 1, 2, 1, 1, 2))


_FEW = 64
"""Words whose bits are faster taken one by one."""
_EACH_BIT = _each_bit()


def _moved(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def _counter_words(span: range, each: int) -> range:
    """Counter words of the aligned tiles that cover `span`, `each` per tile."""
    return range(span.start // BLOCK * each, (span.stop + BLOCK - 1) // BLOCK * each)
