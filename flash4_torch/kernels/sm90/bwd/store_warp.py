"""The store warps, which add pieces of dQ to global memory, and store finished dQ, dK and dV.

A warpgroup that added its registers itself would wait for the L2 cache. TMA adds a whole piece at once, and
the warp that issued it is the only one that waits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ....configs.types import Scope
from ...common.bwd import dq_semaphore
from ...common.copies import evict_first
from ...common.role import role
from ...common.warps import GROUP, WARP, WARPS
from ..warps import ROWS, WARP_ROWS
from .context import Context
from .plan import NamedBarrier
from .state import other_slot
from .store_commands import (
    DQ,
    DV,
    ENDS,
    FIRST,
    WORDS,
    StoreCommand,
    arrive_empty,
    finished_layout,
    read,
    slot_of,
)


@role()
@cute.jit
def store_loop(ctx: Context, store_warp: Int32) -> None:
    """Store all pieces of one warpgroup, of several that alternate, or of every second block."""
    plan, more = ctx.plan, Boolean(True)
    if cutlass.const_expr(plan.stores_by_blocks):
        for w in cutlass.range_constexpr(plan.warpgroups):
            arrive_empty(store_warp * plan.warpgroups + w)
        while more:
            more = _store_block(ctx, store_warp * plan.warpgroups)
    else:
        each, first = plan.warpgroups // plan.store_warps, Int32(0)
        for i in cutlass.range_constexpr(each):
            arrive_empty(store_warp * each + i)
        while more:
            for i in cutlass.range_constexpr(each):
                more = _store_piece(ctx, first + store_warp * each + i)
            first = other_slot(ctx, first)
    cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def _store_piece(ctx: Context, slot: Int32) -> Boolean:
    """Store or add the piece in a slot; returns whether there was one."""
    cute.arch.barrier(barrier_id=NamedBarrier.DQ_FULL + slot, number_of_threads=GROUP + WARP)
    command = read(ctx, slot)
    if command.target != 0:
        cute.arch.fence_view_async_shared()
        if cute.arch.lane_idx() == 0:
            if cutlass.const_expr(ctx.plan.features.deterministic):
                dq_semaphore.wait(command.semaphore, Int32(command.awaited))
            if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
                _store_kv_head(ctx, slot, command)
            elif cutlass.const_expr(ctx.plan.dkv_via_dq_smem):
                _store(ctx, slot, command)
            else:
                _add(ctx, slot, command)
            cute.arch.cp_async_bulk_commit_group()
            _wait_slot(ctx, command)
        cute.arch.sync_warp()
        arrive_empty(other_slot(ctx, slot))
        if cutlass.const_expr(ctx.plan.features.deterministic):
            if cute.arch.lane_idx() == 0:
                dq_semaphore.advance(command.semaphore, Int32(command.count))
            cute.arch.sync_warp()
    return command.target != 0


@cute.jit
def _wait_slot(ctx: Context, command: StoreCommand) -> None:
    """Wait until this slot has been read or, with two slots, the one before."""
    if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
        if (command.target & ENDS) != 0:
            # After a tile's last piece, wait for all sums, but not for dV and dK where those came last.
            cute.arch.cp_async_bulk_wait_group(2 if ctx.plan.dkv_via_dq_smem else 0, read=False)
    cute.arch.cp_async_bulk_wait_group(ctx.plan.config.dq_stages - 1, read=True)


@cute.jit
def _store_block(ctx: Context, first: Int32) -> Boolean:
    """Add the pieces of all warpgroups, in slots from `first` on; returns whether there were some.

    The sums take as long as a block to reach global memory, after which the next tile may add its own.
    Meanwhile the other store warp has the next block.
    """
    slots = [first + w for w in range(ctx.plan.warpgroups)]
    for slot in slots:
        cute.arch.barrier(barrier_id=NamedBarrier.DQ_FULL + slot, number_of_threads=GROUP + WARP)
    commands = [read(ctx, slot) for slot in slots]
    if commands[0].target != 0:
        cute.arch.fence_view_async_shared()
        if cute.arch.lane_idx() == 0:
            dq_semaphore.wait(commands[0].semaphore, Int32(commands[0].awaited))
            for slot, command in zip(slots, commands, strict=True):
                _add(ctx, slot, command)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        for slot in slots:
            arrive_empty(slot)
        if cute.arch.lane_idx() == 0:
            count = sum((Int32(command.count) for command in commands), Int32(0))
            dq_semaphore.advance(commands[0].semaphore, count)
        cute.arch.sync_warp()
    return commands[0].target != 0


@cute.jit
def _add(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """Add the piece in a slot to its sums, by one thread."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
        f" [{{$r0}}], [{{$r1}}], {ctx.plan.blocks.registers * GROUP * 4};",
        read_only_args=[command.target, ctx.sdQ[None, slot].iterator.toint()],
    )


