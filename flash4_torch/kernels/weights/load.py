"""The load warp: brings chunks of Q and K of one head after the other."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ...configs.weights import KEYS, QUERIES
from ..common import copies, ring
from ..common.role import role
from .context import Context


@role(produces=("load_qk",))
@cute.jit
def load(ctx: Context) -> None:
    plan, tile, at = ctx.plan, ctx.tile, ring.start()
    group = ctx.maps.mQ.shape[2] // ctx.maps.mK.shape[2]
    for head in cutlass.range(tile.first_head, tile.end_head, unroll=1):
        mQ = ctx.maps.mQ[None, None, head, tile.batch]
        mK = ctx.maps.mK[None, None, head // group, tile.batch]
        for chunk in cutlass.range(plan.chunks, unroll=1):
            ring.wait_empty(ctx.load_qk, at)
            full = ctx.load_qk.full + at.stage
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, plan.stage_bytes)
            gQ = cute.local_tile(mQ, (QUERIES, plan.chunk), (tile.query_block, chunk))
            gK = cute.local_tile(mK, (KEYS, plan.chunk), (tile.key_block, chunk))
            copies.copy(ctx.maps.load_q, gQ, ctx.sQ[None, None, at.stage], full)
            copies.copy(ctx.maps.load_k, gK, ctx.sK[None, None, at.stage], full)
            at = ring.after(at, plan.stages)
