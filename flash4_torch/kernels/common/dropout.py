"""Dropout in the kernels: the mask of `reference.dropout`, whose docstring fixes the mapping, bit for bit.

A tile of attention weights lies in a wgmma accumulator: lane l of a warp holds rows l // 4 and l // 4 + 8 of
the warp's 16, and columns 2 (l % 4) + 8 j + (0, 1). RNG warps, which have nothing else to do, generate the
keep bits for the warps that hold the weights: eight lanes for a strip of 16 rows and 32 columns. Each makes
two words, whose bits belong to four other lanes, and leaves them in shared memory such that one ldmatrix
brings every lane its own.

    dropout = load(rng_state, params.drop_byte, params.drop_fraction)   once per thread that generates
    rows = QueryRows.at(dropout, row, head, lane)                   for 16 rows of queries
    rows.generate(key, strip, keep_bits)                            keep_bits (32, words(N)) in shared memory
    QueryRows.drop(weights, take(keep_bits, lane))                  by the lane that holds the weights

A warp that generates for itself may have less than four strips. Then sixteen lanes share a strip, so that no
lane is idle, and each makes one of the two words (`generate_shared`). `passes` says which lanes do what.

In TMEM a lane is a row. A lane that holds 64 queries of one key makes two words and exchanges them with three
others, which takes less than leaving the numbers to RNG warps:

    row = KeyLane.at(dropout, key, head, lane)                      for a key
    KeyLane.drop(weights, row.keep_bits(query))                     of 32 or 64 queries
    row = QueryLane.at(dropout, query, head, lane)                  for a query
    QueryLane.drop(weights, row.keep_bits(key))                     of 32 keys

Weights are only zeroed; 1 / (1 - p) belongs into a factor that is applied anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import nvvm

from ...configs.types import Features
from . import host

ROUNDS = 7
BLOCK = 16
"""Side of aligned tiles: a call of Philox stays inside one."""
PLANES = 8
"""Bits of the number that decides on a weight."""
ROTATIONS = (12, 3, 19, 24, 8)
"""Left rotations of the words from which the lower halves of numbers are mixed."""
TURN = 16
"""Left rotation from where lower halves are mixed to the weights that they decide on."""
STRIP = 2 * BLOCK
"""Columns of a strip."""
_STRIP_PAIRS = STRIP // 4
"""A lane's pairs of adjacent columns in a strip, of both of its rows."""
STRIP_LANES = 8
"""Neighbouring lanes that generate one strip."""
WARP_STRIPS = 32 // STRIP_LANES
"""Strips that a warp generates at a time."""

SHARED_LANES = 2 * STRIP_LANES
"""Neighbouring lanes that generate one strip together."""

Words = tuple[Uint32, Uint32, Uint32, Uint32]

STATE = 2
"""Numbers of a state: seed and offset."""
STATE_OF_PART = 7
"""Numbers of a state of a call that is a part of a larger one: also the first row and key, multiples of
`BLOCK`, the first head, the heads of a batch entry of the larger one, and those of the call."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MAJORITY = 0xE8  # lop3 table: the majority of three bits
_SUM = 0x96  # lop3 table: the sum of three bits, modulo 2
_CHOICE = 0xCA  # lop3 table: the second or the third bit, chosen by the first
_LOW_HALVES = 0x0F0F0F0F
"""Lower halves of bytes."""
_EVEN_BITS = 0x55555555
_OWN_HALVES, _HALVES_BELOW = 0xF0F00F0F, 0x0000F0F0
"""Lower halves of the lower bytes and upper ones of the upper bytes; and upper halves of the lower bytes."""
_LOW_PAIRS = 0x03030303
"""Lowest pairs of bits in bytes."""
_SIGN = 8
"""Added to a byte's index in a prmt selector: its top bit, eight times."""
_MATRIX = 2 * STRIP
"""Columns whose bits are a matrix, 8 rows of 16 bytes, of which an ldmatrix brings every lane a word."""


class Origin(NamedTuple):
    """Position of a call in a larger one, added to Philox's counters."""

    keys: Uint32
    queries: Uint32
    first_head: Uint32
    heads: Uint32
    """Heads of the call."""
    other_heads: Uint32
    """Heads that a batch entry of the larger call has besides."""

    def head(self, head: Uint32) -> Uint32:
        """b * heads + h of the larger call, from that of this one."""
        return head + head // self.heads * self.other_heads + self.first_head


