"""The MMA thread of a CTA pair, in CTA 0: MMAs in the order of `mma`, half blocks in the order shown.

a tile begins with   S(0) dP(0) dV(0) S(1)
block i              dK(i) dQ(i) dV(i+1) dP(i+1) S(i+2)
half blocks          q(0) dov(0) dop(0) q(1) | qk(0) dov(1) dop(1) q(2) | qk(1) ...
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import ring
from ...common.bwd import tiles
from ...common.bwd.tiles import Tile
from ...common.ring import Cursor
from ...common.role import role
from .. import umma
from ..umma import Matrix
from .context import Context
from .issue import commit, issue_dk, issue_dp, issue_dq, issue_dv, issue_s, wait


class Cursors(NamedTuple):
    kv: Cursor
    numbers: Cursor
    """Cursor of the block whose dK comes next."""
    half_block: Cursor
    """Cursor of the next MMA's half block."""
    phase: Int32
    """Phase of the signals of the block whose dK comes next."""
    tile_phase: Int32


@role(
    produces=("mma_s", "mma_dp", "mma_dv", "mma_dk", "mma_dq"),
    consumes=(
        "load_2cta",
        "load_q",
        "load_k",
        "load_v",
        "compute_p",
        "compute_ds",
        "reduce_dq",
        "epilogue_dv",
        "epilogue_dk",
    ),
)
@cute.jit
def mma_2cta(ctx: Context) -> None:
    """All tiles, by one lane."""
    if ctx.cta_pair.rank == 0:
        with cute.arch.elect_one():
            _mma(ctx)


@cute.jit
def _mma(ctx: Context) -> None:
    start = ring.start()
    at = Cursors(start, start, start, Int32(0), Int32(0))
    tile = tiles.read_by_one_lane(ctx, at.kv)
    while tile.index >= 0:
        cute.arch.mbarrier_arrive(ctx.load_k.empty + at.kv.stage)
        at = _tile(ctx, tile, at)
        tile = tiles.read_by_one_lane(ctx, at.kv)


@cute.jit
def _tile(ctx: Context, tile: Tile, at: Cursors) -> Cursors:
    signals, stages = ctx.signals, ctx.half_blocks.ring.stages
    count = tiles.count_blocks(ctx, tile)
    wait(signals.load_2cta, at.tile_phase)
    at = _next_s(ctx, at)
    ring.wait_full(ctx.load_v, at.kv)
    if cutlass.const_expr(not ctx.plan.dq_apart):
        wait(signals.reduce_dq, at.phase ^ 1)
    # The first dP need not wait for P as dV does, whose half block comes before.
    second = at._replace(half_block=ring.after(at.half_block, stages))
    ring.wait_full(ctx.half_blocks.ring, second.half_block)
    issue_dp(ctx, at.kv, _word(ctx, ctx.plan.rows_of_do, second))
    commit(ctx, ctx.half_blocks.ring.empty + second.half_block.stage)
    wait(signals.epilogue_dv, at.tile_phase ^ 1)
    at = _next_dv(ctx, at, Boolean(False))
    at = at._replace(half_block=ring.after(at.half_block, stages))
    if count > 1:
        at = _next_s(ctx, at)
    else:
        commit(ctx, signals.mma_dv)
    wait(signals.epilogue_dk, at.tile_phase ^ 1)
    for i in cutlass.range(count, unroll=1):
        at = _block(ctx, at, i, count)
    commit(ctx, signals.mma_dk)
    return at._replace(kv=ring.after(at.kv, ctx.plan.config.kv_stages), tile_phase=at.tile_phase ^ 1)


@cute.jit
def _block(ctx: Context, at: Cursors, i: Int32, count: Int32) -> Cursors:
    """dK and dQ of block i, dV and dP of the next one, S of the one after that."""
    signals, plan = ctx.signals, ctx.plan
    wait(signals.compute_ds, at.phase)
    ring.wait_full(ctx.half_blocks.ring, at.half_block)
    issue_dk(ctx, _word(ctx, plan.columns_of_q, at), i > 0)
    at = _release(ctx, at)
    commit(ctx, ctx.load_q.empty + at.numbers.stage)
    if cutlass.const_expr(plan.dq_apart):
        wait(signals.reduce_dq, at.phase ^ 1)
    issue_dq(ctx, umma.word(plan.columns_of_k, ctx.sKt.iterator))
    at = at._replace(numbers=ring.after(at.numbers, plan.config.q_stages), phase=at.phase ^ 1)
    if i + 1 < count:
        at = _next_dv(ctx, at, Boolean(True))
        ring.wait_full(ctx.half_blocks.ring, at.half_block)
        if cutlass.const_expr(not plan.dq_apart):
            wait(signals.reduce_dq, at.phase ^ 1)
        issue_dp(ctx, at.kv, _word(ctx, plan.rows_of_do, at))
        at = _release(ctx, at)
        if i + 2 < count:
            at = _next_s(ctx, at)
        else:
            commit(ctx, signals.mma_dv)
    return at


@cute.jit
def _next_s(ctx: Context, at: Cursors) -> Cursors:
    ring.wait_full(ctx.half_blocks.ring, at.half_block)
    issue_s(ctx, at.kv, _word(ctx, ctx.plan.rows_of_q, at))
    return _release(ctx, at)


@cute.jit
def _next_dv(ctx: Context, at: Cursors, add: Boolean) -> Cursors:
    wait(ctx.signals.compute_p, at.phase)
    ring.wait_full(ctx.half_blocks.ring, at.half_block)
    issue_dv(ctx, _word(ctx, ctx.plan.columns_of_do, at), add)
    return _release(ctx, at)


def _release(ctx: Context, at: Cursors) -> Cursors:
    commit(ctx, ctx.half_blocks.ring.empty + at.half_block.stage)
    return at._replace(half_block=ring.after(at.half_block, ctx.half_blocks.ring.stages))


def _word(ctx: Context, matrix: Matrix, at: Cursors) -> Int32:
    """Low word of a half block's descriptor."""
    stages = ctx.half_blocks.stages
    size = cute.size(stages, mode=[0]) * umma.BYTES // umma.UNIT
    return umma.word(matrix, stages.iterator) + at.half_block.stage * size
