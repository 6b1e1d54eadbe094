"""What a kernel finds out about the bounds of rows; hosts use it with ints, the kernel with registers."""

from __future__ import annotations

from typing import Any, NamedTuple

UNBOUNDED = 1 << 30
"""A distance that hides nothing."""
TILE_ROWS = 256
"""Rows of the tiles that `Verdict.tiles` counts."""


class Verdict(NamedTuple):
    """What is so of the rows of one batch entry and head; flags are 0 or 1.

    Bounds are those of a row's keys within the call's band. What depends on `decreases` holds if that is 0.
    """

    has_gaps: Any
    """Whether a row sees other than all keys from its first to its last one, without the band."""
    decreases: Any
    """Whether a first or a last key comes before one of the rows before."""
    is_no_band: Any
    """Whether the rows see something else than what `left` and `right` show."""
    hides_left: Any
    """Whether any row begins after key 0."""
    hides_right: Any
    no_documents: Any
    """Whether a row begins at another position than that of a row that begins there itself."""
    not_causal: Any
    """Whether a row ends elsewhere than at its own position."""
    not_whole: Any
    """Whether a row ends elsewhere than before the next one that begins."""
    left: Any
    """The most keys that a row sees before its own position."""
    right: Any
    most: Any
    """The most keys that a row sees."""
    starts: Any
    """How many rows begin at their own position."""
    longest: Any
    """The most rows from one of these to the next."""
    tiles: Any
    """Tiles of `TILE_ROWS` rows, if each document has its own."""


NUMBERS = len(Verdict._fields)
