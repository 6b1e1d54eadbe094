"""A compute thread, its cursors, and a tile and its weights as it sees them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...common import dropout
from ...common.band import Band, Span
from ...common.bwd.tiles import Blocks, Tile
from ...common.ring import Cursor


class Thread(NamedTuple):
    """Where a thread is."""

    warp: Int32
    """Of the compute warps."""
    key: Int32
    """In the tile."""
    first: Int32
    """Of its queries in a block."""
    column: Int32
    """Of S, from which on it has those."""
    philox: dropout.Dropout | None
    """What dropout keeps."""


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
    """Blocks that neither the band nor the end of Sk cuts."""
    position: Int32
    """Of the thread's key."""
    head: Int32
    blocks: Blocks


class Probs(NamedTuple):
    """Of the scores of a thread's queries: what dS needs."""

    P: cute.Tensor
    """float32, and times softcap's derivatives; with `dtanh` 16 bits, and without them."""
    dtanh: cute.Tensor | None
    """Softcap's derivatives, 16 bits, where a mask is added."""
    keep_bits: tuple | None
    """Two words of which weights dropout keeps."""
