"""The MMA thread, which issues five MMAs for every block of rows.

    a tile begins with   S(0) dP(0) dV(0) S(1)
    block i              dK(i) dQ(i) dV(i+1) dP(i+1) S(i+2)

While dQ(i) is taken out of TMEM, dV(i+1) keeps the tensor core busy; while dP becomes dS, S does; while S
becomes P, dK and dQ do. Where dQ has columns of its own, dP(i+1) comes before it. All MMAs complete in the
order in which they are issued, which is what keeps P until dV has read it, and dS until dK has.
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
from .context import Context
from .issue import commit, issue_dk, issue_dp, issue_dq, issue_dv, issue_s, wait, word


class Cursors(NamedTuple):
    kv: Cursor
    q: Cursor
    """Cursor of the block whose dK comes next."""
    next_q: Cursor
    """Cursor of the block whose S comes next."""
    do: Cursor
    """Cursor of the block whose dP and dV come next."""
    phase: Int32
    """Phase of the signals of the block whose dK comes next."""
    tile_phase: Int32


@role(
    produces=("mma_s", "mma_dp", "mma_dv", "mma_dk", "mma_dq"),
    consumes=(
        "load_q",
        "load_do",
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
def mma(ctx: Context) -> None:
    """All tiles, by one lane."""
    with cute.arch.elect_one():
        _mma(ctx)


@cute.jit
def _mma(ctx: Context) -> None:
    start = ring.start()
    at = Cursors(start, start, start, start, Int32(0), Int32(0))
    tile = tiles.read_by_one_lane(ctx, at.kv)
    while tile.index >= 0:
        cute.arch.mbarrier_arrive(ctx.load_k.empty + at.kv.stage)
        at = _tile(ctx, tile, at)
        tile = tiles.read_by_one_lane(ctx, at.kv)


@cute.jit
def _tile(ctx: Context, tile: Tile, at: Cursors) -> Cursors:
    signals = ctx.signals
    count = tiles.count_blocks(ctx, tile)
    at = _next_s(ctx, at)
    ring.wait_full(ctx.load_v, at.kv)
    ring.wait_full(ctx.load_do, at.do)
    if cutlass.const_expr(not ctx.plan.dq_apart):
        wait(signals.reduce_dq, at.phase ^ 1)
    _next_dp(ctx, at)
    wait(signals.epilogue_dv, at.tile_phase ^ 1)
    _next_dv(ctx, at, Boolean(False))
    at = _release_do(ctx, at)
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
    signals, apart = ctx.signals, ctx.plan.dq_apart
    wait(signals.compute_ds, at.phase)
    issue_dk(ctx, word(ctx.plan.columns_of_q, ctx.sQ, at.q), i > 0)
    commit(ctx, ctx.load_q.empty + at.q.stage)
    more = i + 1 < count
    if cutlass.const_expr(apart):
        if more:
            ring.wait_full(ctx.load_do, at.do)
            _next_dp(ctx, at)
        wait(signals.reduce_dq, at.phase ^ 1)
    issue_dq(ctx, word(ctx.plan.columns_of_k, ctx.sK, at.kv))
    at = at._replace(q=ring.after(at.q, ctx.plan.config.q_stages), phase=at.phase ^ 1)
    if more:
        if cutlass.const_expr(not apart):
            ring.wait_full(ctx.load_do, at.do)
        _next_dv(ctx, at, Boolean(True))
        if cutlass.const_expr(not apart):
            wait(signals.reduce_dq, at.phase ^ 1)
            _next_dp(ctx, at)
        at = _release_do(ctx, at)
        if i + 2 < count:
            at = _next_s(ctx, at)
        else:
            commit(ctx, signals.mma_dv)
    return at


@cute.jit
def _next_s(ctx: Context, at: Cursors) -> Cursors:
    ring.wait_full(ctx.load_q, at.next_q)
    issue_s(ctx, at.kv, word(ctx.plan.rows_of_q, ctx.sQ, at.next_q))
    return at._replace(next_q=ring.after(at.next_q, ctx.plan.config.q_stages))


def _next_dp(ctx: Context, at: Cursors) -> None:
    issue_dp(ctx, at.kv, word(ctx.plan.rows_of_do, ctx.sdO, at.do))


@cute.jit
def _next_dv(ctx: Context, at: Cursors, add: Boolean) -> None:
    wait(ctx.signals.compute_p, at.phase)
    issue_dv(ctx, word(ctx.plan.columns_of_do, ctx.sdO, at.do), add)


def _release_do(ctx: Context, at: Cursors) -> Cursors:
    """Release dO when both of its MMAs are done."""
    commit(ctx, ctx.load_do.empty + at.do.stage)
    return at._replace(do=ring.after(at.do, ctx.plan.config.do_stages))
