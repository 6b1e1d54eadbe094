"""The load warp: claims tiles and keeps K, V, Q and dO coming."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common import ring, tile_scheduler
from ...common.bwd import tiles
from ...common.bwd.loads import barrier_of, batch_of, box, copy_statistics, finish_end, signal_end
from ...common.bwd.tiles import Tile
from ...common.copies import copy, stage_bytes
from ...common.ring import Cursor, Ring
from ...common.role import role
from .context import Context


class Cursors(NamedTuple):
    work_idx: Cursor
    kv: Cursor
    q: Cursor
    do: Cursor
    end: Cursor


@role(produces=("load_q", "load_do", "load_k", "load_v", "sequence_end"), consumes=("sequence_end",))
@cute.jit
def load(ctx: Context) -> None:
    """All tiles: each one's K, V and work tile, then its blocks of rows, first to last, head after head."""
    shape = tiles.shape(ctx)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start(), ring.start())
    work_idx = tile_scheduler.initial_work(ctx)
    while work_idx < shape.num_work:
        number = tile_scheduler.prefetch_work(ctx, shape.num_work)
        tile = tiles.decode(ctx, shape, work_idx)
        if tiles.first_key(ctx, tile) < tile.Sk:
            at = _load_tile(ctx, at, tile)
        work_idx, work_at = tile_scheduler.await_work(ctx, number, shape.num_work, work_idx, at.work_idx)
        at = at._replace(work_idx=work_at)
    signal_end(ctx, at.kv)


@cute.jit
def _load_tile(ctx: Context, at: Cursors, tile: Tile) -> Cursors:
    q_at, do_at = at.q, at.do
    span, heads = tiles.span_of(ctx, tile), tiles.group(ctx)
    end_at = _load_keys(ctx, ctx.load_k, at.kv, at.end, ctx.maps.load_k, ctx.maps.mK, ctx.sK, tile, True)
    end_at = _load_keys(ctx, ctx.load_v, at.kv, end_at, ctx.maps.load_v, ctx.maps.mV, ctx.sV, tile, False)
    q, do = (ctx.maps.load_q, ctx.maps.mQ, ctx.sQ), (ctx.maps.load_do, ctx.maps.mdO, ctx.sdO)
    for h in cutlass.range(heads, unroll=1):
        head = tile.kv_head * heads + h
        blocks = tiles.blocks_of(ctx, tile, span, head)
        for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
            n, _ = tiles.block_at(ctx, blocks, position)
            end_at = _load_rows(ctx, ctx.load_q, q_at, end_at, q, tile, head, n, True)
            end_at = _load_rows(ctx, ctx.load_do, do_at, end_at, do, tile, head, n, False)
            q_at, do_at = ring.after(q_at, ctx.load_q.stages), ring.after(do_at, ctx.load_do.stages)
    return Cursors(at.work_idx, ring.after(at.kv, ctx.plan.config.kv_stages), q_at, do_at, end_at)


@cute.jit
def _load_keys(
    ctx: Context,
    edge: Ring,
    at: Cursor,
    end_at: Cursor,
    atom,
    source: cute.Tensor,
    target: cute.Tensor,
    tile: Tile,
    announces_tile: cutlass.Constexpr,
) -> Cursor:
    """K or V of the tile; rows beyond the end are zeros. `announces_tile`: its work tile comes with it."""
    ring.wait_empty(edge, at)
    left = tile.Sk - tile.index * ctx.plan.keys
    full = barrier_of(ctx, edge, at, left, ctx.plan.keys)
    with cute.arch.elect_one():
        if cutlass.const_expr(announces_tile):
            tiles.write(ctx, at, tile)
        cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes(target))
    rows = cute.domain_offset((tile.k_offset, 0), source[None, None, tile.kv_head, batch_of(ctx, tile.batch)])
    stage = target[None, None, at.stage]
    copy(atom, box(rows, stage, tile.index), stage, full)
    return finish_end(ctx, edge, at, end_at, stage, left, ctx.plan.keys)


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
    statistics: cutlass.Constexpr,
) -> Cursor:
    """Block n of Q or dO; lse and delta come with Q."""
    atom, source, target = what
    ring.wait_empty(edge, at)
    left = tile.Sq - n * ctx.plan.queries
    full = barrier_of(ctx, edge, at, left, ctx.plan.queries)
    with cute.arch.elect_one():
        more = 2 * 4 * ctx.plan.queries if statistics else 0
        cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes(target) + more)
        if cutlass.const_expr(statistics):
            for which, numbers in enumerate((ctx.sLseLog2, ctx.sDelta)):
                copy_statistics(ctx, numbers[None, at.stage], which, tile, head, n, full)
    rows = cute.domain_offset((tile.q_offset, 0), source[None, None, head, batch_of(ctx, tile.batch)])
    stage = target[None, None, at.stage]
    copy(atom, box(rows, stage, n), stage, full)
    return finish_end(ctx, edge, at, end_at, stage, left, ctx.plan.queries)
