"""A thread's registers, its tile, and the blocks that the tile visits."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import dropout, warp_mma, warp_tf32
from ...common.band import Band, Span
from ...common.bwd.tiles import DqOrder, Tile
from .plan import Plan


class Thread(NamedTuple):
    """What a thread keeps in registers from block to block, for each of the warp's MMAs of 16 keys."""

    dK: tuple[cute.Tensor, ...]
    dV: tuple[cute.Tensor, ...]


def make_sums(plan: Plan, columns: int, count: int = 1, filled: bool = True) -> tuple[cute.Tensor, ...]:
    """Accumulators of 16 rows each, `filled` with zeros."""
    if plan.is_float32:
        sums = warp_tf32.make_accumulators(count, columns)
    else:
        sums = warp_mma.make_accumulators(plan.dtype, count, columns)
    if filled:
        for accumulator in sums:
            accumulator.fill(0.0)
    return sums


class Block(NamedTuple):
    """A block of queries of one head of the group."""

    h: Int32
    position: Int32
    """Its place among the blocks that the head's mask leaves visible, or its number."""
    n: Int32
    partial: Boolean
    """Whether attn_mask changes any of its scores."""


class Copy(NamedTuple):
    """A block that is to be copied: the i-th of so many of the tile, to a stage that is free."""

    block: Block
    i: Int32
    count: Int32
    stage: Int32


class TileState(NamedTuple):
    """A tile as one thread sees it."""

    tile: Tile
    band: Band
    span: Span
    full: Span
    """Blocks that neither the band nor the end of Sk makes partial."""
    positions: tuple[Int32, Int32]
    """Positions of the thread's keys in its first MMA."""
    order: DqOrder | None
    philox: dropout.Dropout | None

    def of_mma(self, m: int) -> TileState:
        """The tile with the thread's keys in its m-th MMA."""
        first, second = self.positions
        further = m * warp_mma.ROWS
        return self._replace(positions=(first + further, second + further)) if m else self


class BlockState(NamedTuple):
    """What a thread works on: a block of one query head."""

    tile: Tile
    head: Int32
    n: Int32
    part: Int32 | int = 0
    """The part of the warp's queries whose scores it computes: see `Plan.query_parts`."""
