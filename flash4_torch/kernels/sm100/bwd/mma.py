"""The thread that issues the products, five for every block of rows.

    a tile begins with   S(0) dP(0) dV(0) S(1)
    block i              dK(i) dQ(i) dV(i+1) dP(i+1) S(i+2)

While dQ(i) is taken out of tensor memory, dV(i+1) has work for the tensor core; while dP becomes dS, S has;
while S becomes P, dK and dQ. Where dQ has columns of its own, dP(i+1) comes before it. All products are done
in the order in which they are issued, which is what keeps P until dV has read it, and dS until dK has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import key_tiles as tiles
from ...common import ring
from ...common.key_tiles import Tile
from ...common.ring import Cursor
from .issue import commit, issue_dk, issue_dp, issue_dq, issue_dv, issue_s, wait, word

if TYPE_CHECKING:
    from .kernel import Kernel


class Cursors(NamedTuple):
    kv: Cursor
    q: Cursor
    """Of the block whose dK comes next."""
    next_q: Cursor
    """Of the one whose S comes next."""
    do: Cursor
    """Of the one whose dP and dV come next."""
    turn: Int32
    """Phase of the signals of the block whose dK comes next."""
    tile_turn: Int32


@cute.jit
def multiply(k: Kernel) -> None:
    """All tiles, by one lane."""
    with cute.arch.elect_one():
        _multiply(k)


@cute.jit
def _multiply(k: Kernel) -> None:
    start = ring.start()
    at = Cursors(start, start, start, start, Int32(0), Int32(0))
    tile = tiles.read_by_one_lane(k, at.kv)
    while tile.block >= 0:
        cute.arch.mbarrier_arrive(k.load_k.empty + at.kv.stage)
        at = _tile(k, tile, at)
        tile = tiles.read_by_one_lane(k, at.kv)


@cute.jit
def _tile(k: Kernel, tile: Tile, at: Cursors) -> Cursors:
    signals = k.signals
    count = tiles.count_blocks(k, tile)
    at = _next_s(k, at)
    ring.wait_full(k.load_v, at.kv)
    ring.wait_full(k.load_do, at.do)
    if cutlass.const_expr(not k.plan.dq_apart):
        wait(signals.reduce_dq, at.turn ^ 1)
    _next_dp(k, at)
    wait(signals.epilogue_dv, at.tile_turn ^ 1)
    _next_dv(k, at, Boolean(False))
    at = _release_do(k, at)
    if count > 1:
        at = _next_s(k, at)
    else:
        commit(k, signals.mma_dv)
    wait(signals.epilogue_dk, at.tile_turn ^ 1)
    for i in cutlass.range(count, unroll=1):
        at = _block(k, at, i, count)
    commit(k, signals.mma_dk)
    return at._replace(kv=ring.after(at.kv, k.plan.config.kv_stages), tile_turn=at.tile_turn ^ 1)


@cute.jit
def _block(k: Kernel, at: Cursors, i: Int32, count: Int32) -> Cursors:
    """dK and dQ of block i, dV and dP of the next one, S of the one after that."""
    signals, apart = k.signals, k.plan.dq_apart
    wait(signals.compute_ds, at.turn)
    issue_dk(k, word(k.plan.columns_of_q, k.sQ, at.q), i > 0)
    commit(k, k.load_q.empty + at.q.stage)
    more = i + 1 < count
    if cutlass.const_expr(apart):
        if more:
            ring.wait_full(k.load_do, at.do)
            _next_dp(k, at)
        wait(signals.reduce_dq, at.turn ^ 1)
    issue_dq(k, word(k.plan.columns_of_k, k.sK, at.kv))
    at = at._replace(q=ring.after(at.q, k.plan.config.q_stages), turn=at.turn ^ 1)
    if more:
        if cutlass.const_expr(not apart):
            ring.wait_full(k.load_do, at.do)
        _next_dv(k, at, Boolean(True))
        if cutlass.const_expr(not apart):
            wait(signals.reduce_dq, at.turn ^ 1)
            _next_dp(k, at)
        at = _release_do(k, at)
        if i + 2 < count:
            at = _next_s(k, at)
        else:
            commit(k, signals.mma_dv)
    return at


@cute.jit
def _next_s(k: Kernel, at: Cursors) -> Cursors:
    ring.wait_full(k.load_q, at.next_q)
    issue_s(k, at.kv, word(k.plan.rows_of_q, k.sQ, at.next_q))
    return at._replace(next_q=ring.after(at.next_q, k.plan.config.q_stages))


def _next_dp(k: Kernel, at: Cursors) -> None:
    issue_dp(k, at.kv, word(k.plan.rows_of_do, k.sdO, at.do))


@cute.jit
def _next_dv(k: Kernel, at: Cursors, add: Boolean) -> None:
    wait(k.signals.compute_p, at.turn)
    issue_dv(k, word(k.plan.columns_of_do, k.sdO, at.do), add)


def _release_do(k: Kernel, at: Cursors) -> Cursors:
    """When both of its products are done."""
    commit(k, k.load_do.empty + at.do.stage)
    return at._replace(do=ring.after(at.do, k.plan.config.do_stages))
