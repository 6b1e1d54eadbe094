"""The load warp: claims tiles and keeps Q, K and V coming."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common import copies, ring, tile_scheduler
from ...common.fwd import pages, tiles
from ...common.fwd.pages import Places
from ...common.fwd.tiles import Tile
from ...common.ring import Cursor
from ...common.role import role
from .context import Context
from .plan import TILE_STAGES


class Cursors(NamedTuple):
    work_idx: Cursor
    tile: Cursor
    q: Cursor
    kv: Cursor
    end: Cursor


@role(produces=("tile", "load_q", "load_kv", "sequence_end"), consumes=("sequence_end",))
@cute.jit
def load(ctx: Context) -> None:
    """All tiles: each one's work tile and Q, then its blocks from the last to the first."""
    shape = tiles.shape(ctx)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start(), ring.start())
    work_idx = tile_scheduler.initial_work(ctx)
    while work_idx < shape.num_work:
        number = tile_scheduler.prefetch_work(ctx, shape.num_work)
        tile = tiles.decode(ctx, shape, work_idx, at.work_idx)
        if tiles.first_query(ctx, tile) < tile.Sq:
            at = _tile(ctx, tile, at)
        work_idx, work_at = tile_scheduler.await_work(ctx, number, shape.num_work, work_idx, at.work_idx)
        at = at._replace(work_idx=work_at)
    ring.wait_empty(ctx.tile, at.tile)
    with cute.arch.elect_one():
        tiles.write_end(ctx, at.tile)
        cute.arch.mbarrier_arrive(ctx.tile.full + at.tile.stage)
    if cutlass.const_expr(ctx.plan.cluster_size > 1):
        _wait_for_all(ctx, at.kv)


@cute.jit
def _wait_for_all(ctx: Context, at: Cursor) -> None:
    """Wait until the last MMAs have arrived here: the peer's could otherwise find that this CTA has left."""
    for _ in cutlass.range(ctx.load_kv.stages, unroll=1):
        ring.wait_empty(ctx.load_kv, at)
        at = ring.after(at, ctx.load_kv.stages)


@cute.jit
def _tile(ctx: Context, tile: Tile, at: Cursors) -> Cursors:
    """A tile, in the order in which MMAs need it: Q of the first tile, K, Q of the second, V, K, V, ..."""
    ring.wait_empty(ctx.tile, at.tile)
    with cute.arch.elect_one():
        tiles.write(ctx, at.tile, tile)
        cute.arch.mbarrier_arrive(ctx.tile.full + at.tile.stage)
    blocks = tiles.blocks_of(ctx, tile)
    span = blocks.span
    n, _ = tiles.block_at(ctx, blocks, span.last - 1)
    q_at, kv_at, end_at = at.q, at.kv, at.end
    places = _look_up(ctx, tile, n)
    _load_q(ctx, q_at, tile, 0)
    kv_at = _load_k(ctx, kv_at, tile, n, places)
    for t in cutlass.range_constexpr(1, ctx.plan.q_tiles):
        _load_q(ctx, q_at, tile, t)
    next_places = _look_up(ctx, tile, n - 1)
    kv_at, end_at = _load_v(ctx, kv_at, end_at, tile, n, places)
    for i in cutlass.range(1, span.last - span.first, unroll=1):
        n, _ = tiles.block_at(ctx, blocks, span.last - 1 - i)
        places, next_places = next_places, _look_up(ctx, tile, n - 1)
        kv_at = _load_k(ctx, kv_at, tile, n, places)
        kv_at, end_at = _load_v(ctx, kv_at, end_at, tile, n, places)
    return Cursors(at.work_idx, ring.after(at.tile, TILE_STAGES), ring.after(q_at, 1), kv_at, end_at)


def _look_up(ctx: Context, tile: Tile, n: Int32) -> Places | tuple[()]:
    """The places of block n's boxes, if keys are in pages."""
    return pages.look_up(ctx, tile, n) if ctx.plan.paged else ()


@cute.jit
def _expect(ctx: Context, full: cute.Pointer, size: cutlass.Constexpr) -> None:
    """Expect a copy's bytes: what both CTAs of a pair load arrives in CTA 0."""
    if cutlass.const_expr(ctx.plan.cluster_size == 1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    elif ctx.cta_pair.rank == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size * ctx.plan.cluster_size)


