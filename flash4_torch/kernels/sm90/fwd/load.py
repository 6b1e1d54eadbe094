"""The loading warp: draws tiles and keeps Q, K and V coming."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from ...common import copies, persistent, ring
from ...common import forward_tile as tiles
from ...common.forward_tile import Tile
from ...common.ring import Cursor

if TYPE_CHECKING:
    from .kernel import Kernel


class Block(NamedTuple):
    """A block of keys still to be loaded."""

    n: Int32
    key_head: Int32
    batch: Int32
    first_k: Int32
    Sk: Int32


class Cursors(NamedTuple):
    ticket: Cursor
    q: Cursor
    k: Cursor
    v: Cursor
    end: Cursor


@cute.jit
def load(k: Kernel) -> None:
    """Every tile's Q and number, then its blocks from the last to the first."""
    shape = tiles.shape(k)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start(), ring.start())
    owed, owes = Block(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)), Boolean(False)
    ticket = persistent.first_ticket(k)
    while ticket < shape.tiles:
        number = persistent.request_ticket(k, shape.tiles)
        tile = tiles.decode(k, shape, ticket, at.ticket)
        if tiles.first_query(k, tile) < tile.Sq:
            k_at, v_at, end_at = at.k, at.v, at.end
            if cutlass.const_expr(k.plan.config.o_over_q and k.plan.config.q_stages == 1):
                # Q's place is free only after this V was used.
                if owes:
                    v_at, end_at = _load_v(k, v_at, end_at, owed)
                    owes = Boolean(False)
            _load_q(k, at.q, tile)
            blocks = tiles.blocks_of(k, tile)
            span = blocks.span
            for i in cutlass.range(span.last - span.first, unroll=1):
                n, _ = tiles.block_at(k, blocks, span.last - 1 - i)
                block = Block(n, tile.key_head, tile.batch, tile.first_k, tile.Sk)
                _load_k(k, k_at, block)
                k_at = ring.after(k_at, k.plan.config.kv_stages)
                if cutlass.const_expr(k.plan.config.k_ahead):
                    if owes:
                        v_at, end_at = _load_v(k, v_at, end_at, owed)
                    owed, owes = block, Boolean(True)
                else:
                    v_at, end_at = _load_v(k, v_at, end_at, block)
            at = Cursors(at.ticket, ring.after(at.q, k.plan.config.q_stages), k_at, v_at, end_at)
        ticket, ticket_at = persistent.receive_ticket(k, number, at.ticket)
        at = at._replace(ticket=ticket_at)
    if owes:
        _load_v(k, at.v, at.end, owed)
    _say_that_all_is_done(k, at.q)


@cute.jit
def _load_q(k: Kernel, at: Cursor, tile: Tile) -> None:
    """One box for each warpgroup; rows beyond the end are zeros, or another sequence's."""
    ring.wait_empty(k.load_q, at)
    full = k.load_q.full + at.stage
    warpgroups = k.plan.warpgroups
    with cute.arch.elect_one():
        tiles.write(k, at, tile)
        cute.arch.mbarrier_arrive_and_expect_tx(full, warpgroups * copies.stage_bytes(k.sQ))
    mQ = cute.domain_offset(
        ((0, tile.first_q), 0), k.maps.mQ[None, None, tile.key_head, _batch(k, tile.batch)]
    )
    for w in cutlass.range_constexpr(warpgroups):
        position = tile.heads, tile.block * warpgroups + w
        gQ = cute.local_tile(mQ, (k.plan.box, k.plan.D), (position, 0))
        stage = k.sQ[None, None, at.stage * warpgroups + w]
        copies.copy(k.maps.load_q, gQ, stage, full)


@cute.jit
def _load_k(k: Kernel, at: Cursor, block: Block) -> None:
    ring.wait_empty(k.load_k, at)
    full = k.load_k.full + at.stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, copies.stage_bytes(k.sK))
    mK = cute.domain_offset((block.first_k, 0), k.maps.mK[None, None, block.key_head, _batch(k, block.batch)])
    gK = cute.local_tile(mK, (k.plan.keys, k.plan.D), (block.n, 0))
    _copy_share(k, k.maps.load_k, gK, k.sK[None, None, at.stage], full, k.plan.k_share)


@cute.jit
def _load_v(k: Kernel, at: Cursor, end_at: Cursor, block: Block):
    ring.wait_empty(k.load_v, at)
    full, left = k.load_v.full + at.stage, block.Sk - block.n * k.plan.keys
    stage = k.sV[None, None, at.stage]
    mV = cute.domain_offset((0, block.first_k), k.maps.mV[None, None, block.key_head, _batch(k, block.batch)])
    gV = cute.local_tile(mV, (k.plan.Dv, k.plan.keys), (0, block.n))
    if k.plan.features.varlen and left < k.plan.keys:
        # The next sequence's values follow. Their weights are 0, but 0 times infinity or NaN is not.
        arrived = k.sequence_end.full
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, copies.stage_bytes(k.sV))
        _copy_share(k, k.maps.load_v, gV, stage, arrived, k.plan.v_share)
        ring.wait_full(k.sequence_end, end_at)
        copies.zero_keys(stage, left)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)
        end_at = ring.after(end_at, 1)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, copies.stage_bytes(k.sV))
        _copy_share(k, k.maps.load_v, gV, stage, full, k.plan.v_share)
    return ring.after(at, k.plan.config.kv_stages), end_at


@cute.jit
def _say_that_all_is_done(k: Kernel, at: Cursor) -> None:
    ring.wait_empty(k.load_q, at)
    with cute.arch.elect_one():
        tiles.write_end(k, at)
        cute.arch.mbarrier_arrive(k.load_q.full + at.stage)


@cute.jit
def _copy_share(
    k: Kernel,
    atom,
    source: cute.Tensor,
    target: cute.Tensor,
    full: cute.Pointer,
    share: cutlass.Constexpr,
) -> None:
    """Each CTA of a cluster copies its share for all of them; it arrives at the barriers `full` of all."""
    if cutlass.const_expr(k.plan.ctas == 1):
        copies.copy(atom, source, target, full)
    else:
        rank, everyone = k.pair.rank, Int16((1 << k.plan.ctas) - 1)
        at = (0, rank) if share[0] == cute.size(target, mode=[0]) else (rank, 0)
        part, place = (cute.local_tile(x, share, at) for x in (source, target))
        copies.copy(atom, part, place, full, mcast_mask=everyone)


def _batch(k: Kernel, batch: Int32) -> Int32:
    """Packed sequences are a batch of one."""
    return Int32(0) if k.plan.features.varlen else batch
