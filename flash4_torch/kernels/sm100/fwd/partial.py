"""Blocks that the band cuts: pieces of a warp's columns are hidden, or visible, or to be looked at."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common import band as bands
from ...common.band import Band
from ...common.fragment import row_fragment

PIECE = 32
"""Scores of a row, and weights that are rounded and stored together."""


class Columns(NamedTuple):
    """Of a block, `first <= c < last`."""

    first: Int32
    last: Int32


class Cut(NamedTuple):
    """Of one warp's rows; the same for all of its lanes."""

    seen: Columns
    """By some of the rows."""
    whole: Columns
    """By all of them."""


@cute.jit
def cut_of(band: Band, shape: cutlass.Constexpr, first_row: Int32, last_row: Int32, key: Int32) -> Cut:
    """Rows `first_row <= i <= last_row`, and the block that begins at `key`."""
    first, whole_first = Int32(0), Int32(0)
    last, whole_last = Int32(shape.keys), Int32(shape.keys)
    if cutlass.const_expr(shape.tail or shape.right):
        last = band.Sk - key
        whole_last = last
    if cutlass.const_expr(shape.right):
        last = cutlass.min(last, last_row + band.highest + 1 - key)
        whole_last = cutlass.min(whole_last, first_row + band.highest + 1 - key)
    if cutlass.const_expr(shape.left):
        first, whole_first = first_row + band.lowest - key, last_row + band.lowest - key
    return Cut(Columns(first, last), Columns(whole_first, whole_last))


def sees(cut: Cut, begin: int) -> Boolean:
    """Whether some row sees something of the piece that begins at a column."""
    return cute.arch.vote_any_sync((begin < cut.seen.last) & (begin + PIECE > cut.seen.first))


@cute.jit
def hide(
    cut: Cut,
    band: Band,
    shape: cutlass.Constexpr,
    scores: cute.Tensor,
    row: Int32,
    key: Int32,
    begin: cutlass.Constexpr,
) -> None:
    """A thread's piece of scores: what its row does not see becomes -inf."""
    values = cute.make_tensor(scores.iterator + begin, cute.make_layout((1, PIECE)))
    if sees(cut, begin):
        if cute.arch.vote_any_sync((begin + PIECE > cut.whole.last) | (begin < cut.whole.first)):
            bands.hide(band, shape, row_fragment(values, row, key + begin))
    else:
        values.fill(-Float32.inf)
