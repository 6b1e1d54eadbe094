"""Copies of chunks of Q and K of one head after the other: by the load warp, or by all warps without TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...configs.weights import KEYS, QUERIES
from ..common import copies, ring
from ..common.role import role
from ..sm80.rows import Sequence, Visit, load_part
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


def start_copies(ctx: Context, warp: Int32) -> Int32:
    """Start to copy the first `stages` - 1 chunks, and return the stage of the first of them."""
    for i in range(ctx.plan.stages - 1):
        copy_chunk(ctx, warp, ctx.tile.first_head, Int32(i), Int32(i))
    return Int32(0)


@cute.jit
def copy_chunk(ctx: Context, warp: Int32, head: Int32, i: Int32, stage: Int32) -> None:
    """Start to copy the warp's rows of chunk i, counted from `head` on: a group, empty after the end."""
    plan = ctx.plan
    head, chunk = head + i // plan.chunks, i % plan.chunks
    rest = plan.features.D % plan.chunk
    if cutlass.const_expr(rest == 0):
        _copy(ctx, warp, head, chunk, stage, plan.chunk)
    else:
        if chunk == plan.chunks - 1:
            _copy(ctx, warp, head, chunk, stage, rest)
        else:
            _copy(ctx, warp, head, chunk, stage, plan.chunk)
    cute.arch.cp_async_commit_group()


def _copy(ctx: Context, warp: Int32, head: Int32, chunk: Int32, stage: Int32, columns: int) -> None:
    plan, tile, maps = ctx.plan, ctx.tile, ctx.maps
    group, visit = maps.mQ.shape[2] // maps.mK.shape[2], Visit(head, tile.end_head)
    own = (
        (maps.mQ, head, tile.query_block, ctx.sQ),
        (maps.mK, head // group, tile.key_block, ctx.sK),
    )
    for x, of_head, block, stages in own:
        rows = cute.make_tensor(x.iterator + chunk * plan.chunk, x.layout)
        sequence = Sequence(rows, Int32(0), Int32(x.shape[0]), of_head, tile.batch)
        target = stages[None, None, stage]
        load_part(sequence, block, target, 0, plan.halves(columns), warp, plan.consumer_warps, visit)
