"""The threads of the softmax and correction warps, and a tile as they see it."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32

from ...common import attn_mask, dropout, mods, softmax
from ...common.band import Band, Span
from ...common.fwd.tiles import Blocks


class CorrectionThread(NamedTuple):
    row: Int32
    """Row among each tile's 128."""
    warp: Int32
    """Index among the four correction warps."""
    lanes: Int32
    """TMEM address of the warp's lanes."""


class SoftmaxThread(NamedTuple):
    """A thread of a softmax warpgroup, and what it keeps in registers."""

    q_tile: Int32
    """Index of its tile."""
    row: Int32
    """Row among the tile's 128."""
    lanes: Int32
    """TMEM address of its warp's lanes of S."""
    rows: softmax.Rows
    philox: dropout.Dropout | None


class TileState(NamedTuple):
    """A tile, as a thread sees it."""

    band: Band
    blocks: Blocks
    own: Span
    first: Int32
    last: Int32
    """First and last query position of its 128 rows."""
    position: Int32
    """Query position of the thread's row."""
    mask: attn_mask.Rows | None
    mods: mods.Rows | None
    philox_row: dropout.QueryLane | None
    """Philox state of the row, which generates dropout's keep bits."""
