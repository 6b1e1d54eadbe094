"""The preprocess kernel's work by the consumers, with `preprocesses`: a small call is one launch.

The statistics go through global memory, as those of the preprocess kernel do: blocks of Q and dO bring theirs
along whoever has written them, and the gradients of sinks read them afterwards.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ...common import ring, tile_scheduler
from ...common.bwd import row_stats, tiles
from ...common.bwd.query_blocks import block_of
from ...common.warps import WARPS
from .context import Context


@cute.jit
def preprocess(ctx: Context) -> None:
    """Write the statistics of all rows of the CTA's KV head, by all consumer warps, for the load warp."""
    plan, inputs = ctx.plan.preprocess, ctx.row_inputs
    # Warps of the producer come first.
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPS, cute.arch.lane_idx()
    tile = tiles.tile_of(ctx, tiles.shape(ctx), Uint32(0), tile_scheduler.initial_work(ctx))
    group, count = tiles.group(ctx), plan.blocks.count(tile.Sq)
    for b in cutlass.range(group * count, unroll=1):
        h = b // count
        own = block_of(inputs.out, plan.blocks, tile.batch, tile.kv_head * group + h, b - h * count)
        for i in cutlass.range_constexpr(row_stats.shape_of(plan).parts):
            part = row_stats.load(inputs, own, i, warp, lane, plan)
            row_stats.store(part, inputs, ctx.stats, own, lane, plan)
    # TMA will read what these threads wrote. A fence for global memory alone would leave out the membar.
    cute.arch.fence_proxy("async")
    ring.fill(ctx.write_stats, ring.start())
