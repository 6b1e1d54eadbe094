"""The loading warp: draws tiles and keeps K, V, Q and dO coming."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Uint32

from ...common import key_tiles as tiles
from ...common import persistent, ring
from ...common.copies import copy, passing_by, stage_bytes
from ...common.key_loads import barrier_of, batch_of, box, copy_statistics, finish_end, say_that_all_is_done
from ...common.key_tiles import Place, Shape, Tile
from ...common.ring import Cursor, Ring

if TYPE_CHECKING:
    from .kernel import Kernel


_KEYS_AT_ONCE = 12
"""Boxes of K, once a tile: those of D 96 and 192 were timed so."""


class Cursors(NamedTuple):
    ticket: Cursor
    kv: Cursor
    q: Cursor
    do: Cursor
    end: Cursor


@cute.jit
def load(k: Kernel) -> None:
    """Every tile's K, V and number, and its blocks of rows in the order in which consumers take them."""
    shape = tiles.shape(k)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start(), ring.start())
    ticket = persistent.first_ticket(k)
    while ticket < shape.tiles:
        number = persistent.request_ticket(k, shape.tiles)
        tile = _tile(k, shape, ticket)
        if cutlass.const_expr(k.plan.whole_heads):
            for _ in cutlass.range(shape.blocks, unroll=1):
                at = _load_tile(k, at, tile)
                tile = tile._replace(block=tile.block - 1)
        elif tiles.first_key(k, tile) < tile.Sk:
            at = _load_tile(k, at, tile)
        ticket, ticket_at = persistent.receive_ticket(k, number, at.ticket)
        at = at._replace(ticket=ticket_at)
    say_that_all_is_done(k, at.kv)


@cute.jit
def _tile(k: Kernel, shape: Shape, ticket: Uint32) -> Tile:
    """Where heads are inside, `section` may be negative: so many tiles of one key head come together.

    They read the same rows at the same time. Long ones, of all heads, come before shorter ones.
    """
    if cutlass.const_expr(k.plan.whole_heads):
        return tiles.tile_of(k, shape, Uint32(0), ticket)
    if cutlass.const_expr(not k.plan.heads_inside):
        return tiles.decode(k, shape, ticket)
    step, head = Uint32(0), Uint32(0)
    if k.rule.section > 0:
        step, head = persistent.step_and_head(k, shape.blocks, shape.tiles, ticket)
    else:
        length, heads = Uint32(-k.rule.section), shape.tiles // shape.blocks
        run = ticket // (length * heads)
        rest = ticket - run * (length * heads)
        in_run = cutlass.min(length, shape.blocks - run * length)
        head = rest // in_run
        step = run * length + rest - head * in_run
    return tiles.tile_of(k, shape, step, head)


@cute.jit
def _load_tile(k: Kernel, at: Cursors, tile: Tile) -> Cursors:
    end_at = at.end
    if cutlass.const_expr(not k.plan.rows_first):
        end_at = _load_keys_and_values(k, at.kv, end_at, tile)
    q_at, do_at = at.q, at.do
    span, heads = tiles.span_of(k, tile), tiles.group(k)
    if cutlass.const_expr(k.plan.heads_inside):
        place, count = tiles.first_place(k, tile, span), (span.last - span.first) * heads
        if cutlass.const_expr(k.plan.rows_first):
            # Both in one loop: their code twice would take registers that this warp has not.
            for e in cutlass.range(count + 1, unroll=1):
                if e == 1:
                    end_at = _load_keys_and_values(k, at.kv, end_at, tile)
                else:
                    q_at, do_at, end_at = _load_place(k, q_at, do_at, end_at, tile, place)
                    place = tiles.next_place(k, tile, place)
        else:
            for _ in cutlass.range(count, unroll=1):
                q_at, do_at, end_at = _load_place(k, q_at, do_at, end_at, tile, place)
                place = tiles.next_place(k, tile, place)
    else:
        for h in cutlass.range(heads, unroll=1):
            head = tile.key_head * heads + h
            blocks = tiles.blocks_of(k, tile, span, head)
            for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
                n, _ = tiles.block_at(k, blocks, position)
                q_at, do_at, end_at = _load_block(k, q_at, do_at, end_at, tile, head, n)
    return Cursors(at.ticket, ring.after(at.kv, k.plan.config.kv_stages), q_at, do_at, end_at)


