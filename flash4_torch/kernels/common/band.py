"""The keys that the rows of a tile see, and masking of all others: the device side of `masks.Band`."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64

from .fragment import Fragment


class Span(NamedTuple):
    """Blocks of keys, `first <= n < last`."""

    first: Int32
    last: Int32


class Stack(NamedTuple):
    """Batch entries one after another, of which each has so many rows, and columns that only these see."""

    rows: Int32
    columns: Int32
    inverse: Uint32
    """2^32 / rows, rounded up: a row's entry is the upper word of their product."""
    entries: Int32
    """Those of a stack, of which a batch may have several."""


class Band(NamedTuple):
    """The band of one sequence, in rows and keys; `BandShape` has what is static about it.

    Its bounds are parallel; or a table has those of each row, which never decrease from row to row; or they
    are parallel in each entry of a stack.
    """

    Sk: Int32
    lowest: Int32
    """Row i sees keys from `i + lowest` on."""
    highest: Int32
    """Row i sees keys up to `i + highest`."""
    table: cute.Tensor | None = None
    """(rows, 2) int32: instead, the first and the last key of each row."""
    own: tuple[tuple[Int32, Int32], ...] = ()
    """The bounds of a thread's rows, if rows have their own."""
    stack: Stack | None = None
    """Instead, `lowest` and `highest` are those of rows and keys of each entry."""

    @property
    def is_parallel(self) -> bool:
        return self.table is None and self.stack is None

    def first_key(self, row: Int32) -> Int32:
        if self.stack is not None:
            first, i = self._entry(row)
            return first + cutlass.min(cutlass.max(i + self.lowest, 0), self.stack.columns)
        return row + self.lowest if self.table is None else self.table[self._within(row), 0]

    def last_key(self, row: Int32) -> Int32:
        if self.stack is not None:
            first, i = self._entry(row)
            return first + cutlass.min(cutlass.max(i + self.highest, -1), self.stack.columns - 1)
        return row + self.highest if self.table is None else self.table[self._within(row), 1]

    def _entry(self, row: Int32) -> tuple[Int32, Int32]:
        """The first key of a row's entry, and the row's place among those of the entry."""
        row = cutlass.max(row, 0)
        number = Int32(Uint64(Uint32(row)) * Uint64(self.stack.inverse) >> 32)
        return number * self.stack.columns, row - number * self.stack.rows

    def _within(self, row: Int32) -> Int32:
        # A tile may ask for the one before the first.
        return cutlass.max(cutlass.min(row, self.table.shape[0] - 1), 0)


def make_band(Sq: Int32, Sk: Int32, left: Int32, right: Int32) -> Band:
    return Band(Sk, Sk - Sq - left, Sk - Sq + right)


def transposed(band: Band, Sq: Int32) -> Band:
    """The band of the transposed problem: rows are keys, and they see Sq queries."""
    return Band(Sq, -band.highest, -band.lowest)


def with_own(band: Band, rows: tuple[Int32, ...]) -> Band:
    """The band with the bounds of a thread's rows in registers, if rows have their own."""
    if band.is_parallel:
        return band
    return band._replace(own=tuple((band.first_key(row), band.last_key(row)) for row in rows))


class BandShape(NamedTuple):
    """The static part of a band: which sides are bounded, whether to mask keys after Sk, a block's keys."""

    left: bool
    right: bool
    ragged_k: bool
    """Whether Sk may end inside a block and nothing else masks the keys after it."""
    keys: int

    @property
    def may_mask_rows(self) -> bool:
        """Whether all of a block may be masked for a row."""
        return self.left or self.right

    @property
    def masks(self) -> bool:
        return self.left or self.right or self.ragged_k


