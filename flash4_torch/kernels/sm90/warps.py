"""What a warpgroup's accumulators give each of its threads."""

from __future__ import annotations

from ..common.warps import WARPS

ROWS = 64
"""Rows of one wgmma, and of a consumer warpgroup: queries forward, keys backward. A quarter is a warp's."""
WARP_ROWS = ROWS // WARPS
LANES = 4
"""Neighbouring lanes that share a row of an accumulator."""
