"""A tile's end: dK and dV in 16 bits leave through the shared memory of their own K and V, or of dQ."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp

from ...common import ring
from ...common.bwd.tiles import Tile
from ...common.copies import evict_first
from ...common.ring import Cursor
from ...common.rounding import round_to
from ...common.warps import WARP
from .. import wgmma
from ..warps import ROWS, WARP_ROWS
from .context import Context
from .plan import DONE
from .state import Thread, other_slot
from .store_dq import DK, DV, gradient_tile, send_gradient, slot_of, wait_empty


@cute.jit
def epilogue(ctx: Context, t: Thread, tile: Tile, kv_at: Cursor) -> None:
    """Every warp stores its 16 keys by itself."""
    plan = ctx.plan
    sK, sV = (x[None, None, kv_at.stage] for x in (ctx.sK, ctx.sV))
    # Other warpgroups read this one's K for their dQ, but nobody else reads its V.
    stage_gradient(ctx, t, t.dV, dv_scale(ctx), sV)
    cute.arch.barrier(barrier_id=DONE, number_of_threads=plan.consumers)
    stage_gradient(ctx, t, t.dK, ctx.params.scale, sK)
    store_gradients(ctx, t, (dv_target(ctx, sV), dk_target(ctx, sK)), tile)
    ring.release(ctx.load_k, kv_at)
    ring.release(ctx.load_v, kv_at)


@cute.jit
def epilogue_aside(ctx: Context, t: Thread, kv_at: Cursor, slot: Int32) -> None:
    """A warpgroup's dV and dK leave through its two slots of dQ; `slot` is and stays the next one."""
    where = gradient_tile(ctx, kv_at)
    # All that reads K and V has ended. The loading warp may write its next message, too.
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
    """Where a staged gradient goes."""

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
    """What the warp has staged, until shared memory may be used again."""
    if cutlass.const_expr(ctx.plan.stores_by_tma):
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        for target in targets:
            _store_box(ctx, t, target.atom, target.boxes, target.stage, tile)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    else:
        cute.arch.sync_warp()
        for target in targets:
            _store_rows(ctx, t, target.rows, target.D, target.stage, tile)
        cute.arch.fence_view_async_shared()  # the next K and V come by the copy engine


@cute.jit
def stage_gradient(
    ctx: Context, t: Thread, gradient: cute.Tensor, scale: Float32, stage: cute.Tensor
) -> None:
    """Scale, round, and write the warpgroup's rows of a stage."""
    _stage(ctx, t, gradient, scale, stage, t.warpgroup)


@cute.jit
def _stage(
    ctx: Context, t: Thread, gradient: cute.Tensor, scale: Float32, stage: cute.Tensor, place: Int32
) -> None:
    """Scale, round, and write as the place-th 64 rows of a stage."""
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


@cute.jit
def _store_box(ctx: Context, t: Thread, atom, target: cute.Tensor, stage: cute.Tensor, tile: Tile) -> None:
    """The copy engine leaves out rows beyond the end."""
    box = (WARP_ROWS, cute.size(stage, mode=[1]))
    own = _own_warp(t)
    place = tile.index * (ctx.plan.keys // WARP_ROWS) + own
    rows = cute.local_tile(target[None, None, tile.kv_head, tile.batch], box, (place, 0))
    piece = cute.local_tile(stage, box, (own, 0))
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(piece, 0, 2), cute.group_modes(rows, 0, 2)
    )
    with cute.arch.elect_one():
        cute.copy(atom, s, g, **evict_first())
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _store_rows(
    ctx: Context, t: Thread, target: cute.Tensor, D: cutlass.Constexpr, stage: cute.Tensor, tile: Tile
) -> None:
    """16 bytes a lane, rows of the sequence only; those of the next one follow."""
    chunks = D // 8
    first = _own_warp(t) * WARP_ROWS
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), ctx.plan.dtype, num_bits_per_copy=128)
    for e in cutlass.range(t.lane, WARP_ROWS * chunks, WARP, unroll=1):
        row, chunk = first + e // chunks, e % chunks
        j = tile.index * ctx.plan.keys + row
        if j < tile.Sk:
            source = cute.local_tile(stage, (1, 8), (row, chunk))
            place = cute.local_tile(target[tile.k_offset + j, tile.kv_head, None], (8,), (chunk,))
            registers = cute.make_rmem_tensor(8, ctx.plan.dtype)
            cute.copy(atom, cute.group_modes(source, 0, 2), registers)
            cute.copy(atom, registers, place)


def _own_warp(t: Thread) -> Int32:
    """Among the warps of all warpgroups."""
    return t.warpgroup * (ROWS // WARP_ROWS) + cute.arch.make_warp_uniform(t.index // WARP)
