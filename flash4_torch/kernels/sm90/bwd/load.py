"""The load warp: claims tiles and loads K, V, Q and dO ahead of the consumers."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, Uint32

from ....configs.types import Scope
from ...common import ring, tile_scheduler
from ...common.bwd import tiles
from ...common.bwd.loads import barrier_of, batch_of, box, copy_statistics, finish_end, signal_end
from ...common.bwd.tiles import Place, Shape, Tile
from ...common.copies import copy, evict_first, stage_bytes
from ...common.ring import Cursor, Ring
from ...common.role import role
from . import block_entries
from .context import Context

_KEYS_AT_ONCE = 12
"""Most boxes of K or V to issue without a loop, once a tile: those of D 96 and 192 were timed so."""


class Cursors(NamedTuple):
    work_idx: Cursor
    kv: Cursor
    q: Cursor
    do: Cursor
    end: Cursor


@role(
    produces=("load_q", "load_do", "load_k", "load_v", "sequence_end"),
    consumes=("write_stats", "sequence_end"),
)
@cute.jit
def load(ctx: Context) -> None:
    """Load every tile's K and V, with the work tile, and its blocks of rows in the consumers' order."""
    shape = tiles.shape(ctx)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start(), ring.start())
    work_idx = tile_scheduler.initial_work(ctx)
    if cutlass.const_expr(ctx.plan.config.preprocesses):
        at = _load_head(ctx, at, shape, _tile(ctx, shape, work_idx))
    else:
        while work_idx < shape.num_work:
            number = tile_scheduler.prefetch_work(ctx, shape.num_work)
            tile = _tile(ctx, shape, work_idx)
            if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
                at = _load_head(ctx, at, shape, tile)
            elif tiles.first_key(ctx, tile) < tile.Sk:
                at = _load_tile(ctx, at, tile)
            work_idx, work_at = tile_scheduler.await_work(ctx, number, shape.num_work, work_idx, at.work_idx)
            at = at._replace(work_idx=work_at)
    signal_end(ctx, at.kv)


@cute.jit
def _load_head(ctx: Context, at: Cursors, shape: Shape, tile: Tile) -> Cursors:
    """Load all tiles of a KV head; `tile` is its last one."""
    for _ in cutlass.range(shape.tiles_per_head, unroll=1):
        at = _load_tile(ctx, at, tile)
        tile = tile._replace(index=tile.index - 1)
    return at


@cute.jit
def _tile(ctx: Context, shape: Shape, work_idx: Uint32) -> Tile:
    """The tile of a work item.

    With `heads_inner` and a `run_length`, that many tiles of one KV head follow one another. They read the
    same rows at the same time. Longer tiles, of all heads, come before shorter ones.
    """
    if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
        return tiles.tile_of(ctx, shape, Uint32(0), work_idx)
    if cutlass.const_expr(not ctx.plan.heads_inner):
        return tiles.decode(ctx, shape, work_idx)
    step, head = Uint32(0), Uint32(0)
    if ctx.params.run_length == 0:
        step, head = tile_scheduler.decode_work(ctx, shape.tiles_per_head, shape.num_work, work_idx)
    else:
        length, heads = Uint32(ctx.params.run_length), shape.num_work // shape.tiles_per_head
        run = work_idx // (length * heads)
        rest = work_idx - run * (length * heads)
        in_run = cutlass.min(length, shape.tiles_per_head - run * length)
        head = rest // in_run
        step = run * length + rest - head * in_run
    return tiles.tile_of(ctx, shape, step, head)


@cute.jit
def _load_tile(ctx: Context, at: Cursors, tile: Tile) -> Cursors:
    end_at, keys = at.end, _keys_of(ctx, tile)
    if cutlass.const_expr(not ctx.plan.load_q_first):
        end_at = _load_keys_and_values(ctx, at.kv, end_at, tile, keys)
    if cutlass.const_expr(ctx.plan.config.preprocesses):
        # The barrier's first phase ends once, and is over for all further tiles.
        ring.wait_full(ctx.write_stats, ring.start())
    q_at, do_at = at.q, at.do
    span, heads = tiles.span_of(ctx, tile), tiles.group(ctx)
    if cutlass.const_expr(ctx.plan.heads_inner):
        place, count = tiles.first_place(ctx, tile, span), (span.last - span.first) * heads
        if cutlass.const_expr(ctx.plan.load_q_first):
            # One loop for both: with the code twice this warp would run out of registers (ptxas.md, P23).
            for e in cutlass.range(count + 1, unroll=1):
                if e == 1:
                    end_at = _load_keys_and_values(ctx, at.kv, end_at, tile, keys)
                else:
                    q_at, do_at, end_at = _load_place(ctx, q_at, do_at, end_at, tile, place)
                    place = tiles.next_place(ctx, tile, place)
        else:
            for _ in cutlass.range(count, unroll=1):
                q_at, do_at, end_at = _load_place(ctx, q_at, do_at, end_at, tile, place)
                place = tiles.next_place(ctx, tile, place)
    else:
        for h in cutlass.range(heads, unroll=1):
            head = tile.kv_head * heads + h
            blocks = tiles.blocks_of(ctx, tile, span, head)
            for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
                n, partial = tiles.block_at(ctx, blocks, position)
                q_at, do_at, end_at = _load_block(ctx, q_at, do_at, end_at, tile, head, n, partial)
    return Cursors(at.work_idx, ring.after(at.kv, ctx.plan.config.kv_stages), q_at, do_at, end_at)


@cute.jit
def _load_place(
    ctx: Context, q_at: Cursor, do_at: Cursor, end_at: Cursor, tile: Tile, place: Place
) -> tuple[Cursor, Cursor, Cursor]:
    head = tile.kv_head * tiles.group(ctx) + place.h
    return _load_block(ctx, q_at, do_at, end_at, tile, head, place.n, None)


@cute.jit
def _load_block(
    ctx: Context,
    q_at: Cursor,
    do_at: Cursor,
    end_at: Cursor,
    tile: Tile,
    head: Int32,
    n: Int32,
    partial: Boolean | None,
) -> tuple[Cursor, Cursor, Cursor]:
    """Load block n of Q and of dO. `partial`: whether the mask changes it, where a mask lists blocks."""
    of_scores = ((ctx.sLseLog2, 0),)
    if cutlass.const_expr(ctx.plan.features.large_scores):
        of_scores = (*of_scores, (ctx.sLse, 2), (ctx.sLseLow, 3))
    q = ctx.maps.load_q, ctx.maps.mQ, ctx.sQ, ctx.plan.q_share, of_scores
    do = ctx.maps.load_do, ctx.maps.mdO, ctx.sdO, ctx.plan.do_share, ((ctx.sDelta, 1),)
    listed = partial if ctx.plan.features.lists_blocks else None
    end_at = _load_rows(ctx, ctx.load_q, q_at, end_at, q, tile, head, n, listed)
    end_at = _load_rows(ctx, ctx.load_do, do_at, end_at, do, tile, head, n, None)
    return ring.after(q_at, ctx.load_q.stages), ring.after(do_at, ctx.load_do.stages), end_at


@cute.jit
def _load_keys_and_values(ctx: Context, at: Cursor, end_at: Cursor, tile: Tile, keys: Int32) -> Cursor:
    k = ctx.load_k, ctx.maps.load_k, ctx.maps.mK, ctx.sK
    v = ctx.load_v, ctx.maps.load_v, ctx.maps.mV, ctx.sV
    end_at = _load_keys(ctx, at, end_at, k, tile, keys, True)
    return _load_keys(ctx, at, end_at, v, tile, keys, False)


@cute.jit
def _load_keys(
    ctx: Context,
    at: Cursor,
    end_at: Cursor,
    what: tuple,
    tile: Tile,
    keys: Int32,
    announces_tile: cutlass.Constexpr,
) -> Cursor:
    """Load K or V of the tile, box `keys`; rows beyond the end are zeros. `announces_tile`: with its work
    tile.
    """
    edge, atom, source, target = what
    ring.wait_empty(edge, at)
    left = tile.Sk - tile.index * ctx.plan.keys
    full = barrier_of(ctx, edge, at, left, ctx.plan.keys)
    others = stage_bytes(ctx.sPeerK) if announces_tile and ctx.sPeerK is not None else 0
    with cute.arch.elect_one():
        if cutlass.const_expr(announces_tile):
            tiles.write(ctx, at, tile)
            if cutlass.const_expr(ctx.plan.load_warp_sends_order):
                tiles.write_order(ctx, at, tile)
        cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes(target) + others)
    place = tiles.kv_head_of(ctx, tile), batch_of(ctx, tile.batch)
    rows = cute.domain_offset((tile.k_offset, 0), source[(None, None, *place)])
    stage = target[None, None, at.stage]
    copy(atom, box(rows, stage, keys), stage, full, _KEYS_AT_ONCE, **evict_first())
    if cutlass.const_expr(others):
        columns, size = (
            ctx.sPeerK[None, None, at.stage],
            (ctx.plan.keys, ctx.plan.D // ctx.plan.cluster_size),
        )
        place = tile.index ^ 1, ctx.cta_pair.rank
        copy(ctx.maps.load_peer_k, cute.local_tile(rows, size, place), columns, full, _KEYS_AT_ONCE)
    return finish_end(ctx, edge, at, end_at, stage, left, ctx.plan.keys)


@cute.jit
def _keys_of(ctx: Context, tile: Tile) -> Int32:
    """The box of the tile's keys; if nobody sees these, one beyond the end: zeros, which are not read."""
    index = tile.index
    if cutlass.const_expr(ctx.plan.leaves_out_unseen_keys):
        if tiles.is_unseen(ctx, tile, tiles.span_of(ctx, tile)):
            index = cute.ceil_div(tile.Sk, ctx.plan.keys)
    return index


