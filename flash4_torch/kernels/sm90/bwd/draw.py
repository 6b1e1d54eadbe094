"""The drawing warps: which weights dropout keeps, for the warps that make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...common import dropout, ring
from ...common import key_tiles as tiles
from ...common.ring import Cursor
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
    heads, turn = tiles.group(k), drawer
    kv_at, at = ring.start(), ring.start()
    tile = tiles.read(k, kv_at)
    while tile.block >= 0:
        ring.release(k.load_k, kv_at)
        first, span = tile.block * plan.keys, tiles.span_of(k, tile)
        if cutlass.const_expr(plan.heads_inside):
            place = tiles.first_place(k, tile, span)
            for _ in cutlass.range((span.last - span.first) * heads, unroll=1):
                drawn = tile.batch * k.maps.mQ.shape[2] + tile.key_head * heads + place.h
                turn = _draw_block(k, chance, drawn, first, place.n, turn, at)
                at, place = ring.after(at, plan.config.q_stages), tiles.next_place(k, tile, place)
        else:
            for h in cutlass.range(heads, unroll=1):
                head = tile.key_head * heads + h
                blocks = tiles.blocks_of(k, tile, span, head)
                drawn = tile.batch * k.maps.mQ.shape[2] + head
                for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
                    n, _ = tiles.block_at(k, blocks, position)
                    turn = _draw_block(k, chance, drawn, first, n, turn, at)
                    at = ring.after(at, plan.config.q_stages)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(k, kv_at)


@cute.jit
def _draw_block(
    k: Kernel, chance: dropout.Dropout, drawn: Int32, first: Int32, n: Int32, turn: Int32, at: Cursor
) -> Int32:
    """Block n of a head, number `drawn`, for keys from `first` on; returns the warp's turn in the next."""
    plan, lane = k.plan, cute.arch.lane_idx()
    strips = dropout.strips(plan.queries)
    turns = plan.strips * strips // dropout.WARP_STRIPS
    ring.wait_empty(k.kept, at)
    while turn < turns:
        place = Uint32(turn * dropout.WARP_STRIPS + lane // dropout.STRIP_LANES)
        warp, strip = Int32(place // strips), place % strips
        rows = dropout.KeyRows.at(chance, first + warp * WARP_ROWS, drawn, lane)
        rows.draw(n * plan.queries, strip, k.sKept[None, None, warp, at.stage])
        turn += plan.drawers
    ring.fill(k.kept, at)
    return turn - turns
