"""The load warp: claims tiles and loads Q, K and V ahead of the consumers.

With small pages (`plan.loads_v_apart`) a second load warp, which reads the work tiles, loads V.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from ...common import copies, ring, tile_scheduler
from ...common.fwd import pages, tiles
from ...common.fwd.pages import Places
from ...common.fwd.tiles import Blocks, Tile
from ...common.ring import Cursor
from ...common.role import role
from .context import Context


class Block(NamedTuple):
    """A block of keys whose K or V is still to be loaded."""

    n: Int32
    kv_head: Int32
    batch: Int32
    k_offset: Int32
    Sk: Int32
    places: Places | tuple[()] = ()
    """Places of its boxes, if keys are in pages."""


class Cursors(NamedTuple):
    work_idx: Cursor
    q: Cursor
    k: Cursor
    v: Cursor
    end: Cursor


@role(produces=("load_q", "load_k", "load_v", "sequence_end"), consumes=("sequence_end",))
@cute.jit
def load(ctx: Context) -> None:
    """Load every tile's Q, with the work tile, then its blocks of K and V from the last to the first."""
    shape = tiles.shape(ctx)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start(), ring.start())
    owed, owes = _no_block(ctx), Boolean(False)
    loads_v = not ctx.plan.loads_v_apart
    work_idx = tile_scheduler.initial_work(ctx)
    while work_idx < shape.num_work:
        number = tile_scheduler.prefetch_work(ctx, shape.num_work)
        tile = tiles.decode(ctx, shape, work_idx, at.work_idx)
        if tiles.first_query(ctx, tile) < tile.Sq:
            k_at, v_at, end_at = at.k, at.v, at.end
            if cutlass.const_expr(loads_v and ctx.plan.config.o_over_q and ctx.plan.config.q_stages == 1):
                # O leaves through Q's only stage, which is free only after this V was used.
                if owes:
                    v_at, end_at = _load_v(ctx, v_at, end_at, owed)
                    owes = Boolean(False)
            _load_q(ctx, at.q, tile)
            blocks = tiles.blocks_of(ctx, tile)
            span = blocks.span
            places = _look_up(ctx, tile, span.last - 1)
            for i in cutlass.range(span.last - span.first, unroll=1):
                block, places = _next_block(ctx, tile, blocks, i, places)
                _load_k(ctx, k_at, block)
                k_at = ring.after(k_at, ctx.plan.config.kv_stages)
                if cutlass.const_expr(loads_v and ctx.plan.config.k_ahead):
                    if owes:
                        v_at, end_at = _load_v(ctx, v_at, end_at, owed)
                    owed, owes = block, Boolean(True)
                elif cutlass.const_expr(loads_v):
                    v_at, end_at = _load_v(ctx, v_at, end_at, block)
            at = Cursors(at.work_idx, ring.after(at.q, ctx.plan.config.q_stages), k_at, v_at, end_at)
        work_idx, work_at = tile_scheduler.await_work(ctx, number, shape.num_work, work_idx, at.work_idx)
        at = at._replace(work_idx=work_at)
    if cutlass.const_expr(loads_v):
        if owes:
            _load_v(ctx, at.v, at.end, owed)
    _signal_end(ctx, at.q)


@role(produces=("load_v", "sequence_end"), consumes=("load_q", "sequence_end"))
@cute.jit
def load_values(ctx: Context) -> None:
    """Load the V of every tile's blocks, from the last to the first."""
    q_at, at, end_at = ring.start(), ring.start(), ring.start()
    tile = tiles.read(ctx, ctx.load_q, q_at)
    while tile.index >= 0:
        ring.release(ctx.load_q, q_at)
        blocks = tiles.blocks_of(ctx, tile)
        span = blocks.span
        places = _look_up(ctx, tile, span.last - 1)
        for i in cutlass.range(span.last - span.first, unroll=1):
            block, places = _next_block(ctx, tile, blocks, i, places)
            at, end_at = _load_v(ctx, at, end_at, block)
        q_at = ring.after(q_at, ctx.plan.config.q_stages)
        tile = tiles.read(ctx, ctx.load_q, q_at)


@cute.jit
def _next_block(ctx: Context, tile: Tile, blocks: Blocks, i: Int32, places: Places | tuple[()]):
    """The i-th block from the last on, whose places are known, and the places of the one after it."""
    n, _ = tiles.block_at(ctx, blocks, blocks.span.last - 1 - i)
    block = Block(n, tile.kv_head, tile.batch, tile.k_offset, tile.Sk, places)
    return block, _look_up(ctx, tile, n - 1)


def _no_block(ctx: Context) -> Block:
    places = Places(Int32(0), Int32(0)) if ctx.plan.paged else ()
    return Block(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), places)


def _look_up(ctx: Context, tile: Tile, n: Int32) -> Places | tuple[()]:
    """The places of block n's boxes, if keys are in pages."""
    return pages.look_up(ctx, tile, n) if ctx.plan.paged else ()