@cute.jit
def _store(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """Add dQ, or store dK or dV, by one thread."""
    if command.target > DQ:
        _add(ctx, slot, command)
    else:
        _store_gradient(ctx, slot, command)


@cute.jit
def _store_kv_head(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """Add or write sums of dQ, or store dQ itself, dK or dV, by one thread, with scope `KV_HEAD`."""
    command = StoreCommand(command.target & ~ENDS, *command[1:])
    if command.target > DQ:
        _add_or_write(ctx, slot, command)
    elif command.target == DQ:
        _store_finished(ctx, slot)
    elif cutlass.const_expr(ctx.plan.dkv_via_dq_smem):
        _store_gradient(ctx, slot, command)


@cute.jit
def _store_finished(ctx: Context, slot: Int32) -> None:
    """Store rounded dQ, by one thread, for each warp. TMA leaves out rows and columns beyond the end."""
    plan, blocks, layout = ctx.plan, ctx.plan.blocks, finished_layout(ctx.plan)
    n, head, batch = (Int32(cute.arch.load(ctx.commands + (slot * WORDS + i), Int64)) for i in (1, 2, 3))
    piece = slot if slot < plan.warpgroups else slot - plan.warpgroups
    band, part = piece // blocks.parts, piece % blocks.parts
    # If D fills one part only, the tile coordinate along D has no effect: part 1 would be stored as part 0.
    if cutlass.const_expr(blocks.filled_parts == blocks.parts) or part < blocks.filled_parts:
        for w in cutlass.range_constexpr(WARPS):
            start = ctx.sdQ[None, slot].iterator + w * (blocks.registers * WARP)
            stage = cute.make_tensor(cute.recast_ptr(start, layout.inner, plan.dtype), layout.outer)
            place = (n * blocks.bands + band) * (ROWS // WARP_ROWS) + w, part
            _store_rows(ctx.maps.store_dq, stage, ctx.maps.mdQ[None, None, head, batch], *place)


@cute.jit
def _add_or_write(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """Add the piece in a slot to its sums or, if it is the first one there, write it, by one thread."""
    if (command.target & FIRST) == 0:
        _add(ctx, slot, command)
    else:
        cute.arch.inline_ptx(
            "cp.async.bulk.global.shared::cta.bulk_group"
            f" [{{$r0}}], [{{$r1}}], {ctx.plan.blocks.registers * GROUP * 4};",
            read_only_args=[command.target - FIRST, ctx.sdQ[None, slot].iterator.toint()],
        )


@cute.jit
def _store_gradient(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """Store dK or dV, by one thread. TMA leaves out rows beyond the end."""
    block, head, batch = (Int32(cute.arch.load(ctx.commands + (slot * WORDS + i), Int64)) for i in (1, 2, 3))
    warpgroups = ctx.plan.warpgroups
    place = block * warpgroups + (slot if slot < warpgroups else slot - warpgroups)
    if command.target == DV:
        stage, target = slot_of(ctx, slot, ctx.plan.Dv), ctx.maps.mdV[None, None, head, batch]
        _store_rows(ctx.maps.store_dv, stage, target, place, 0)
    else:
        stage, target = slot_of(ctx, slot, ctx.plan.D), ctx.maps.mdK[None, None, head, batch]
        _store_rows(ctx.maps.store_dk, stage, target, place, 0)


@cute.jit
def _store_rows(atom, stage: cute.Tensor, target: cute.Tensor, row: Int32, column: Int32) -> None:
    """Store a stage to the box of its size at these coordinates, which count boxes."""
    rows = cute.local_tile(target, tuple(cute.size(stage, mode=[i]) for i in range(2)), (row, column))
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(stage, 0, 2), cute.group_modes(rows, 0, 2)
    )
    cute.copy(atom, s, g, **evict_first())
