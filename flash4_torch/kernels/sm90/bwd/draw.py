"""The drawing warps: which weights dropout keeps, for the warps that make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...common import dropout, ring
from ...common import key_tiles as tiles
from ..warps import WARP_ROWS

if TYPE_CHECKING:
    from .kernel import Kernel


@cute.jit
def draw(k: Kernel, drawer: Int32) -> None:
    """Every block that is loaded, strips of 16 keys of it: for each of the consumers' warps.

    Drawing warps take turns at four strips, from block to block.
    """
    plan = k.plan
    chance = dropout.load(k.rng_state, k.rule.drop_byte, k.rule.drop_fraction)
    lane = cute.arch.lane_idx()
    strips, heads = dropout.strips(plan.queries), tiles.group(k)
    turns, turn = plan.strips * strips // dropout.WARP_STRIPS, drawer
    kv_at, at = ring.start(), ring.start()
    tile = tiles.read(k, kv_at)
    while tile.block >= 0:
        ring.release(k.load_k, kv_at)
        first, span = tile.block * plan.keys, tiles.span_of(k, tile)
        for h in cutlass.range(heads, unroll=1):
            head = tile.key_head * heads + h
            blocks = tiles.blocks_of(k, tile, span, head)
            drawn = tile.batch * k.maps.mQ.shape[2] + head
            for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
                n, _ = tiles.block_at(k, blocks, position)
                ring.wait_empty(k.kept, at)
                while turn < turns:
                    place = Uint32(turn * dropout.WARP_STRIPS + lane // dropout.STRIP_LANES)
                    warp, strip = Int32(place // strips), place % strips
                    rows = dropout.KeyRows.at(chance, first + warp * WARP_ROWS, drawn, lane)
                    rows.draw(n * plan.queries, strip, k.sKept[None, None, warp, at.stage])
                    turn += plan.drawers
                turn -= turns
                ring.fill(k.kept, at)
                at = ring.after(at, plan.config.q_stages)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(k, kv_at)
