"""Tiles of the weights kernel, on every architecture and for every head dimension.

A CTA's loads from the L2 cache grow with the tile's edges, its work with the tile's area: 128 by 128 is the
largest whose scores and sums of scores fit into the registers of eight warps.
"""

WARP_GRID = (4, 2)
"""Warps along the queries and along the keys of a tile."""
WARP_TILE = (32, 64)
"""Queries and keys of a warp."""
QUERIES = WARP_GRID[0] * WARP_TILE[0]
KEYS = WARP_GRID[1] * WARP_TILE[1]
MASK_BLOCK = (QUERIES, WARP_TILE[1])
"""Queries and keys of a block of attn_mask's tables: a warp's keys."""