@cute.jit
def visible_span(band: Band, shape: cutlass.Constexpr, first_row: Int32, last_row: Int32) -> Span:
    """The blocks that hold every key that some row of `first_row <= i <= last_row` sees; at least one block.

    Where no row sees a key, all of that block is masked, so kernels need no separate path for such rows.
    """
    first, last = Int32(0), band.Sk
    if cutlass.const_expr(shape.left):
        first = cutlass.max(first, band.first_key(first_row))
    if cutlass.const_expr(shape.right):
        last = cutlass.min(last, band.last_key(last_row) + 1)
    final = cutlass.max(band.Sk - 1, 0) // shape.keys
    begin = cutlass.min(first // shape.keys, final)
    end = (cutlass.max(last, 0) + shape.keys - 1) // shape.keys
    return Span(begin, cutlass.max(begin + 1, end))


@cute.jit
def is_partial(band: Band, shape: cutlass.Constexpr, n: Int32, first_row: Int32, last_row: Int32) -> Boolean:
    """Whether block n holds a key that some of the rows do not see."""
    partial = Boolean(False)
    if cutlass.const_expr(shape.ragged_k):
        partial = partial | ((n + 1) * shape.keys > band.Sk)
    if cutlass.const_expr(shape.right):
        partial = partial | ((n + 1) * shape.keys - 1 > band.last_key(first_row))
    if cutlass.const_expr(shape.left):
        partial = partial | (n * shape.keys < band.first_key(last_row))
    return partial


@cute.jit
def full_blocks(band: Band, shape: cutlass.Constexpr, first_row: Int32) -> Int32:
    """The number of full blocks, from block 0 on, where only the right bound makes blocks partial."""
    return cutlass.max(band.last_key(first_row) + 1, 0) // shape.keys


@cute.jit
def partial_at_end(band: Band, shape: cutlass.Constexpr, first_row: Int32, top: Int32, count: Int32) -> Int32:
    """How many of `count` blocks from block `top` down may be partial by the right bound: at least one."""
    return cutlass.min(cutlass.max(top + 1 - full_blocks(band, shape, first_row), 1), count)


@cute.jit
def mask(band: Band, shape: cutlass.Constexpr, fragment: Fragment) -> None:
    """Set the scores outside of the band to -inf."""
    for r in cutlass.range_constexpr(len(fragment.rows)):
        # Bounds relative to the thread's first key leave one comparison with a constant for each score.
        above = Int32(1 << 30)
        if cutlass.const_expr(shape.ragged_k or shape.right):
            above = band.Sk - 1 - fragment.key
            if cutlass.const_expr(shape.right):
                above = cutlass.min(above, _last_key(band, fragment, r) - fragment.key)
        below = Int32(-(1 << 30))
        if cutlass.const_expr(shape.left):
            below = _first_key(band, fragment, r) - fragment.key
        for c in cutlass.range_constexpr(len(fragment.offsets)):
            offset = fragment.offsets[c]
            masked = Boolean(False)
            if cutlass.const_expr(shape.ragged_k or shape.right):
                masked = above < offset
            if cutlass.const_expr(shape.left):
                masked = masked | (below > offset)
            fragment.values[r, c] = -cutlass.Float32.inf if masked else fragment.values[r, c]


def _first_key(band: Band, fragment: Fragment, r: int) -> Int32:
    return band.own[r][0] if band.own else band.first_key(fragment.rows[r])


def _last_key(band: Band, fragment: Fragment, r: int) -> Int32:
    return band.own[r][1] if band.own else band.last_key(fragment.rows[r])


class Edges(NamedTuple):
    """What makes blocks partial for rows `first <= i <= last`; where rows have bounds of their own it is
    found once.
    """

    band: Band
    first: Int32
    last: Int32


def edges_of(band: Band, first: Int32, last: Int32) -> Edges:
    """The edges, for `is_partial` in a loop over blocks."""
    if band.is_parallel:
        return Edges(band, first, last)
    # In a band whose bounds are the same for all rows, these are rows 0 of two bands.
    lowest, highest = band.first_key(last), band.last_key(first)
    return Edges(Band(band.Sk, lowest, highest), Int32(0), Int32(0))
