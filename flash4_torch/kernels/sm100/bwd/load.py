"""The loading warp: draws tiles and keeps K, V, Q and dO coming."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common import key_tiles as tiles
from ...common import persistent, ring
from ...common.copies import copy, stage_bytes
from ...common.key_loads import barrier_of, batch_of, box, copy_statistics, finish_end, say_that_all_is_done
from ...common.key_tiles import Tile
from ...common.ring import Cursor, Ring

if TYPE_CHECKING:
    from .kernel import Kernel


class Cursors(NamedTuple):
    ticket: Cursor
    kv: Cursor
    q: Cursor
    do: Cursor
    end: Cursor


@cute.jit
def load(k: Kernel) -> None:
    """Every tile's K, V and number, then its blocks of rows from the first to the last, head after head."""
    shape = tiles.shape(k)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start(), ring.start())
    ticket = persistent.first_ticket(k)
    while ticket < shape.tiles:
        number = persistent.request_ticket(k, shape.tiles)
        tile = tiles.decode(k, shape, ticket)
        if tiles.first_key(k, tile) < tile.Sk:
            at = _load_tile(k, at, tile)
        ticket, ticket_at = persistent.receive_ticket(k, number, at.ticket)
        at = at._replace(ticket=ticket_at)
    say_that_all_is_done(k, at.kv)


@cute.jit
def _load_tile(k: Kernel, at: Cursors, tile: Tile) -> Cursors:
    q_at, do_at = at.q, at.do
    span, heads = tiles.span_of(k, tile), tiles.group(k)
    end_at = _load_keys(k, k.load_k, at.kv, at.end, k.maps.load_k, k.maps.mK, k.sK, tile, True)
    end_at = _load_keys(k, k.load_v, at.kv, end_at, k.maps.load_v, k.maps.mV, k.sV, tile, False)
    q, do = (k.maps.load_q, k.maps.mQ, k.sQ), (k.maps.load_do, k.maps.mdO, k.sdO)
    for h in cutlass.range(heads, unroll=1):
        head = tile.key_head * heads + h
        blocks = tiles.blocks_of(k, tile, span, head)
        for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
            n, _ = tiles.block_at(k, blocks, position)
            end_at = _load_rows(k, k.load_q, q_at, end_at, q, tile, head, n, True)
            end_at = _load_rows(k, k.load_do, do_at, end_at, do, tile, head, n, False)
            q_at, do_at = ring.after(q_at, k.load_q.stages), ring.after(do_at, k.load_do.stages)
    return Cursors(at.ticket, ring.after(at.kv, k.plan.config.kv_stages), q_at, do_at, end_at)


@cute.jit
def _load_keys(
    k: Kernel,
    edge: Ring,
    at: Cursor,
    end_at: Cursor,
    atom,
    source: cute.Tensor,
    target: cute.Tensor,
    tile: Tile,
    tells: cutlass.Constexpr,
) -> Cursor:
    """K or V of the tile; rows beyond the end are zeros. `tells`: which tile it is comes with it."""
    ring.wait_empty(edge, at)
    left = tile.Sk - tile.block * k.plan.keys
    full = barrier_of(k, edge, at, left, k.plan.keys)
    with cute.arch.elect_one():
        if cutlass.const_expr(tells):
            tiles.write(k, at, tile)
        cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes(target))
    rows = cute.domain_offset((tile.first_k, 0), source[None, None, tile.key_head, batch_of(k, tile.batch)])
    stage = target[None, None, at.stage]
    copy(atom, box(rows, stage, tile.block), stage, full)
    return finish_end(k, edge, at, end_at, stage, left, k.plan.keys)


@cute.jit
def _load_rows(
    k: Kernel,
    edge: Ring,
    at: Cursor,
    end_at: Cursor,
    what: tuple,
    tile: Tile,
    head: Int32,
    n: Int32,
    statistics: cutlass.Constexpr,
) -> Cursor:
    """Block n of Q or dO; lse and delta come with Q."""
    atom, source, target = what
    ring.wait_empty(edge, at)
    left = tile.Sq - n * k.plan.queries
    full = barrier_of(k, edge, at, left, k.plan.queries)
    with cute.arch.elect_one():
        more = 2 * 4 * k.plan.queries if statistics else 0
        cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes(target) + more)
        if cutlass.const_expr(statistics):
            for which, numbers in enumerate((k.sLse, k.sDelta)):
                copy_statistics(k, numbers[None, at.stage], which, tile, head, n, full)
    rows = cute.domain_offset((tile.first_q, 0), source[None, None, head, batch_of(k, tile.batch)])
    stage = target[None, None, at.stage]
    copy(atom, box(rows, stage, n), stage, full)
    return finish_end(k, edge, at, end_at, stage, left, k.plan.queries)
