"""The reduce warps: take dQ out of TMEM, and through SMEM add it up in global memory.

Each warp has 32 rows, in a CTA pair half of their columns, and is independent of the others: its copies are
its own, 32 columns each.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...common import ring
from ...common.bwd import dq_semaphore, tiles
from ...common.bwd.dq_blocks import VECTOR
from ...common.bwd.dq_semaphore import Step
from ...common.bwd.tiles import Tile
from ...common.ring import Cursor
from ...common.role import role
from ...common.warps import WARP
from .. import tmem
from .context import Context
from .plan import PIECE, REDUCE_WARPS
from .signal import arrive


class Cursors(NamedTuple):
    kv: Cursor
    phase: Int32
    """Phase of the block's signals."""


@role(produces=("reduce_dq",), consumes=("load_k", "mma_dq"))
@cute.jit
def reduce(ctx: Context, warp: Int32) -> None:
    at = Cursors(ring.start(), Int32(0))
    tile = tiles.read(ctx, at.kv)
    while tile.index >= 0:
        ring.release(ctx.load_k, at.kv)
        at = _tile(ctx, warp, tile, at)
        tile = tiles.read(ctx, at.kv)
    cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def _tile(ctx: Context, warp: Int32, tile: Tile, at: Cursors) -> Cursors:
    span, heads = tiles.span_of(ctx, tile), tiles.group(ctx)
    for h in cutlass.range(heads, unroll=1):
        head = tile.kv_head * heads + h
        blocks = tiles.blocks_of(ctx, tile, span, head)
        for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
            n, _ = tiles.block_at(ctx, blocks, position)
            _add(ctx, warp, tile, head, n, at)
            at = at._replace(phase=at.phase ^ 1)
    return at._replace(kv=ring.after(at.kv, ctx.plan.config.kv_stages))


@cute.jit
def _add(ctx: Context, warp: Int32, tile: Tile, head: Int32, n: Int32, at: Cursors) -> None:
    """Add the warp's rows of block n."""
    plan, columns = ctx.plan, ctx.plan.dq_columns
    row, count = tiles.row_of_workspace(ctx, tile, head), ctx.dq_acc.shape[-2]
    block = Int64(row) * count + (tiles.first_block(ctx, tile) + n)
    # In a CTA pair: the CTA's half of the rows, in each half of the lanes half of the columns.
    bands, part = REDUCE_WARPS // plan.cluster_size, Int32(0)
    band = warp
    if cutlass.const_expr(plan.cluster_size > 1):
        band, part = ctx.cta_pair.rank * bands + warp % bands, warp // bands
    start = block * plan.sums.floats + Int64((band * plan.sums.columns + part * columns) * WARP)
    target = (ctx.dq_acc.iterator + start).toint()
    step = None
    if cutlass.const_expr(plan.features.deterministic):
        step = _step_of(ctx, warp, tile, n, block)

    cute.arch.mbarrier_wait(ctx.signals.mma_dq, at.phase)
    tmem.fence_after()
    source, together = tmem.own_lanes(Int32(plan.dq_at), warp), plan.dq_together
    for first in cutlass.range_constexpr(0, columns, together):
        widths = _widths(min(together, columns - first))
        pieces = [cute.make_rmem_tensor(width, Float32) for width in widths]
        for i, piece in enumerate(pieces):
            tmem.load(source + first + sum(widths[:i]), piece)
        tmem.wait_loads()
        if cutlass.const_expr(first + together >= columns):
            arrive(ctx, ctx.signals.reduce_dq)
        if cutlass.const_expr(first == 0 and step is not None):
            if cute.arch.lane_idx() == 0:
                dq_semaphore.wait(step.address, step.awaited)
        for i, piece in enumerate(pieces):
            column = first + sum(widths[:i])
            _copy_piece(ctx, warp, piece, target + column * (WARP * 4), column // PIECE)
    if cutlass.const_expr(step is not None):
        if cute.arch.lane_idx() == 0:
            dq_semaphore.advance(step.address, step.count)


def _widths(columns: int) -> list[int]:
    """Powers of two, at most a piece, whose sum is `columns`, a multiple of 16."""
    whole, rest = divmod(columns, PIECE)
    return [PIECE] * whole + [rest] * (rest > 0)


@cute.jit
def _copy_piece(
    ctx: Context, warp: Int32, piece: cute.Tensor, target: Int64, number: cutlass.Constexpr
) -> None:
    """Have a piece added to global memory. Slots are used round-robin, from the first one in every block."""
    slots, columns = ctx.plan.config.dq_slots, cute.size(piece)
    stage, lane = ctx.sdQ[None, number % slots, warp].iterator, cute.arch.lane_idx()
    if lane == 0:
        cute.arch.cp_async_bulk_wait_group(_copied_since(number, _pieces(ctx), slots), read=True)
    cute.arch.sync_warp()
    for j in cutlass.range_constexpr(columns // VECTOR):
        place = (stage + (j * WARP + lane) * VECTOR).toint()
        four = cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=16)
        own = cute.make_tensor(piece.iterator + VECTOR * j, cute.make_layout(VECTOR))
        cute.autovec_copy(own, cute.make_tensor(four, cute.make_layout(VECTOR)))
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
            f" [{{$r0}}], [{{$r1}}], {columns * WARP * 4};",
            read_only_args=[target, stage.toint()],
        )
        cute.arch.cp_async_bulk_commit_group()


def _pieces(ctx: Context) -> int:
    """Pieces of a block."""
    return -(-ctx.plan.dq_columns // PIECE)


def _copied_since(number: int, pieces: int, slots: int) -> int:
    """How many pieces have followed the last one in the slot of a block's `number`-th piece."""
    if number >= slots:
        return slots - 1
    last = max(range(number, pieces, slots))
    return pieces - last + number - 1


@cute.jit
def _step_of(ctx: Context, warp: Int32, tile: Tile, n: Int32, block: Int64) -> Step:
    first = warp == 0
    if cutlass.const_expr(ctx.plan.cluster_size > 1):
        first = first & (ctx.cta_pair.rank == 0)
    return dq_semaphore.step_of(ctx, tiles.order_of(ctx, tile), n, block, first)
