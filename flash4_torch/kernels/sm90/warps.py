"""How the rows of a warpgroup's accumulator lie among its warps and lanes."""

from __future__ import annotations

from ..common.warps import WARPS

ROWS = 64
"""Rows of one wgmma, and of a consumer warpgroup: queries forward, keys backward. A warp has a quarter."""
WARP_ROWS = ROWS // WARPS
LANES = 4
"""Neighbouring lanes that share a row of an accumulator."""
