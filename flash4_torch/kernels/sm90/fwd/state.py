"""A thread of a consumer warpgroup, its warpgroup's slice of a tile, and the tile as the thread sees it."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import attn_mask, mods, softmax
from ...common.band import Band
from ...common.fwd.tiles import Blocks, Tile
from ...common.warps import WARP
from ..warps import LANES, WARP_ROWS


class Thread(NamedTuple):
    """A thread of a consumer warpgroup, and what it keeps in registers."""

    warpgroup: Int32
    index: Int32
    S: cute.Tensor
    O: cute.Tensor
    P: cute.Tensor
    rows: softmax.Rows
    ramp: cute.Tensor | None
    """The operand by which tensor cores add a ramp to its rows."""

    @property
    def lane(self) -> Int32:
        return self.index % WARP

    @property
    def row(self) -> Int32:
        """The first of its two rows among the warpgroup's 64; the second is eight rows further on."""
        return self.index // WARP * WARP_ROWS + self.lane // LANES


class WarpgroupSlice(NamedTuple):
    """A warpgroup's part of a tile: query positions `first` to `last`, and `count` of the tile's blocks.

    Blocks are counted down. The warpgroup skips the `before` blocks ahead of its own and the `after` blocks
    that follow them: they are masked for all of its rows.
    """

    first: Int32
    last: Int32
    top: Int32
    """Position of the block that it begins with, counting down."""
    before: Int32
    count: Int32
    after: Int32


class TileState(NamedTuple):
    """A tile as one thread sees it."""

    tile: Tile
    rows: WarpgroupSlice
    band: Band
    blocks: Blocks
    positions: tuple[Int32, Int32]
    """Query positions of the thread's rows."""
    half_block: Boolean
    """Whether the first block's upper half is masked."""
    mask: attn_mask.Rows | None
    mods: mods.Rows | None
