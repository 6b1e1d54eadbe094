"""The part of a tile of scores that one thread holds, whatever instruction made it."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Fragment(NamedTuple):
    """Some rows and columns of a score tile in a thread's registers.

    On Hopper a thread has 2 rows, eight apart, and every fourth pair of columns; on Blackwell one whole row.
    """

    values: cute.Tensor
    """(R, C) float32 view of the registers; both modes are static."""
    rows: tuple[Int32, ...]
    """R query positions i; the same position may stand for several heads when heads are packed."""
    key: Int32
    """Key position of column 0."""
    offsets: tuple[int, ...]
    """C static numbers: column c is key `key + offsets[c]`."""


class Mates(NamedTuple):
    """Lanes of a warp that have scores of the same rows or columns, by the bits in which their numbers may
    differ.
    """

    of_row: tuple[int, ...]
    of_column: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.of_row, *self.of_column)


MMA_MATES, ROW_MATES = Mates((1, 2), (4, 8, 16)), Mates((), (1, 2, 4, 8, 16))
"""Mates in `mma_fragment`, and in `row_fragment` where each lane has a row, and all have the same columns."""


def mma_fragment(
    accumulator: cute.Tensor, rows: tuple[Int32, ...], first_key: Int32, lane: Int32
) -> Fragment:
    """The scores of a 64 x N wgmma accumulator, or a 16 x N one of warp-level MMAs.

    Lane `l` holds columns 2 (l % 4) + 8 j + (0, 1).
    """
    N = cute.size(accumulator) // 2
    pairs = cute.make_layout((2, N // 2), stride=(1, 4))
    values = cute.make_tensor(
        accumulator.iterator, cute.make_layout((2, pairs.shape), stride=(2, pairs.stride))
    )
    offsets = tuple(8 * (c // 2) + c % 2 for c in range(N))
    return Fragment(values, rows, first_key + 2 * (lane % 4), offsets)


def row_fragment(values: cute.Tensor, row: Int32, first_key: Int32) -> Fragment:
    """A thread's whole row of scores, (1, C)."""
    return Fragment(values, (row,), first_key, tuple(range(cute.size(values))))
