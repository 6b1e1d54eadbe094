"""A thread's registers, and its tile as the thread sees it."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...common import attn_mask, dropout, mods
from ...common.band import Band
from ...common.fwd.tiles import Blocks, Tile
from ...common.softmax import Rows


class Thread(NamedTuple):
    """What a thread keeps in registers, for each MMA of 16 rows: two rows, eight apart."""

    S: tuple[cute.Tensor, ...]
    O: tuple[cute.Tensor, ...]
    rows: tuple[Rows, ...]


class TileState(NamedTuple):
    """A tile as one thread sees it."""

    tile: Tile
    first: Int32
    """The tile's first query position."""
    own: tuple[Int32, Int32]
    """The first and the last query position of the warp."""
    band: Band
    blocks: Blocks
    positions: tuple[tuple[Int32, Int32], ...]
    """Query positions of the thread's rows, for each MMA."""
    mask: tuple[attn_mask.Rows, ...]
    """The mask of these rows; empty without one."""
    mods: tuple[mods.Rows, ...]
    """What score_mod, mask_mod and a block mask need of these rows; empty without them."""
    philox: dropout.Dropout | None