@cute.jit
def _load_rows(
    ctx: Context,
    edge: Ring,
    at: Cursor,
    end_at: Cursor,
    what: tuple,
    tile: Tile,
    head: Int32,
    n: Int32,
    partial: Boolean | None,
) -> Cursor:
    """Load block n of Q or dO, and of the row statistics that come with it: lse or delta.

    partial: not None for Q, where the block's entry in a mask's list comes with it.
    """
    atom, source, target, share, statistics = what
    ring.wait_empty(edge, at)
    left = tile.Sq - n * ctx.plan.queries
    full = barrier_of(ctx, edge, at, left, ctx.plan.queries)
    with cute.arch.elect_one():
        if cutlass.const_expr(partial is not None):
            block_entries.write(ctx, at, n, partial)
        cute.arch.mbarrier_arrive_and_expect_tx(
            full, stage_bytes(target) + 4 * ctx.plan.queries * len(statistics)
        )
        for numbers, which in statistics:
            copy_statistics(ctx, numbers[None, at.stage], which, tile, head, n, full)
    rows = cute.domain_offset((tile.q_offset, 0), source[None, None, head, batch_of(ctx, tile.batch)])
    stage = target[None, None, at.stage]
    rows = box(rows, stage, n)
    if cutlass.const_expr(ctx.plan.cluster_size == 1):
        copy(atom, rows, stage, full)
    else:
        # Half of the block for both CTAs; it arrives at the `full` barriers of both.
        half = (0, ctx.cta_pair.rank) if share[0] == ctx.plan.queries else (ctx.cta_pair.rank, 0)
        part, place = (cute.local_tile(x, share, half) for x in (rows, stage))
        copy(atom, part, place, full, mcast_mask=Int16((1 << ctx.plan.cluster_size) - 1))
    return finish_end(ctx, edge, at, end_at, stage, left, ctx.plan.queries)
