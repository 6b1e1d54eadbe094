"""The RNG warps, which generate dropout's keep bits for the warps that apply them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...common import dropout, ring
from ...common.fwd import tiles
from ...common.fwd.tiles import Tile
from ...common.role import role
from ..warps import WARP_ROWS
from .context import Context


@role(produces=("keep_bits",), consumes=("load_q",))
@cute.jit
def dropout_bits(ctx: Context, rng_warp: Int32) -> None:
    """Generate the keep bits of every block that is loaded, in strips of 16 rows for each consumer warp.

    The work goes round the RNG warps, from block to block, in units of four strips. If that divides evenly, a
    unit has the same four of the second half of the consumer warps, too: a call of the generator is a long
    chain of dependent instructions, and several calls fill the gaps.
    """
    plan = ctx.plan
    philox = dropout.load(ctx.rng_state, ctx.params.drop_byte, ctx.params.drop_fraction)
    lane = cute.arch.lane_idx()
    strips = dropout.strips(plan.keys)
    halves = 2 if plan.consumer_warps * strips % (2 * dropout.WARP_STRIPS) == 0 else 1
    warps = plan.consumer_warps // halves
    groups, group = warps * strips // dropout.WARP_STRIPS, rng_warp
    q_at, at = ring.start(), ring.start()
    tile = tiles.read(ctx, ctx.load_q, q_at)
    while tile.index >= 0:
        ring.release(ctx.load_q, q_at)
        first, head = tile.index * plan.config.queries, _head(ctx, tile)
        blocks = tiles.blocks_of(ctx, tile)
        span = blocks.span
        for i in cutlass.range(span.last - span.first, unroll=1):
            n, _ = tiles.block_at(ctx, blocks, span.last - 1 - i)
            ring.wait_empty(ctx.keep_bits, at)
            while group < groups:
                place = Uint32(group * dropout.WARP_STRIPS + lane // dropout.STRIP_LANES)
                warp, strip = Int32(place // strips), place % strips
                for half in cutlass.range_constexpr(halves):
                    of = warp + half * warps
                    rows = dropout.QueryRows.at(philox, first + of * WARP_ROWS, head, lane)
                    rows.generate(n * plan.keys, strip, ctx.sKeepBits[None, None, of, at.stage])
                group += plan.rng_warps
            group -= groups
            ring.fill(ctx.keep_bits, at)
            at = ring.after(at, plan.config.kv_stages)
        q_at = ring.after(q_at, plan.config.q_stages)
        tile = tiles.read(ctx, ctx.load_q, q_at)


@cute.jit
def _head(ctx: Context, tile: Tile) -> Int32:
    """The tile's first query head, counted through the batch; for varlen, through the sequences."""
    query_heads = ctx.maps.mQ.shape[0][0] * ctx.maps.mQ.shape[2]
    return tile.batch * query_heads + tiles.query_head(ctx, tile)
