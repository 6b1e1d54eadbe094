"""Copies of K and V, and of blocks of Q, dO, statistics and a floating mask, to shared memory by cp.async."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...common.bwd import tiles
from ...common.bwd.loads import batch_of
from ...common.bwd.tiles import Tile
from ...common.warps import WARP
from ..rows import BYTES, Sequence, Visit, load_block
from .context import Context
from .mask_tile import load_mask
from .state import Copy

_VECTOR = BYTES // 4
"""Statistics of a vector."""


def load_kv(ctx: Context, tile: Tile) -> None:
    """Start to copy the tile's K and V; keys after the last one become 0."""
    plan, f, visit = ctx.plan, ctx.plan.features, Visit(Int32(0), Int32(1))
    where = tile.k_offset, tile.Sk, tiles.kv_head_of(ctx, tile), batch_of(ctx, tile.batch)
    keys, values = (Sequence(rows, *where) for rows in (ctx.maps.mK, ctx.maps.mV))
    D, Dv = (plan.halves(n) for n in (f.D, f.Dv))
    load_block(keys, tile.index, ctx.sK, D, ctx.warp, plan.warps, visit)
    load_block(values, tile.index, ctx.sV, Dv, ctx.warp, plan.warps, visit)


@cute.jit
def load_rows(ctx: Context, tile: Tile, copy: Copy) -> None:
    """Start to copy a block of Q and dO, if the tile has it: a group; rows after the last become 0."""
    block, i, count, stage = copy
    plan, f, visit = ctx.plan, ctx.plan.features, Visit(i, count)
    head = tile.kv_head * tiles.group(ctx) + block.h
    where = tile.q_offset, tile.Sq, head, batch_of(ctx, tile.batch)
    rows, grads = (Sequence(rows, *where) for rows in (ctx.maps.mQ, ctx.maps.mdO))
    sQ, sdO = (x[None, None, stage] for x in (ctx.sQ, ctx.sdO))
    D, Dv = (plan.halves(n) for n in (f.D, f.Dv))
    load_block(rows, block.n, sQ, D, ctx.warp, plan.warps, visit)
    load_block(grads, block.n, sdO, Dv, ctx.warp, plan.warps, visit)
    _load_statistics(ctx, tile, head, block.n, visit, stage)
    if cutlass.const_expr(f.float_mask):
        load_mask(ctx, tile, head, block, visit, stage)
    cute.arch.cp_async_commit_group()


@cute.jit
def _load_statistics(ctx: Context, tile: Tile, head: Int32, n: Int32, visit: Visit, stage: Int32) -> None:
    """A vector a thread. The workspace has all rows of a block."""
    plan, shape, each = ctx.plan, ctx.stats.shape, Int64(1)
    for size in shape[1:]:
        each = each * size
    row = Int64(tiles.row_of_workspace(ctx, tile, head)) * shape[-1]
    row += (tiles.first_block(ctx, tile) + n) * plan.queries
    vectors, thread = plan.queries // _VECTOR, ctx.warp * WARP + ctx.lane
    for first in cutlass.range_constexpr(0, vectors * plan.features.row_stats, plan.threads):
        number = thread + first
        which, vector = number // vectors, number % vectors
        if (which < plan.features.row_stats) & (visit.i < visit.count):
            source = ctx.stats.iterator + (which * each + row + vector * _VECTOR)
            target = ctx.sStats[None, which, stage].iterator + vector * _VECTOR
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[Int32(target.toint()), source.toint()],
            )