class Dropout(NamedTuple):
    """Numbers that all weights of a call share."""

    keys: tuple[tuple[Uint32, Uint32], ...]
    """Philox keys of each round."""
    offset: Uint32
    fraction: Uint32
    limit: tuple[Uint32, ...]
    """Inverted bits of t, from the lowest on, each of them 32 times; all 0 for t = 256."""
    some: Uint32
    """All ones, but 0 for t = 256, where nothing is kept."""
    origin: Origin | None = None

    def keep_bits(self, keys: Uint32, queries: Uint32, head: Uint32) -> Uint32:
        """A bit for each of 32 weights: whether it is kept."""
        words = self.words(keys, queries, head)
        turned = [_rotate(words[(k + 1) % 4], by) for k, by in enumerate(ROTATIONS)]
        carry = cute.arch.lop3(turned[0], turned[1], turned[2], _SUM)
        keep_bits = Uint32(cutlass.select_(carry < self.fraction, Uint32(0), self.some))
        for k, limit in enumerate(self.limit[:4]):
            low = cute.arch.lop3(words[k], turned[k], turned[k + 1], _SUM)
            keep_bits = cute.arch.lop3(low, limit, keep_bits, _MAJORITY)
        keep_bits = _rotate(keep_bits, TURN)
        for word, limit in zip(words, self.limit[4:], strict=True):
            keep_bits = cute.arch.lop3(word, limit, keep_bits, _MAJORITY)
        return keep_bits

    def words(self, keys: Uint32, queries: Uint32, head: Uint32) -> Words:
        """One call of Philox, 16 bytes; its counter is made of j, of i, of b * Hq + h, and of the offset."""
        x0, x1, x2, x3 = keys, queries, head, self.offset
        if self.origin is not None:
            x0, x1, x2 = x0 + self.origin.keys, x1 + self.origin.queries, self.origin.head(x2)
        for k0, k1 in self.keys:
            high0, low0 = _product(x0, _MULTIPLIERS[0])
            high1, low1 = _product(x2, _MULTIPLIERS[1])
            # Operands that are the same in all calls of a loop are combined first, outside of it.
            x0, x1, x2, x3 = high1 ^ (x1 ^ k0), low1, high0 ^ (x3 ^ k1), low0
        return x0, x1, x2, x3

    def with_keys_anew(self) -> Dropout:
        """The same, whose keys are computed anew: kept from block to block they take a register each
        (ptxas.md, P17).
        """
        return self._replace(keys=_round_keys(*(_hidden(key) for key in self.keys[0])))


def _round_keys(k0: Uint32, k1: Uint32) -> tuple[tuple[Uint32, Uint32], ...]:
    return tuple(
        (k0 + Uint32(r * _WEYL[0] % 2**32), k1 + Uint32(r * _WEYL[1] % 2**32)) for r in range(ROUNDS)
    )


