"""Blocks that the band makes partial: each piece of a warp's columns is masked, visible, or to be checked."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common import band as bands
from ...common.band import Band
from ...common.fragment import row_fragment

PIECE = 32
"""Columns of a piece: scores of a row, and the weights that are rounded and stored together."""


class Columns(NamedTuple):
    """Columns `first <= c < last` of a block."""

    first: Int32
    last: Int32


class PartialBlock(NamedTuple):
    """Columns that one warp's rows see; the same for all of its lanes."""

    visible: Columns
    """Columns that some of the rows see."""
    full: Columns
    """Columns that all of them see."""


@cute.jit
def partial_block(
    band: Band, shape: cutlass.Constexpr, first_row: Int32, last_row: Int32, key: Int32
) -> PartialBlock:
    """The block that begins at `key`, as rows `first_row <= i <= last_row` see it."""
    first, full_first = Int32(0), Int32(0)
    last, full_last = Int32(shape.keys), Int32(shape.keys)
    if cutlass.const_expr(shape.ragged_k or shape.right):
        last = band.Sk - key
        full_last = last
    if cutlass.const_expr(shape.right):
        last = cutlass.min(last, band.last_key(last_row) + 1 - key)
        full_last = cutlass.min(full_last, band.last_key(first_row) + 1 - key)
    if cutlass.const_expr(shape.left):
        first, full_first = band.first_key(first_row) - key, band.first_key(last_row) - key
    return PartialBlock(Columns(first, last), Columns(full_first, full_last))


def is_visible(block: PartialBlock, begin: int) -> Boolean:
    """Whether some row sees something of the piece that begins at a column."""
    return cute.arch.vote_any_sync((begin < block.visible.last) & (begin + PIECE > block.visible.first))


@cute.jit
def mask(
    block: PartialBlock,
    band: Band,
    shape: cutlass.Constexpr,
    scores: cute.Tensor,
    row: Int32,
    key: Int32,
    begin: cutlass.Constexpr,
) -> None:
    """Mask a thread's piece of scores: what its row does not see becomes -inf."""
    values = cute.make_tensor(scores.iterator + begin, cute.make_layout((1, PIECE)))
    if is_visible(block, begin):
        if cute.arch.vote_any_sync((begin + PIECE > block.full.last) | (begin < block.full.first)):
            bands.mask(band, shape, row_fragment(values, row, key + begin))
    else:
        values.fill(-Float32.inf)
