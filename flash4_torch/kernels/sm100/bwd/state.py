"""A compute thread, its cursors, and a tile and its P as the thread sees them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...common import dropout
from ...common.band import Band, Span
from ...common.bwd.tiles import Blocks, Tile
from ...common.ring import Cursor


class Thread(NamedTuple):
    """Place of a thread."""

    warp: Int32
    """Index among the compute warps."""
    key: Int32
    """Index of its key in the tile."""
    first: Int32
    """First of its queries in a block."""
    column: Int32
    """Column of S at which these begin."""
    philox: dropout.Dropout | None
    """Philox state, which generates keep bits."""


class Cursors(NamedTuple):
    kv: Cursor
    q: Cursor
    phase: Int32
    """Phase of the block's signals."""
    tile_phase: Int32


class TileState(NamedTuple):
    """A tile and one of its query heads, as a thread sees it."""

    tile: Tile
    band: Band
    span: Span
    whole: Span
    """Full blocks: neither the band nor the end of Sk makes them partial."""
    position: Int32
    """Position of the thread's key."""
    head: Int32
    blocks: Blocks


class Probs(NamedTuple):
    """P of a thread's queries, as dS needs it."""

    P: cute.Tensor
    """float32, times softcap's derivatives; where `dtanh` is not None, 16 bits and without them."""
    dtanh: cute.Tensor | None
    """Softcap's derivatives, 16 bits, where a mask is added."""
    keep_bits: tuple | None
    """Dropout's keep bits, two words."""
    scores: cute.Tensor | None = None
    """float32, before score_mod, if its derivative reads them."""
