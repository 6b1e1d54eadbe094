"""Code that load warps of the backward share: a packed sequence's end, lse and delta, and the end of all
work.

`ctx` is the context of a kernel's roles.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from .. import ring
from ..ring import Cursor, Ring
from ..warps import WARP
from . import tiles
from .context import BackwardContext
from .tiles import WORK_TILE_WORDS, Tile


@cute.jit
def barrier_of(
    ctx: BackwardContext, edge: Ring, at: Cursor, left: Int32, rows: cutlass.Constexpr
) -> cute.Pointer:
    """The barrier where the stage's copies arrive: at a packed sequence's end, one that this warp awaits."""
    if cutlass.const_expr(not ctx.plan.features.varlen):
        return edge.full + at.stage
    to_end = (ctx.sequence_end.full.toint() - edge.full.toint()) // 8
    return edge.full + (to_end if left < rows else at.stage)


@cute.jit
def finish_end(
    ctx: BackwardContext,
    edge: Ring,
    at: Cursor,
    end_at: Cursor,
    stage: cute.Tensor,
    left: Int32,
    rows: cutlass.Constexpr,
) -> Cursor:
    """Zero what follows a packed sequence's end: weights there are 0, but 0 times infinity or NaN is not."""
    if cutlass.const_expr(ctx.plan.features.varlen):
        if left < rows:
            ring.wait_full(ctx.sequence_end, end_at)
            zero_rows(stage, left)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(edge.full + at.stage)
            end_at = ring.after(end_at, 1)
    return end_at


@cute.jit
def zero_rows(stage: cute.Tensor, first: Int32) -> None:
    """Zero the rows from `first` on, 16 bytes a lane."""
    rows, columns = (cute.size(stage, mode=[i]) for i in range(2))
    chunks = columns // 8
    zeros = cute.make_rmem_tensor((1, 8), stage.element_type)
    zeros.fill(0.0)
    first = cutlass.max(first, 0)
    for e in cutlass.range(cute.arch.lane_idx(), (rows - first) * chunks, WARP, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(stage, (1, 8), (first + e // chunks, e % chunks)))


@cute.jit
def copy_statistics(
    ctx: BackwardContext,
    target: cute.Tensor,
    which: cutlass.Constexpr,
    tile: Tile,
    head: Int32,
    n: Int32,
    full: cute.Pointer,
) -> None:
    """Copy one number of each row of block n, `stats[which]`, to shared memory; called by one lane."""
    shape = ctx.stats.shape
    row = Int64(tiles.row_of_workspace(ctx, tile, head))
    if cutlass.const_expr(which):
        for size in shape[1:-1]:
            which = which * Int64(size)
        row = row + which
    start = row * shape[-1] + (tiles.first_block(ctx, tile) + n) * ctx.plan.queries
    pointer = cute.make_ptr(
        Float32, (ctx.stats.iterator + start).toint(), cute.AddressSpace.gmem, assumed_align=16
    )
    source = cute.make_tensor(pointer, cute.make_layout(ctx.plan.queries))
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    cute.copy(atom, cute.group_modes(source, 0, 1), cute.group_modes(target, 0, 1), mbar_ptr=full)


@cute.jit
def exact_lse(ctx: BackwardContext, tile: Tile, head: Int32, n: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """lse in natural units and lse_low of block n, (queries,) each, in global memory."""
    shape, each = ctx.stats.shape, Int64(1)
    for size in shape[1:]:
        each = each * size
    row = Int64(tiles.row_of_workspace(ctx, tile, head)) * shape[-1]
    row = row + (tiles.first_block(ctx, tile) + n) * ctx.plan.queries
    layout = cute.make_layout(ctx.plan.queries)
    return tuple(cute.make_tensor(ctx.stats.iterator + (i * each + row), layout) for i in (2, 3))


@cute.jit
def signal_end(ctx: BackwardContext, at: Cursor) -> None:
    """Signal the end of all work: a work tile of -1, instead of a further tile."""
    ring.wait_empty(ctx.load_k, at)
    with cute.arch.elect_one():
        cute.arch.store(ctx.work_tile + at.stage * WORK_TILE_WORDS, Int32(-1))
        cute.arch.mbarrier_arrive(ctx.load_k.full + at.stage)


def box(rows: cute.Tensor, stage: cute.Tensor, n: Int32) -> cute.Tensor:
    """The n-th box of rows, as many rows as fill a stage."""
    return cute.local_tile(rows, tuple(cute.size(stage, mode=[i]) for i in range(2)), (n, 0))


def batch_of(ctx: BackwardContext, batch: Int32) -> Int32:
    """Index of the batch entry in tensors: packed sequences are a batch of one."""
    return Int32(0) if ctx.plan.features.is_packed else batch
