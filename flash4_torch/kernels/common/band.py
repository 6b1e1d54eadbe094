"""Which keys the rows of a tile may see, and hiding the others: the device's side of `masks.Band`."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .fragment import Fragment


class Span(NamedTuple):
    """Blocks of keys, `first <= n < last`."""

    first: Int32
    last: Int32


class Band(NamedTuple):
    """The band of one sequence in rows and keys, with what is static about it."""

    Sk: Int32
    lowest: Int32
    """Row i sees keys from `i + lowest` on."""
    highest: Int32
    """Row i sees keys up to `i + highest`."""


def make_band(Sq: Int32, Sk: Int32, left: Int32, right: Int32) -> Band:
    return Band(Sk, Sk - Sq - left, Sk - Sq + right)


class BandShape(NamedTuple):
    """What is static: which sides are bounded, whether to hide what follows Sk, and a block's keys."""

    left: bool
    right: bool
    ragged_k: bool
    """Whether Sk may end inside a block and nothing else hides what follows."""
    keys: int

    @property
    def may_mask_rows(self) -> bool:
        """Whether a row may find all of a block hidden."""
        return self.left or self.right

    @property
    def masks(self) -> bool:
        return self.left or self.right or self.ragged_k


@cute.jit
def visible_span(band: Band, shape: cutlass.Constexpr, first_row: Int32, last_row: Int32) -> Span:
    """The blocks that hold every key some row of `first_row <= i <= last_row` sees, and at least one.

    Where no row sees a key, all of that block is hidden: kernels need no path of its own for such rows.
    """
    first, last = Int32(0), band.Sk
    if cutlass.const_expr(shape.left):
        first = cutlass.max(first, first_row + band.lowest)
    if cutlass.const_expr(shape.right):
        last = cutlass.min(last, last_row + band.highest + 1)
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
        partial = partial | ((n + 1) * shape.keys - 1 > first_row + band.highest)
    if cutlass.const_expr(shape.left):
        partial = partial | (n * shape.keys < last_row + band.lowest)
    return partial


@cute.jit
def full_blocks(band: Band, shape: cutlass.Constexpr, first_row: Int32) -> Int32:
    """How many blocks, from the first one, `is_partial` leaves alone, where only the right side cuts."""
    return cutlass.max(first_row + band.highest + 1, 0) // shape.keys


@cute.jit
def partial_at_end(band: Band, shape: cutlass.Constexpr, first_row: Int32, top: Int32, count: Int32) -> Int32:
    """How many of `count` blocks from block `top` down may be partial: at least one; only the right side counts."""
    return cutlass.min(cutlass.max(top + 1 - full_blocks(band, shape, first_row), 1), count)


@cute.jit
def mask(band: Band, shape: cutlass.Constexpr, fragment: Fragment) -> None:
    """Scores outside of the band become -inf."""
    for r in cutlass.range_constexpr(len(fragment.rows)):
        # Bounds relative to the thread's first key leave one comparison with a constant for each score.
        above = Int32(1 << 30)
        if cutlass.const_expr(shape.ragged_k or shape.right):
            above = band.Sk - 1 - fragment.key
            if cutlass.const_expr(shape.right):
                above = cutlass.min(above, fragment.rows[r] + band.highest - fragment.key)
        below = Int32(-(1 << 30))
        if cutlass.const_expr(shape.left):
            below = fragment.rows[r] + band.lowest - fragment.key
        for c in cutlass.range_constexpr(len(fragment.offsets)):
            offset = fragment.offsets[c]
            masked = Boolean(False)
            if cutlass.const_expr(shape.ragged_k or shape.right):
                masked = above < offset
            if cutlass.const_expr(shape.left):
                masked = masked | (below > offset)
            fragment.values[r, c] = -cutlass.Float32.inf if masked else fragment.values[r, c]
