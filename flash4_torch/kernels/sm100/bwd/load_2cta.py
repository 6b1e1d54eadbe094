"""The load warp of each CTA of a pair: its own K and V, half of the columns of both K, half blocks of rows.

Every MMA of a pair takes half of the rows of its second operand from each CTA. So Q is loaded twice, half of
a block's rows for S and half of its columns for dK, and dO likewise for dP and dV: half blocks of equal
size, in one ring, in the order of the MMAs. All but lse and delta arrive at the barriers of CTA 0, whose
thread issues the MMAs.

CTA 0 expects the bytes of both. With packed sequences each CTA expects its own, as the end of a sequence
takes another path: its copy arrives at a barrier here, what follows the end is zeroed, then this warp arrives
in CTA 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import nvvm

from ...common import ring, tile_scheduler
from ...common.bwd import tiles
from ...common.bwd.loads import batch_of, copy_statistics, signal_end, zero_rows
from ...common.bwd.tiles import Tile
from ...common.copies import copy, stage_bytes
from ...common.ring import Cursor
from ...common.role import role
from .context import Context


class Cursors(NamedTuple):
    work_idx: Cursor
    kv: Cursor
    numbers: Cursor
    half_block: Cursor
    end: Cursor


class Source(NamedTuple):
    """Source of a copy: its atoms, and the tensor that it reads."""

    atom: Any
    to_here: Any
    """The same atom for the end of a packed sequence, which arrives in this CTA."""
    matrix: cute.Tensor


class Block(NamedTuple):
    """A block of rows of a query head."""

    head: Int32
    n: Int32


@role(produces=("load_q", "load_k", "load_v", "load_2cta", "sequence_end"), consumes=("sequence_end",))
@cute.jit
def load_2cta(ctx: Context) -> None:
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
    """Load a tile. Q by columns comes one block later, as dK follows S of the next block."""
    at = _load_keys(ctx, at, tile)
    span, heads = tiles.span_of(ctx, tile), tiles.group(ctx)
    before, started = Block(Int32(0), Int32(0)), Boolean(False)
    for h in cutlass.range(heads, unroll=1):
        head = tile.kv_head * heads + h
        blocks = tiles.blocks_of(ctx, tile, span, head)
        for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
            n, _ = tiles.block_at(ctx, blocks, position)
            block = Block(head, n)
            at = _load_numbers(ctx, at, tile, block)
            at = _load_q_rows(ctx, at, tile, block)
            if started:
                at = _load_q_columns(ctx, at, tile, before)
            at = _load_do(ctx, at, tile, block)
            before, started = block, Boolean(True)
    at = _load_q_columns(ctx, at, tile, before)
    return at._replace(kv=ring.after(at.kv, ctx.plan.config.kv_stages))


@cute.jit
def _load_keys(ctx: Context, at: Cursors, tile: Tile) -> Cursors:
    """The work tile, K, and half of the columns of both K; then V."""
    maps, kv, head, end = ctx.maps, at.kv, tile.kv_head, at.end
    ring.wait_empty(ctx.load_k, kv)
    with cute.arch.elect_one():
        tiles.write(ctx, kv, tile)
        cute.arch.mbarrier_arrive(ctx.load_k.full + kv.stage)
    full, own = ctx.signals.load_2cta, (tile.index, 0)
    _expect(ctx, full, stage_bytes(ctx.sK) + stage_bytes(ctx.sKt))
    source = Source(maps.load_k, maps.end_k, maps.mK)
    end = _copy(ctx, source, tile, head, ctx.sK[None, None, kv.stage], own, tile.k_offset, tile.Sk, full, end)
    source = Source(maps.load_k_columns, maps.end_k_columns, maps.mK)
    place = tile.index // ctx.plan.cluster_size, ctx.cta_pair.rank
    end = _copy(ctx, source, tile, head, ctx.sKt, place, tile.k_offset, tile.Sk, full, end)
    ring.wait_empty(ctx.load_v, kv)
    full = ctx.load_v.full + kv.stage
    _expect(ctx, full, stage_bytes(ctx.sV))
    source = Source(maps.load_v, maps.end_v, maps.mV)
    end = _copy(ctx, source, tile, head, ctx.sV[None, None, kv.stage], own, tile.k_offset, tile.Sk, full, end)
    return at._replace(end=end)


@cute.jit
def _load_numbers(ctx: Context, at: Cursors, tile: Tile, block: Block) -> Cursors:
    """lse and delta of all of a block's rows, for the warps of this CTA."""
    edge, here = ctx.load_q, at.numbers
    ring.wait_empty(edge, here)
    full = edge.full + here.stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * 4 * ctx.plan.queries)
        for which, numbers in enumerate((ctx.sLseLog2, ctx.sDelta)):
            copy_statistics(ctx, numbers[None, here.stage], which, tile, block.head, block.n, full)
    return at._replace(numbers=ring.after(here, edge.stages))