@cute.jit
def _load_q(ctx: Context, at: Cursor, tile: Tile) -> None:
    """Load a box of Q for each warpgroup; rows beyond the end are zeros, or another sequence's."""
    ring.wait_empty(ctx.load_q, at)
    full = ctx.load_q.full + at.stage
    warpgroups = ctx.plan.warpgroups
    with cute.arch.elect_one():
        tiles.write(ctx, at, tile)
        cute.arch.mbarrier_arrive_and_expect_tx(full, warpgroups * copies.stage_bytes(ctx.sQ))
    mQ = cute.domain_offset(
        ((0, tile.q_offset), 0), ctx.maps.mQ[None, None, tile.kv_head, _batch(ctx, tile.batch)]
    )
    for w in cutlass.range_constexpr(warpgroups):
        position = tile.q_head_group, tile.index * warpgroups + w
        gQ = cute.local_tile(mQ, (ctx.plan.box, ctx.plan.D), (position, 0))
        stage = ctx.sQ[None, None, at.stage * warpgroups + w]
        copies.copy(ctx.maps.load_q, gQ, stage, full)


@cute.jit
def _load_k(ctx: Context, at: Cursor, block: Block) -> None:
    ring.wait_empty(ctx.load_k, at)
    full = ctx.load_k.full + at.stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, copies.stage_bytes(ctx.sK))
    if cutlass.const_expr(ctx.plan.paged):
        stage = ctx.sK[None, None, at.stage]
        pages.copy_block(ctx, ctx.maps.load_k, ctx.maps.mK, stage, block.kv_head, block.places, full, 0)
    else:
        mK = cute.domain_offset(
            (block.k_offset, 0), ctx.maps.mK[None, None, block.kv_head, _batch(ctx, block.batch)]
        )
        gK = cute.local_tile(mK, (ctx.plan.keys, ctx.plan.D), (block.n, 0))
        _copy_share(ctx, ctx.maps.load_k, gK, ctx.sK[None, None, at.stage], full, ctx.plan.k_share)


@cute.jit
def _load_v(ctx: Context, at: Cursor, end_at: Cursor, block: Block):
    ring.wait_empty(ctx.load_v, at)
    full, left = ctx.load_v.full + at.stage, block.Sk - block.n * ctx.plan.keys
    stage, gV = ctx.sV[None, None, at.stage], None
    if cutlass.const_expr(not ctx.plan.paged):
        mV = cute.domain_offset(
            (0, block.k_offset), ctx.maps.mV[None, None, block.kv_head, _batch(ctx, block.batch)]
        )
        gV = cute.local_tile(mV, (ctx.plan.Dv, ctx.plan.keys), (0, block.n))
    if ctx.plan.features.varlen and left < ctx.plan.keys:
        # The next sequence's V follows. Its weights are 0, but 0 times infinity or NaN is not 0.
        arrived = ctx.sequence_end.full
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, copies.stage_bytes(ctx.sV))
        _copy_v(ctx, block, gV, stage, arrived)
        ring.wait_full(ctx.sequence_end, end_at)
        copies.zero_keys(stage, left)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)
        end_at = ring.after(end_at, 1)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, copies.stage_bytes(ctx.sV))
        _copy_v(ctx, block, gV, stage, full)
    return ring.after(at, ctx.plan.config.kv_stages), end_at


@cute.jit
def _copy_v(
    ctx: Context, block: Block, gV: cute.Tensor | None, stage: cute.Tensor, full: cute.Pointer
) -> None:
    """Copy a block's V, which is `gV` unless it is in pages."""
    if cutlass.const_expr(ctx.plan.paged):
        pages.copy_block(ctx, ctx.maps.load_v, ctx.maps.mV, stage, block.kv_head, block.places, full, 1)
    else:
        _copy_share(ctx, ctx.maps.load_v, gV, stage, full, ctx.plan.v_share)


@cute.jit
def _signal_end(ctx: Context, at: Cursor) -> None:
    ring.wait_empty(ctx.load_q, at)
    with cute.arch.elect_one():
        tiles.write_end(ctx, at)
        cute.arch.mbarrier_arrive(ctx.load_q.full + at.stage)


@cute.jit
def _copy_share(
    ctx: Context,
    atom,
    source: cute.Tensor,
    target: cute.Tensor,
    full: cute.Pointer,
    share: cutlass.Constexpr,
) -> None:
    """Copy this CTA's share to every CTA of the cluster, where it arrives at the `full` barrier."""
    if cutlass.const_expr(ctx.plan.cluster_size == 1):
        copies.copy(atom, source, target, full)
    else:
        rank, everyone = ctx.cta_pair.rank, Int16((1 << ctx.plan.cluster_size) - 1)
        at = (0, rank) if share[0] == cute.size(target, mode=[0]) else (rank, 0)
        part, place = (cute.local_tile(x, share, at) for x in (source, target))
        copies.copy(atom, part, place, full, mcast_mask=everyone)


def _batch(ctx: Context, batch: Int32) -> Int32:
    """The index along the batch dimension: packed sequences are a batch of one."""
    return Int32(0) if ctx.plan.features.is_packed else batch