@cute.jit
def _load_place(
    k: Kernel, q_at: Cursor, do_at: Cursor, end_at: Cursor, tile: Tile, place: Place
) -> tuple[Cursor, Cursor, Cursor]:
    head = tile.key_head * tiles.group(k) + place.h
    return _load_block(k, q_at, do_at, end_at, tile, head, place.n)


@cute.jit
def _load_block(
    k: Kernel, q_at: Cursor, do_at: Cursor, end_at: Cursor, tile: Tile, head: Int32, n: Int32
) -> tuple[Cursor, Cursor, Cursor]:
    """Q and dO."""
    of_scores = ((k.sLse, 0),)
    if cutlass.const_expr(k.plan.features.float_mask):
        of_scores = (*of_scores, (k.sNaturalLse, 2), (k.sLseLow, 3))
    q = k.maps.load_q, k.maps.mQ, k.sQ, k.plan.q_share, of_scores
    do = k.maps.load_do, k.maps.mdO, k.sdO, k.plan.do_share, ((k.sDelta, 1),)
    end_at = _load_rows(k, k.load_q, q_at, end_at, q, tile, head, n)
    end_at = _load_rows(k, k.load_do, do_at, end_at, do, tile, head, n)
    return ring.after(q_at, k.load_q.stages), ring.after(do_at, k.load_do.stages), end_at


@cute.jit
def _load_keys_and_values(k: Kernel, at: Cursor, end_at: Cursor, tile: Tile) -> Cursor:
    end_at = _load_keys(k, k.load_k, at, end_at, k.maps.load_k, k.maps.mK, k.sK, tile, True)
    return _load_keys(k, k.load_v, at, end_at, k.maps.load_v, k.maps.mV, k.sV, tile, False)


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
    others = stage_bytes(k.sOtherK) if tells and k.sOtherK is not None else 0
    with cute.arch.elect_one():
        if cutlass.const_expr(tells):
            tiles.write(k, at, tile)
            if cutlass.const_expr(k.plan.tells_turns):
                tiles.write_turn(k, at, tile)
        cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes(target) + others)
    place = tiles.head_of_keys(k, tile), batch_of(k, tile.batch)
    rows = cute.domain_offset((tile.first_k, 0), source[(None, None, *place)])
    stage = target[None, None, at.stage]
    copy(atom, box(rows, stage, tile.block), stage, full, _KEYS_AT_ONCE, **passing_by())
    if cutlass.const_expr(others):
        columns, size = k.sOtherK[None, None, at.stage], (k.plan.keys, k.plan.D // k.plan.ctas)
        place = tile.block ^ 1, k.pair.rank
        copy(k.maps.load_other_k, cute.local_tile(rows, size, place), columns, full, _KEYS_AT_ONCE)
    return finish_end(k, edge, at, end_at, stage, left, k.plan.keys)


@cute.jit
def _load_rows(
    k: Kernel, edge: Ring, at: Cursor, end_at: Cursor, what: tuple, tile: Tile, head: Int32, n: Int32
) -> Cursor:
    """Block n of Q or dO, and of what there is of lse or delta."""
    atom, source, target, share, statistics = what
    ring.wait_empty(edge, at)
    left = tile.Sq - n * k.plan.queries
    full = barrier_of(k, edge, at, left, k.plan.queries)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(
            full, stage_bytes(target) + 4 * k.plan.queries * len(statistics)
        )
        for numbers, which in statistics:
            copy_statistics(k, numbers[None, at.stage], which, tile, head, n, full)
    rows = cute.domain_offset((tile.first_q, 0), source[None, None, head, batch_of(k, tile.batch)])
    stage = target[None, None, at.stage]
    rows = box(rows, stage, n)
    if cutlass.const_expr(k.plan.ctas == 1):
        copy(atom, rows, stage, full)
    else:
        # Half of it for both CTAs; it arrives at the barriers `full` of both.
        half = (0, k.pair.rank) if share[0] == k.plan.queries else (k.pair.rank, 0)
        part, place = (cute.local_tile(x, share, half) for x in (rows, stage))
        copy(atom, part, place, full, mcast_mask=Int16((1 << k.plan.ctas) - 1))
    return finish_end(k, edge, at, end_at, stage, left, k.plan.queries)