@cute.jit
def _load_q_rows(ctx: Context, at: Cursors, tile: Tile, block: Block) -> Cursors:
    source = Source(ctx.maps.load_q, ctx.maps.end_q, ctx.maps.mQ)
    return _load_half_block(ctx, at, tile, block, source, ctx.half_blocks.q, _half_of_rows(ctx, block))


@cute.jit
def _load_q_columns(ctx: Context, at: Cursors, tile: Tile, block: Block) -> Cursors:
    source = Source(ctx.maps.load_q_columns, ctx.maps.end_q_columns, ctx.maps.mQ)
    return _load_half_block(
        ctx, at, tile, block, source, ctx.half_blocks.q_columns, (block.n, ctx.cta_pair.rank)
    )


@cute.jit
def _load_do(ctx: Context, at: Cursors, tile: Tile, block: Block) -> Cursors:
    """dO for dV, by columns, then for dP, by rows."""
    maps, half_blocks = ctx.maps, ctx.half_blocks
    source = Source(maps.load_do_columns, maps.end_do_columns, maps.mdO)
    at = _load_half_block(ctx, at, tile, block, source, half_blocks.do_columns, (block.n, ctx.cta_pair.rank))
    source = Source(maps.load_do, maps.end_do, maps.mdO)
    return _load_half_block(ctx, at, tile, block, source, half_blocks.do, _half_of_rows(ctx, block))


def _half_of_rows(ctx: Context, block: Block) -> tuple:
    return block.n * ctx.plan.cluster_size + ctx.cta_pair.rank, 0


@cute.jit
def _load_half_block(
    ctx: Context, at: Cursors, tile: Tile, block: Block, source: Source, layout, place: tuple
) -> Cursors:
    edge, here = ctx.half_blocks.ring, at.half_block
    ring.wait_empty(edge, here)
    start = cute.recast_ptr(ctx.half_blocks.stages[None, here.stage].iterator, layout.inner, ctx.plan.dtype)
    stage = cute.make_tensor(start, cute.select(layout.outer, mode=[0, 1]))
    full = edge.full + here.stage
    _expect(ctx, full, cute.size(stage) * 2)
    end = _copy(ctx, source, tile, block.head, stage, place, tile.q_offset, tile.Sq, full, at.end)
    return at._replace(half_block=ring.after(here, edge.stages), end=end)


@cute.jit
def _expect(ctx: Context, full: cute.Pointer, size: cutlass.Constexpr) -> None:
    """Expect a copy's bytes, unless sequences are packed: what both CTAs load arrives in CTA 0."""
    if cutlass.const_expr(not ctx.plan.features.varlen):
        if ctx.cta_pair.rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size * ctx.plan.cluster_size)


@cute.jit
def _copy(
    ctx: Context,
    source: Source,
    tile: Tile,
    head: Int32,
    stage: cute.Tensor,
    place: tuple,
    first: Int32,
    count: Int32,
    full: cute.Pointer,
    end_at: Cursor,
) -> Cursor:
    """Copy the box at `place` of the sequence's rows, which are `count` rows from `first` on."""
    box = tuple(cute.size(stage, mode=[i]) for i in range(2))
    rows = source.matrix[None, None, head, batch_of(ctx, tile.batch)]
    if cutlass.const_expr(not ctx.plan.features.varlen):
        copy(source.atom, cute.local_tile(rows, box, place), stage, full)
    else:
        rows, size = cute.domain_offset((first, 0), rows), cute.size(stage) * 2
        left, wanted = count - place[0] * box[0], cute.local_tile(rows, box, place)
        if left >= box[0]:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size, 0)
            copy(source.atom, wanted, stage, full)
        else:
            end_at = _copy_end(ctx, source.to_here, wanted, stage, left, full, end_at)
    return end_at


@cute.jit
def _copy_end(
    ctx: Context, atom, box: cute.Tensor, stage: cute.Tensor, left: Int32, full: cute.Pointer, at: Cursor
) -> Cursor:
    """Copy an end and zero what follows it: weights there are 0, but 0 times infinity or NaN is not."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ctx.sequence_end.full, cute.size(stage) * 2)
    copy(atom, box, stage, ctx.sequence_end.full)
    ring.wait_full(ctx.sequence_end, at)
    zero_rows(stage, left)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(full, 0, scope=nvvm.MemScopeKind.CLUSTER)
    return ring.after(at, 1)
