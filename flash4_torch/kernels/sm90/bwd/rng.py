"""The RNG warps, which generate dropout's keep bits for the warps that apply them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...common import dropout, ring
from ...common.bwd import tiles
from ...common.ring import Cursor
from ...common.role import role
from ..warps import WARP_ROWS
from .context import Context


@role(produces=("keep_bits",), consumes=("load_k",))
@cute.jit
def dropout_bits(ctx: Context, rng_warp: Int32) -> None:
    """Generate the keep bits of every block that is loaded, in strips of 16 keys for each consumer warp.

    The work goes round the RNG warps, from block to block, in units of four strips.
    """
    plan = ctx.plan
    philox = dropout.load(ctx.rng_state, ctx.params.drop_byte, ctx.params.drop_fraction)
    heads, strip_group = tiles.group(ctx), rng_warp
    kv_at, at = ring.start(), ring.start()
    tile = tiles.read(ctx, kv_at)
    while tile.index >= 0:
        ring.release(ctx.load_k, kv_at)
        first, span = tile.index * plan.keys, tiles.span_of(ctx, tile)
        if cutlass.const_expr(plan.heads_inner):
            place = tiles.first_place(ctx, tile, span)
            for _ in cutlass.range((span.last - span.first) * heads, unroll=1):
                philox_row = tile.batch * ctx.maps.mQ.shape[2] + tile.kv_head * heads + place.h
                strip_group = _block_bits(ctx, philox, philox_row, first, place.n, strip_group, at)
                at, place = ring.after(at, plan.config.q_stages), tiles.next_place(ctx, tile, place)
        else:
            for h in cutlass.range(heads, unroll=1):
                head = tile.kv_head * heads + h
                blocks = tiles.blocks_of(ctx, tile, span, head)
                philox_row = tile.batch * ctx.maps.mQ.shape[2] + head
                for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
                    n, _ = tiles.block_at(ctx, blocks, position)
                    strip_group = _block_bits(ctx, philox, philox_row, first, n, strip_group, at)
                    at = ring.after(at, plan.config.q_stages)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(ctx, kv_at)


@cute.jit
def _block_bits(
    ctx: Context,
    philox: dropout.Dropout,
    philox_row: Int32,
    first: Int32,
    n: Int32,
    strip_group: Int32,
    at: Cursor,
) -> Int32:
    """Generate block n of a head, number `philox_row`, for keys from `first` on.

    Returns the first unit of this RNG warp in the next block.
    """
    plan, lane = ctx.plan, cute.arch.lane_idx()
    strips = dropout.strips(plan.queries)
    strip_groups = plan.strips * strips // dropout.WARP_STRIPS
    ring.wait_empty(ctx.keep_bits, at)
    while strip_group < strip_groups:
        place = Uint32(strip_group * dropout.WARP_STRIPS + lane // dropout.STRIP_LANES)
        warp, strip = Int32(place // strips), place % strips
        rows = dropout.KeyRows.at(philox, first + warp * WARP_ROWS, philox_row, lane)
        rows.generate(n * plan.queries, strip, ctx.sKeepBits[None, None, warp, at.stage])
        strip_group += plan.rng_warps
    ring.fill(ctx.keep_bits, at)
    return strip_group - strip_groups
