"""The end of a tile: dK and dV leave, in 16 bits, through the SMEM of their own K and V, or of dQ."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from ...common import ring
from ...common.bwd.stores import store_box, store_rows
from ...common.bwd.tiles import Tile
from ...common.copies import evict_first
from ...common.ring import Cursor
from ...common.rounding import round_to
from ...common.warps import WARP
from .. import wgmma
from ..warps import ROWS, WARP_ROWS
from .context import Context
from .plan import NamedBarrier
from .state import Thread, other_slot
from .store_commands import DK, DV, gradient_tile, send_gradient, slot_of, wait_empty


@cute.jit
def epilogue(ctx: Context, t: Thread, tile: Tile, kv_at: Cursor) -> None:
    """Store dV and dK through the stages of V and K. Every warp stores its 16 keys by itself."""
    plan = ctx.plan
    sK, sV = (x[None, None, kv_at.stage] for x in (ctx.sK, ctx.sV))
    # Other warpgroups read this one's K for their dQ, but no other reads its V.
    stage_gradient(ctx, t, t.dV, dv_scale(ctx), sV)
    cute.arch.barrier(barrier_id=NamedBarrier.K_READ, number_of_threads=plan.consumers)
    stage_gradient(ctx, t, t.dK, ctx.params.scale, sK)
    store_gradients(ctx, t, (dv_target(ctx, sV), dk_target(ctx, sK)), tile)
    ring.release(ctx.load_k, kv_at)
    ring.release(ctx.load_v, kv_at)


@cute.jit
def epilogue_via_dq_smem(ctx: Context, t: Thread, kv_at: Cursor, slot: Int32) -> None:
    """Store a warpgroup's dV and dK through its two slots of dQ; `slot` is and stays the next one."""
    where = gradient_tile(ctx, kv_at)
    # All reads of K and V have ended. The load warp may write its next work tile, too.
    ring.release(ctx.load_k, kv_at)
    ring.release(ctx.load_v, kv_at)
    plan = ctx.plan
    dv = DV, t.dV, dv_scale(ctx), plan.Dv, slot
    dk = DK, t.dK, ctx.params.scale, plan.D, other_slot(ctx, slot)
    for what, gradient, scale, columns, place in (dv, dk):
        wait_empty(place)
        _stage(ctx, t, gradient, scale, slot_of(ctx, place, columns), Int32(0))
        send_gradient(ctx, t, place, what, where)


class Target(NamedTuple):
    """The destination of a staged gradient."""

    atom: Any
    boxes: cute.Tensor
    rows: cute.Tensor
    D: int
    stage: cute.Tensor


def dk_target(ctx: Context, stage: cute.Tensor) -> Target:
    return Target(ctx.maps.store_dk, ctx.maps.mdK, ctx.dk, ctx.plan.features.D, stage)


def dv_target(ctx: Context, stage: cute.Tensor) -> Target:
    return Target(ctx.maps.store_dv, ctx.maps.mdV, ctx.dv, ctx.plan.features.Dv, stage)


def dv_scale(ctx: Context) -> Float32:
    return ctx.params.keep_scale if ctx.plan.features.dropout else Float32(1.0)


@cute.jit
def store_gradients(ctx: Context, t: Thread, targets: tuple, tile: Tile) -> None:
    """Store what the warp has staged, and wait until shared memory may be used again."""
    if cutlass.const_expr(ctx.plan.stores_by_tma):
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        for target in targets:
            what = target.atom, target.boxes, target.stage
            store_box(ctx, *what, tile, _own_warp(t), WARP_ROWS, **evict_first())
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    else:
        cute.arch.sync_warp()
        for target in targets:
            what = target.rows, target.D, target.stage
            store_rows(ctx, *what, tile, _own_warp(t), WARP_ROWS, t.lane)
        cute.arch.fence_view_async_shared()  # the next K and V arrive by TMA


@cute.jit
def stage_gradient(
    ctx: Context, t: Thread, gradient: cute.Tensor, scale: Float32, stage: cute.Tensor
) -> None:
    """Scale and round a gradient, and write it as the warpgroup's rows of a stage."""
    _stage(ctx, t, gradient, scale, stage, t.warpgroup)


@cute.jit
def _stage(
    ctx: Context, t: Thread, gradient: cute.Tensor, scale: Float32, stage: cute.Tensor, place: Int32
) -> None:
    """Scale and round a gradient, and write it as the `place`-th 64 rows of a stage."""
    plan = ctx.plan
    for i in cutlass.range_constexpr(cute.size(gradient)):
        gradient[i] = gradient[i] * scale
    rounded = cute.make_rmem_tensor(gradient.layout, plan.dtype)
    round_to(gradient, rounded)
    columns = cute.size(stage, mode=[1])
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), plan.dtype)
    copy = cute.make_tiled_copy_C(atom, wgmma.output_mma(plan.dtype, columns)).get_slice(t.index)
    rows = cute.local_tile(stage, (ROWS, columns), (place, 0))
    cute.copy(atom, copy.retile(rounded), copy.partition_D(rows))


def _own_warp(t: Thread) -> Int32:
    """This warp's index among the warps of all consumer warpgroups."""
    return t.warpgroup * (ROWS // WARP_ROWS) + cute.arch.make_warp_uniform(t.index // WARP)