def _hidden(word: Uint32) -> Uint32:
    """The same word, though LLVM does not know that it is."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[word])


@cute.jit
def load(rng_state: cute.Tensor, byte: Uint32, fraction: Uint32) -> Dropout:
    """The state of a call.

    rng_state: int64, (2,) or that of a part, (7,). byte, fraction: `thresholds(p)` of the reference.
    """
    k0, k1, offset = (_uniform(Uint32(word)) for word in (rng_state[0], rng_state[0] >> 32, rng_state[1]))
    keys = _round_keys(k0, k1)
    some = (_uniform(byte) >> PLANES) - 1
    limit = tuple((byte >> k & 1) - 1 & some for k in range(PLANES))
    origin = None
    if cutlass.const_expr(cute.size(rng_state) == STATE_OF_PART):
        row, key, first_head, every, heads = (_uniform(Uint32(rng_state[n])) for n in range(2, STATE_OF_PART))
        origin = Origin(key >> 2, row >> 3, first_head, heads, every - heads)
    return Dropout(keys, offset, fraction, limit, some, origin)


def example_state(features: Features) -> Any:
    """What the launchers are compiled for; None without dropout."""
    if not features.dropout:
        return None
    return host.compact(Int64, (STATE_OF_PART if features.dropout_of_part else STATE,))


def words(N: int) -> int:
    """Number of 32-bit words that hold a lane's keep bits, for N columns."""
    return -(-N // _MATRIX)


def strips(N: int) -> int:
    """Number of strips in N columns; the last one may be half used."""
    return -(-N // STRIP)


def passes(strips: int, may_share: bool = True) -> Iterator[tuple[int, int]]:
    """How a warp generates its strips: for each pass the first strip, and the lanes that have one.

    may_share: lanes may share a strip.
    """
    done = 0
    while done < strips:
        lanes = SHARED_LANES if may_share and strips - done <= 32 // SHARED_LANES else STRIP_LANES
        yield done, lanes
        done += 32 // lanes


def take(keep_bits: cute.Tensor, lane: Int32) -> cute.Tensor:
    """A lane's words of `keep_bits`, (32, words(N)) in shared memory, loaded to registers."""
    count = cute.size(keep_bits, mode=[1])
    taken = cute.make_rmem_tensor(count, Uint32)
    for n in range(count):
        row = keep_bits[None, n].iterator + lane % 8 * 4
        word = nvvm.ldmatrix(row.llvm_ptr, 1, nvvm.MMALayout.col, results=[Uint32.mlir_type])
        taken[n] = Uint32(word)
    return taken


class QueryRows(NamedTuple):
    """16 rows of queries that a lane generates for, or its share of them; columns are keys.

    Of every block of 16 columns its share are the weights with its own i2, j2 and j1.
    """

    dropout: Dropout
    block: Uint32
    """The rows' part of Philox's counter."""
    head: Uint32
    half: Uint32
    """i2"""
    quarter: Uint32
    """2 * j2 + j1"""

    @classmethod
    def at(cls, dropout: Dropout, row: Int32, head: Int32, lane: Int32) -> QueryRows:
        """row: the first row, a multiple of 16. head: b * Hq + h; for varlen b counts sequences."""
        quarter, half = Uint32(lane) % 4, Uint32(lane) // 4 % 2
        return cls(dropout, (Uint32(row) >> 3) + half, Uint32(head), half, quarter)

    def generate(
        self, column: Int32, strip: Uint32, keep_bits: cute.Tensor, place: Uint32 | None = None
    ) -> None:
        """Generate a strip, the `strip`-th of the tile whose first column is `column`, a multiple of 16.

        place: where it lies in `keep_bits`, if tiles lie side by side.
        """
        place = strip if place is None else place
        first = (Uint32(column) >> 2) + 8 * strip + self.quarter
        even, odd = (self.dropout.keep_bits(first + 4 * n, self.block, self.head) for n in range(2))
        # 16-bit numbers, a byte of each block, for the lanes with i1 i0 = 0, 1 and 2, 3.
        low, high = (_permute(even, odd, Uint32(_selector(s))) for s in ((0, 4, 1, 5), (2, 6, 3, 7)))
        pairs = cute.make_tensor(
            cute.recast_ptr(keep_bits.iterator, dtype=Uint64), cute.make_layout((2, 2, 4, 4))
        )
        pairs[self.half, place % 2, self.quarter, place // 2] = Uint64(high) << 32 | Uint64(low)

    @cute.jit
    def generate_shared(
        self,
        column: Int32,
        strip: Uint32,
        keep_bits: cute.Tensor,
        place: Uint32,
        lane: Int32,
        is_wanted: Boolean,
    ) -> None:
        """`generate` by all lanes of a warp, sixteen to a strip; those whose strip is wanted store it."""
        second = Uint32(lane) // STRIP_LANES % 2
        first = (Uint32(column) >> 2) + 8 * strip + self.quarter
        own, other = self._exchanged(first + 4 * second, self.block)
        even, odd = Uint32(_selector((0, 4, 1, 5))), Uint32(_selector((6, 2, 7, 3)))
        word = _permute(own, other, cutlass.select_(second == 0, even, odd))
        words = cute.make_tensor(keep_bits.iterator, cute.make_layout((2, 2, 2, 4, 4)))
        if is_wanted:
            words[second, self.half, place % 2, self.quarter, place // 2] = word

    def _exchanged(self, keys: Uint32, queries: Uint32) -> tuple[Uint32, Uint32]:
        """The lane's word, and that of the lane with which it shares a strip."""
        own = self.dropout.keep_bits(keys, queries, self.head)
        return own, cute.arch.shuffle_sync_bfly(own, STRIP_LANES)

    @staticmethod
    def place(pair: int, column: int) -> tuple[int, int, int]:
        """Word, byte and bit of the weight in `column`, 0 or 1, of the lane's `pair` of adjacent columns."""
        block, inside = divmod(pair, 4)
        word, byte = divmod(block, 4)
        return word, byte, 4 * column + inside

    @classmethod
    def negate(cls, weights: cute.Tensor, keep_bits: cute.Tensor) -> None:
        """Set the sign of what is not kept of a lane's N / 2 float32 numbers, in the order of `drop`."""
        count = cute.size(weights)
        targets = cute.make_tensor(cute.recast_ptr(weights.iterator, dtype=Uint32), cute.make_layout(count))
        for i in range(count):
            word, byte, bit = cls.place(i // 2, i % 2)
            taken = ~(keep_bits[word] << (31 - 8 * byte - bit))
            targets[i] = targets[i] | (taken & Uint32(1 << 31))

    @classmethod
    def drop(cls, weights: cute.Tensor, keep_bits: cute.Tensor, strip: int = 0) -> None:
        """Zero what is not kept of a lane's N / 2 numbers of 16 or 32 bits, a flat register tensor.

        Numbers are in the accumulator's order: two columns of two rows of each 8 columns. keep_bits: what
        `take` returned. strip: the place of their first strip in it.
        """
        together = 32 // weights.element_type.width
        count = cute.size(weights) // together
        targets = cute.make_tensor(cute.recast_ptr(weights.iterator, dtype=Uint32), cute.make_layout(count))
        for i in range(count):
            pair, columns = (i, (0, 1)) if together == 2 else (i // 2, (i % 2,) * 2)
            places = [cls.place(strip * _STRIP_PAIRS + pair, column) for column in columns]
            # Each bit becomes the top one of its byte, which prmt then repeats over half of the target.
            flags = (keep_bits[word] << (7 - bit) for word, _, bit in places)
            first, second = (byte | _SIGN for _, byte, _ in places)
            selector = _selector((first, first, 4 + second, 4 + second))
            targets[i] = targets[i] & _permute(*flags, Uint32(selector))

    @classmethod
    def select(cls, numbers: cute.Tensor, keep_bits: cute.Tensor, strip: int = 0) -> None:
        """`drop` for float32 numbers, in the order of their bits: ptxas tests eight at a time (R2P)."""
        for word, bit, i in cls._in_order(cute.size(numbers), strip):
            is_kept = (keep_bits[word] & Uint32(1 << bit)) != 0
            numbers[i] = cutlass.select_(is_kept, numbers[i], Float32(0.0))

    @classmethod
    def select_both(
        cls, numbers: cute.Tensor, others: cute.Tensor, keep_bits: cute.Tensor, strip: int = 0
    ) -> None:
        """`select` for the numbers, and the same for the others, which are finite: they become 0 or -0.

        A bit is tested once for both. The others are multiplied, since a selection takes the ALU, whose lanes
        are half as many as those of the FMA pipe.
        """
        for word, bit, i in cls._in_order(cute.size(numbers), strip):
            numbers[i], others[i] = cute.arch.inline_ptx(
                f"{{ .reg .pred kept; .reg .b32 bit; and.b32 bit, {{$r0}}, {1 << bit};"
                " setp.ne.u32 kept, bit, 0;"
                " selp.f32 {$w0}, {$r1}, 0f00000000, kept;"
                " mov.f32 {$w1}, {$r2}; @!kept mul.f32 {$w1}, {$r2}, 0f00000000; }",
                write_only_types=[Float32, Float32],
                read_only_args=[keep_bits[word], numbers[i], others[i]],
            )

    @classmethod
    def _in_order(cls, count: int, strip: int) -> list[tuple[int, int, int]]:
        """Word, bit and place of so many numbers, in the order of their bits."""
        places = (cls.place(strip * _STRIP_PAIRS + i // 2, i % 2) for i in range(count))
        return sorted((word, 8 * byte + bit, i) for i, (word, byte, bit) in enumerate(places))


class KeyRows(QueryRows):
    """The transposed MMA: rows are keys, columns are queries."""

    @classmethod
    def at(cls, dropout: Dropout, row: Int32, head: Int32, lane: Int32) -> KeyRows:
        quarter, half = Uint32(lane) % 4, Uint32(lane) // 4 % 2
        return cls(dropout, (Uint32(row) >> 2) + quarter, Uint32(head), half, quarter)

    def generate(
        self, column: Int32, strip: Uint32, keep_bits: cute.Tensor, place: Uint32 | None = None
    ) -> None:
        place = strip if place is None else place
        first = (Uint32(column) >> 3) + 4 * strip + self.half
        even, odd = (self.dropout.keep_bits(self.block, first + 2 * n, self.head) for n in range(2))
        # 16-bit numbers, i0 and then the block, for i1 = 0, 1 and the lanes with j0 = 0 and with j0 = 1.
        low = cute.arch.lop3(Uint32(_LOW_HALVES), even, odd << 4, _CHOICE)
        high = cute.arch.lop3(Uint32(_LOW_HALVES), even >> 4, odd, _CHOICE)
        words = cute.make_tensor(keep_bits.iterator, cute.make_layout((4, 2, 2, 2, 4)))
        for i1, selector in enumerate(((0, 1, 4, 5), (2, 3, 6, 7))):
            both = _permute(low, high, Uint32(_selector(selector)))
            words[self.quarter, place % 2, i1, self.half, place // 2] = both

    @cute.jit
    def generate_shared(
        self,
        column: Int32,
        strip: Uint32,
        keep_bits: cute.Tensor,
        place: Uint32,
        lane: Int32,
        is_wanted: Boolean,
    ) -> None:
        i1 = Uint32(lane) // STRIP_LANES % 2
        own, other = self._exchanged(self.block, (Uint32(column) >> 3) + 4 * strip + self.half + 2 * i1)
        # Bytes with the lane's i1, of the first word and of the second one; then their halves as above.
        even, odd = Uint32(_selector((0, 1, 4, 5))), Uint32(_selector((6, 7, 2, 3)))
        both = _permute(own, other, cutlass.select_(i1 == 0, even, odd))
        moved = cute.arch.lop3(Uint32(_HALVES_BELOW), both >> 12, both << 12, _CHOICE)
        words = cute.make_tensor(keep_bits.iterator, cute.make_layout((4, 2, 2, 2, 4)))
        if is_wanted:
            word = cute.arch.lop3(Uint32(_OWN_HALVES), both, moved, _CHOICE)
            words[self.quarter, place % 2, i1, self.half, place // 2] = word

    @staticmethod
    def place(pair: int, column: int) -> tuple[int, int, int]:
        block, inside = divmod(pair, 4)
        word, block = divmod(block, 4)
        strip, turn = divmod(block, 2)
        i3, j3 = divmod(inside, 2)
        return word, 2 * strip + column, 4 * turn + 2 * j3 + i3


class KeyLane(NamedTuple):
    """The key that a lane has; the warp has 32 neighbouring ones, the first of them a multiple of 32.

    A call decides on weights of the four lanes with the same j2 and j1. Each of them makes the calls of one
    block of 16 queries out of four.
    """

    dropout: Dropout
    keys: Uint32
    """The key's part of Philox's counter."""
    head: Uint32
    lane: Int32

    @classmethod
    def at(cls, dropout: Dropout, key: Int32, head: Int32, lane: Int32) -> KeyLane:
        """head: b * Hq + h; for varlen b counts sequences."""
        return cls(dropout, Uint32(key >> 4 << 2 | key >> 1 & 3), Uint32(head), lane)

    def keep_bits(self, query: Int32) -> tuple[Uint32, Uint32]:
        """Keep bits of the 64 weights from a query on, a multiple of 64."""
        j3, j0 = self.lane >> 3 & 1, self.lane & 1
        first = Uint32((query >> 4) + 2 * j3 + j0) * 2
        own = [self.dropout.keep_bits(self.keys, first + i2, self.head) for i2 in range(2)]
        # Four bits of a byte, which stands for i1 and i0, for the four pairs of j0 and j3.
        shift = Uint32(4 * j0 + 2 * j3)
        found = [Uint32(0), Uint32(0)]
        for block in range(4):
            source = self.lane & ~9 | block >> 1 << 3 | block & 1
            for i2 in range(2):
                word = cute.arch.shuffle_sync(own[i2], source)
                place = 4 * (block % 2) + 2 * i2
                found[block // 2] |= (word >> shift & _LOW_PAIRS) << place
        return found[0], found[1]

    @staticmethod
    def place(query: int) -> tuple[int, int, int]:
        """Word, byte and bit of the weight of one of the 64 queries."""
        i0, i1, i2, i3, block = (query >> n & 1 for n in range(5))
        return query >> 5, 2 * i1 + i0, 4 * block + 2 * i2 + i3

    @classmethod
    def drop(cls, weights: cute.Tensor, keep_bits: tuple[Uint32, Uint32], first: int = 0) -> None:
        """Zero what is not kept of numbers of 16 or 32 bits, those of the queries from the `first` on."""
        each = 32 // weights.element_type.width
        count = cute.size(weights) // each
        targets = cute.make_tensor(cute.recast_ptr(weights.iterator, dtype=Uint32), cute.make_layout(count))
        for i in range(count):
            word, byte, bit = cls.place(first + each * i)
            last = byte + each - 1
            selector = Uint32(_selector((byte | _SIGN, byte | _SIGN, last | _SIGN, last | _SIGN)))
            # The bit becomes the top one of its byte, which prmt then repeats.
            flags = keep_bits[word] << (7 - bit)
            targets[i] = targets[i] & _permute(flags, flags, selector)


class QueryLane(NamedTuple):
    """The query that a lane has; the warp has 32 neighbouring ones, the first of them a multiple of 32.

    A call decides on weights of the eight lanes with the same i2. For 32 keys each of them makes one call,
    and keeps four bits of its own word and of each of the seven others'.
    """

    dropout: Dropout
    queries: Uint32
    """The query's part of Philox's counter."""
    head: Uint32
    lane: Int32

    @classmethod
    def at(cls, dropout: Dropout, query: Int32, head: Int32, lane: Int32) -> QueryLane:
        """head: b * Hq + h; for varlen b counts sequences."""
        return cls(dropout, Uint32(query >> 4 << 1 | query >> 2 & 1), Uint32(head), lane)

    def keep_bits(self, key: Int32) -> Uint32:
        """Keep bits of the 32 weights from a key on, a multiple of 32."""
        i0, i1, i3 = (self.lane >> n & 1 for n in (0, 1, 3))
        keys = Uint32(((key >> 4) + i3) * 4 + 2 * i1 + i0)
        word = self.dropout.keep_bits(keys, self.queries, self.head)
        # A bit's index in a word is made of i1, i0, j0, j3 and i3, from the highest one. Bits that are not
        # the lane's own are exchanged for bits of another lane's word that are; their part of the index then
        # tells whose word they come from.
        other = cute.arch.shuffle_sync_bfly(word, 2)
        word = _permute(word, other, Uint32(cutlass.select_(i1 == 0, Int32(0x5410), Int32(0x3276))))
        other = cute.arch.shuffle_sync_bfly(word, 1)
        word = _permute(word, other, Uint32(cutlass.select_(i0 == 0, Int32(0x6240), Int32(0x3715))))
        other = cute.arch.shuffle_sync_bfly(word, 8)
        turned = Uint32(cutlass.select_(i3 == 0, other << 1, other >> 1))
        own = Uint32(_EVEN_BITS) << Uint32(i3)
        return cute.arch.lop3(own, word, turned, _CHOICE)

    @staticmethod
    def place(key: int) -> tuple[int, int]:
        """Byte and bit of the weight of one of the 32 keys."""
        j0, j1, j2, j3, block = (key >> n & 1 for n in range(5))
        return 2 * j2 + j1, 4 * j0 + 2 * j3 + block

    @classmethod
    def drop(cls, weights: cute.Tensor, keep_bits: Uint32) -> None:
        """Zero what is not kept of the 16-bit numbers of 32 keys, a flat register tensor."""
        pairs = cute.make_tensor(
            cute.recast_ptr(weights.iterator, dtype=Uint32), cute.make_layout(STRIP // 2)
        )
        for i in range(STRIP // 2):
            (byte, bit), (_, next_bit) = cls.place(2 * i), cls.place(2 * i + 1)
            # Each bit becomes the top one of its byte, which prmt then repeats over half of the pair.
            first, second = byte | _SIGN, 4 + byte | _SIGN
            selector = Uint32(_selector((first, first, second, second)))
            pairs[i] = pairs[i] & _permute(keep_bits << (7 - bit), keep_bits << (7 - next_bit), selector)


def _selector(bytes_: Iterable[int]) -> int:
    return sum(byte << 4 * n for n, byte in enumerate(bytes_))


def _permute(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Four bytes chosen from the eight of `low` and `high`."""
    return Uint32(
        nvvm.prmt(low.ir_value(), selector.ir_value(), nvvm.PermuteMode.DEFAULT, hi=high.ir_value())
    )


def _rotate(word: Uint32, by: int) -> Uint32:
    """The word rotated to the left."""
    return word << by | word >> (32 - by)


def _product(x: Uint32, factor: int) -> tuple[Uint32, Uint32]:
    """The high and the low word of x * factor."""
    product = Uint64(x) * Uint64(factor)
    return Uint32(product >> 32), Uint32(product)


def _uniform(word: Uint32) -> Uint32:
    """The same word in all lanes, in a uniform register: the lanes' own registers are few (ptxas.md, P11)."""
    return Uint32(cute.arch.warp_redux_sync(word, "or"))
