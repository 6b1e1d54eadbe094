"""The loading warp: draws tiles and keeps Q, K and V coming."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common import copies, persistent, ring
from ...common import forward_tile as tiles
from ...common.forward_tile import Tile
from ...common.ring import Cursor
from .plan import TILE_STAGES

if TYPE_CHECKING:
    from .kernel import Kernel


class Cursors(NamedTuple):
    ticket: Cursor
    tile: Cursor
    q: Cursor
    kv: Cursor
    end: Cursor


@cute.jit
def load(k: Kernel) -> None:
    """Every tile's number and Q, then its blocks from the last to the first."""
    shape = tiles.shape(k)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start(), ring.start())
    ticket = persistent.first_ticket(k)
    while ticket < shape.tiles:
        number = persistent.request_ticket(k, shape.tiles)
        tile = tiles.decode(k, shape, ticket, at.ticket)
        if tiles.first_query(k, tile) < tile.Sq:
            at = _tile(k, tile, at)
        ticket, ticket_at = persistent.receive_ticket(k, number, at.ticket)
        at = at._replace(ticket=ticket_at)
    ring.wait_empty(k.tile, at.tile)
    with cute.arch.elect_one():
        tiles.write_end(k, at.tile)
        cute.arch.mbarrier_arrive(k.tile.full + at.tile.stage)
    if cutlass.const_expr(k.plan.ctas > 1):
        _wait_for_all(k, at.kv)


@cute.jit
def _wait_for_all(k: Kernel, at: Cursor) -> None:
    """Until the last products have arrived here: those of the other CTA could find that this one has left."""
    for _ in cutlass.range(k.load_kv.stages, unroll=1):
        ring.wait_empty(k.load_kv, at)
        at = ring.after(at, k.load_kv.stages)


@cute.jit
def _tile(k: Kernel, tile: Tile, at: Cursors) -> Cursors:
    """In the order in which the products ask for it: Q of the first tile, K, Q of the second, V, K, V, ..."""
    ring.wait_empty(k.tile, at.tile)
    with cute.arch.elect_one():
        tiles.write(k, at.tile, tile)
        cute.arch.mbarrier_arrive(k.tile.full + at.tile.stage)
    blocks = tiles.blocks_of(k, tile)
    span = blocks.span
    n, _ = tiles.block_at(k, blocks, span.last - 1)
    q_at, kv_at, end_at = at.q, at.kv, at.end
    _load_q(k, q_at, tile, 0)
    kv_at = _load_k(k, kv_at, tile, n)
    for t in cutlass.range_constexpr(1, k.plan.q_tiles):
        _load_q(k, q_at, tile, t)
    kv_at, end_at = _load_v(k, kv_at, end_at, tile, n)
    for i in cutlass.range(1, span.last - span.first, unroll=1):
        n, _ = tiles.block_at(k, blocks, span.last - 1 - i)
        kv_at = _load_k(k, kv_at, tile, n)
        kv_at, end_at = _load_v(k, kv_at, end_at, tile, n)
    return Cursors(at.ticket, ring.after(at.tile, TILE_STAGES), ring.after(q_at, 1), kv_at, end_at)


@cute.jit
def _expect(k: Kernel, full: cute.Pointer, size: cutlass.Constexpr) -> None:
    """What both CTAs of a pair load arrives in the first one."""
    if cutlass.const_expr(k.plan.ctas == 1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    elif k.pair.rank == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size * k.plan.ctas)


@cute.jit
def _load_q(k: Kernel, at: Cursor, tile: Tile, t: cutlass.Constexpr) -> None:
    """One box; rows beyond the end are zeros, or another sequence's. `at` gives the phase of all tiles."""
    ring.wait_empty(k.load_q, Cursor(Int32(t), at.phase))
    full = k.load_q.full + t
    _expect(k, full, copies.stage_bytes(k.sQ))
    mQ = cute.domain_offset(
        ((0, tile.first_q), 0), k.maps.mQ[None, None, tile.key_head, _batch(k, tile.batch)]
    )
    position = tile.heads, tile.block * k.plan.q_tiles + t
    gQ = cute.local_tile(mQ, (k.plan.box, k.plan.D), (position, 0))
    copies.copy(k.maps.load_q, gQ, k.sQ[None, None, t], full)


@cute.jit
def _load_k(k: Kernel, at: Cursor, tile: Tile, n: Int32) -> Cursor:
    ring.wait_empty(k.load_kv, at)
    full, stage = k.load_kv.full + at.stage, _stage(k, k.layouts.k, at)
    _expect(k, full, copies.stage_bytes(stage))
    mK = cute.domain_offset((tile.first_k, 0), k.maps.mK[None, None, tile.key_head, _batch(k, tile.batch)])
    gK = cute.local_tile(mK, (k.plan.scores.b.rows, k.plan.D), (n * k.plan.ctas + _rank(k), 0))
    copies.copy(k.maps.load_k, gK, stage[None, None, 0], full)
    return ring.after(at, k.load_kv.stages)


@cute.jit
def _load_v(k: Kernel, at: Cursor, end_at: Cursor, tile: Tile, n: Int32):
    ring.wait_empty(k.load_kv, at)
    full, left = k.load_kv.full + at.stage, tile.Sk - n * k.plan.keys
    stage = _stage(k, k.layouts.v, at)
    mV = cute.domain_offset((0, tile.first_k), k.maps.mV[None, None, tile.key_head, _batch(k, tile.batch)])
    gV = cute.local_tile(mV, (k.plan.output.b.columns, k.plan.keys), (_rank(k), n))
    if k.plan.features.varlen and left < k.plan.keys:
        # The next sequence's values follow. Their weights are 0, but 0 times infinity or NaN is not.
        arrived = k.sequence_end.full
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, copies.stage_bytes(stage))
        copies.copy(k.maps.load_v, gV, stage[None, None, 0], arrived)
        ring.wait_full(k.sequence_end, end_at)
        copies.zero_keys(stage[None, None, 0], left)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)
        end_at = ring.after(end_at, 1)
    else:
        _expect(k, full, copies.stage_bytes(stage))
        copies.copy(k.maps.load_v, gV, stage[None, None, 0], full)
    return ring.after(at, k.load_kv.stages), end_at


def _stage(k: Kernel, layout: cute.ComposedLayout, at: Cursor) -> cute.Tensor:
    """(keys, D, 1) or (Dv, keys, 1), of a pair half of the keys, or of Dv."""
    start = k.sKV + at.stage * k.plan.kv_elements
    return cute.make_tensor(cute.recast_ptr(start, layout.inner), layout.outer)


def _rank(k: Kernel) -> Int32 | int:
    """Which half of a block this CTA loads."""
    return 0 if k.plan.ctas == 1 else k.pair.rank


def _batch(k: Kernel, batch: Int32) -> Int32:
    """Packed sequences are a batch of one."""
    return Int32(0) if k.plan.features.varlen else batch