@cute.jit
def _load_q(ctx: Context, at: Cursor, tile: Tile, t: cutlass.Constexpr) -> None:
    """Q in one box; rows beyond the end are zeros, or another sequence's. `at` has the phase of all tiles."""
    ring.wait_empty(ctx.load_q, Cursor(Int32(t), at.phase))
    full = ctx.load_q.full + t
    _expect(ctx, full, copies.stage_bytes(ctx.sQ))
    mQ = cute.domain_offset(
        ((0, tile.q_offset), 0), ctx.maps.mQ[None, None, tile.kv_head, _batch(ctx, tile.batch)]
    )
    position = tile.q_head_group, tile.index * ctx.plan.q_tiles + t
    gQ = cute.local_tile(mQ, (ctx.plan.box, ctx.plan.D), (position, 0))
    copies.copy(ctx.maps.load_q, gQ, ctx.sQ[None, None, t], full)


@cute.jit
def _load_k(ctx: Context, at: Cursor, tile: Tile, n: Int32, places: Places | tuple[()]) -> Cursor:
    ring.wait_empty(ctx.load_kv, at)
    full, stage = ctx.load_kv.full + at.stage, _stage(ctx, ctx.layouts.k, at)
    _expect(ctx, full, copies.stage_bytes(stage))
    if cutlass.const_expr(ctx.plan.paged):
        own = stage[None, None, 0]
        pages.copy_block(ctx, ctx.maps.load_k, ctx.maps.mK, own, tile.kv_head, places, full, 0)
    else:
        mK = cute.domain_offset(
            (tile.k_offset, 0), ctx.maps.mK[None, None, tile.kv_head, _batch(ctx, tile.batch)]
        )
        gK = cute.local_tile(
            mK, (ctx.plan.scores.b.rows, ctx.plan.D), (n * ctx.plan.cluster_size + _rank(ctx), 0)
        )
        copies.copy(ctx.maps.load_k, gK, stage[None, None, 0], full)
    return ring.after(at, ctx.load_kv.stages)


@cute.jit
def _load_v(ctx: Context, at: Cursor, end_at: Cursor, tile: Tile, n: Int32, places: Places | tuple[()]):
    ring.wait_empty(ctx.load_kv, at)
    full, left = ctx.load_kv.full + at.stage, tile.Sk - n * ctx.plan.keys
    stage, gV = _stage(ctx, ctx.layouts.v, at), None
    if cutlass.const_expr(not ctx.plan.paged):
        mV = cute.domain_offset(
            (0, tile.k_offset), ctx.maps.mV[None, None, tile.kv_head, _batch(ctx, tile.batch)]
        )
        gV = cute.local_tile(mV, (ctx.plan.output.b.columns, ctx.plan.keys), (_rank(ctx), n))
    if ctx.plan.features.varlen and left < ctx.plan.keys:
        # The next sequence's values follow. Their weights are 0, but 0 times infinity or NaN is not.
        arrived = ctx.sequence_end.full
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, copies.stage_bytes(stage))
        _copy_v(ctx, gV, stage[None, None, 0], tile, places, arrived)
        ring.wait_full(ctx.sequence_end, end_at)
        copies.zero_keys(stage[None, None, 0], left)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)
        end_at = ring.after(end_at, 1)
    else:
        _expect(ctx, full, copies.stage_bytes(stage))
        _copy_v(ctx, gV, stage[None, None, 0], tile, places, full)
    return ring.after(at, ctx.load_kv.stages), end_at


@cute.jit
def _copy_v(
    ctx: Context,
    gV: cute.Tensor | None,
    stage: cute.Tensor,
    tile: Tile,
    places: Places | tuple[()],
    full: cute.Pointer,
) -> None:
    """Copy a block's V, which is `gV` unless it is in pages."""
    if cutlass.const_expr(ctx.plan.paged):
        pages.copy_block(ctx, ctx.maps.load_v, ctx.maps.mV, stage, tile.kv_head, places, full, 1)
    else:
        copies.copy(ctx.maps.load_v, gV, stage, full)


def _stage(ctx: Context, layout: cute.ComposedLayout, at: Cursor) -> cute.Tensor:
    """A stage of K or V, (keys, D, 1) or (Dv, keys, 1); in a CTA pair half of the keys, or of Dv."""
    start = ctx.sKV + at.stage * ctx.plan.kv_elements
    return cute.make_tensor(cute.recast_ptr(start, layout.inner), layout.outer)


def _rank(ctx: Context) -> Int32 | int:
    """Half of a block that this CTA loads, 0 or 1."""
    return 0 if ctx.plan.cluster_size == 1 else ctx.cta_pair.rank


def _batch(ctx: Context, batch: Int32) -> Int32:
    """Packed sequences are a batch of one."""
    return Int32(0) if ctx.plan.features.is_packed else batch
