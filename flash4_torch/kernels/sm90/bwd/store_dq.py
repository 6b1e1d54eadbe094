"""Adding up dQ in global memory: consumers leave pieces in shared memory, warps of the producer add them.

With `dkv_via_dq_smem` consumers leave dK and dV there, too: a tile's end waits for nothing but room, and the
next K and V are on their way.

A warpgroup that added its registers itself would wait for the L2 cache; the copy engine adds a whole piece at
once, and the warp that told it to is the only one that waits.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ....configs.types import Scope
from ...common.bwd import tiles
from ...common.copies import evict_first
from ...common.ring import Cursor
from ...common.smem_layouts import row_major_layout
from ...common.warps import GROUP, WARP, WARPS
from ..warps import ROWS, WARP_ROWS
from .context import Context
from .plan import EMPTY, FULL, Plan
from .state import Thread, TileState, other_slot

ENDS, FIRST = 1, 2
"""With whole heads added to a target, an address that is a multiple of 16: a tile's last piece, before whose
successor all sums have to be there; the first one of its place, which has nothing to be added to."""
DV, DK, DQ = 4, 8, 12
"""Targets that are no address: what lies there is a gradient of keys, or dQ, rounded, of each warp's rows."""
WORDS = 4
"""Of 64 bits, that tell a storing warp what to do with a piece."""


class StoreCommand(NamedTuple):
    """Such words. The last three are of sums in a fixed order; or a gradient's place."""

    target: Int64
    """Address of the piece's sums; 0: there are no more."""
    turns: Int64
    """Address of the count of what has been added to the block."""
    awaited: Int64
    """What has to have been, at least."""
    counts: Int64
    """What the count grows by."""


@cute.jit
def add_dq(
    ctx: Context,
    t: Thread,
    dQ: cute.Tensor,
    slot: Int32,
    piece: Int32,
    work: TileState,
    n: Int32,
    last: cutlass.Constexpr = False,
) -> None:
    """Have a warpgroup's piece of block n of a query head added, in the order of `dq_blocks`."""
    wait_empty(slot)
    for i in cutlass.range_constexpr(ctx.plan.blocks.registers // 4):
        own = cute.make_tensor(dQ.iterator + 4 * i, cute.make_layout(4))
        cute.autovec_copy(own, own_vector(ctx, t, slot, i))
    if t.index == 0:
        command = StoreCommand(sums_address(ctx, piece, work, n), Int64(0), Int64(0), Int64(0))
        if cutlass.const_expr(ctx.plan.features.deterministic):
            command = _ordered(ctx, command, piece, work, _block(ctx, work, n), n)
        if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
            first = Int64(0) if was_visited(ctx, work, n) else Int64(FIRST)
            ends = ENDS if last and not ctx.plan.dkv_via_dq_smem else 0
            command = command._replace(target=command.target + first + ends)
        _write(ctx, slot, command)
    arrive_full(slot)


@cute.jit
def own_vector(ctx: Context, t: Thread, slot: Int32, i: cutlass.Constexpr) -> cute.Tensor:
    """The i-th four of a thread's numbers in a slot: those of a warp lie together where it rounds them."""
    vector = i * GROUP + t.index
    if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
        vector = (t.index // WARP * (ctx.plan.blocks.registers // 4) + i) * WARP + t.lane
    place = ctx.sdQ[None, slot].iterator + vector * 4
    return cute.make_tensor(
        cute.make_ptr(Float32, place.toint(), cute.AddressSpace.smem, assumed_align=16), cute.make_layout(4)
    )


@cute.jit
def sums_address(ctx: Context, piece: Int32, work: TileState, n: Int32) -> Int64:
    """The address of a piece of block n."""
    blocks = ctx.plan.blocks
    start = _block(ctx, work, n) * blocks.floats + piece * (blocks.registers * GROUP)
    return (ctx.dq_acc.iterator + start).toint()


@cute.jit
def _block(ctx: Context, work: TileState, n: Int32) -> Int64:
    """Where it is in the workspaces, in blocks."""
    tile, count = work.tile, ctx.dq_acc.shape[-2]
    row = Int32(0)
    if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
        own, _, _ = cute.arch.block_idx()
        row = (own - tile.kv_head) * tiles.group(ctx) + work.head
    else:
        row = tiles.row_of_workspace(ctx, tile, work.head)
    return Int64(row) * count + (tiles.first_block(ctx, tile) + n)


@cute.jit
def was_visited(ctx: Context, work: TileState, n: Int32) -> Boolean:
    """Whether the tile before, which was another one of the same head, has visited block n."""
    before = tiles.read_order(ctx, work.kv).before
    return (before.first <= n) & (n < before.last)


@cute.jit
def send_gradient(ctx: Context, t: Thread, slot: Int32, what: cutlass.Constexpr, where: tuple) -> None:
    """Have a warpgroup's dK or dV stored, which lies in the slot as `slot_of` says."""
    ends = ENDS if ctx.plan.scope == Scope.KV_HEAD and what == DK else 0
    if t.index == 0:
        for i, word in enumerate((what + ends, *where)):
            cute.arch.store(ctx.commands + (slot * WORDS + i), Int64(word))
    arrive_full(slot)


@cute.jit
def send_dq(ctx: Context, t: Thread, slot: Int32, work: TileState, n: Int32) -> None:
    """Have a warpgroup's piece of block n stored, which lies in the slot as `finished_layout` says."""
    if t.index == 0:
        for i, word in enumerate((DQ, n, work.head, work.tile.batch)):
            cute.arch.store(ctx.commands + (slot * WORDS + i), Int64(word))
    arrive_full(slot)


@cute.jit
def gradient_tile(ctx: Context, kv_at: Cursor) -> tuple:
    """The tile's block, key head and batch, once more: `tile`'s own numbers stay in uniform registers."""
    work_tile = ctx.work_tile + kv_at.stage * tiles.WORK_TILE_WORDS
    return tuple(cute.arch.load(work_tile + i, Int32) for i in range(3))


@cute.jit
def slot_of(ctx: Context, slot: Int32, columns: cutlass.Constexpr) -> cute.Tensor:
    """A slot as 64 rows of a gradient in 16 bits."""
    layout = aside_layout(ctx.plan, columns)
    pointer = cute.recast_ptr(ctx.sdQ[None, slot].iterator, layout.inner, ctx.plan.dtype)
    return cute.make_tensor(pointer, layout.outer)


def finished_layout(plan: Plan) -> cute.ComposedLayout:
    """Of a warp's rows of a piece, at the start of where the warp's sums were."""
    return cute.select(row_major_layout(plan.dtype, WARP_ROWS, plan.blocks.piece_columns, 1), mode=[0, 1])


def aside_layout(plan: Plan, columns: int) -> cute.ComposedLayout:
    return cute.select(row_major_layout(plan.dtype, ROWS, columns, 1), mode=[0, 1])


@cute.jit
def send_end(ctx: Context, t: Thread, slot: Int32) -> None:
    """After a warpgroup's last piece; `slot` is the next one's."""
    _end(ctx, t, slot)
    if cutlass.const_expr(ctx.plan.stores_by_blocks):
        _end(ctx, t, other_slot(ctx, slot))


@cute.jit
def _end(ctx: Context, t: Thread, slot: Int32) -> None:
    wait_empty(slot)
    if t.index == 0:
        _write(ctx, slot, StoreCommand(Int64(0), Int64(0), Int64(0), Int64(0)))
    arrive_full(slot)


@cute.jit
def store_loop(ctx: Context, store_warp: Int32) -> None:
    """A storing warp: all pieces of a warpgroup, or of several that take turns, or of every second block."""
    plan, more = ctx.plan, Boolean(True)
    if cutlass.const_expr(plan.stores_by_blocks):
        for w in cutlass.range_constexpr(plan.warpgroups):
            _arrive_empty(store_warp * plan.warpgroups + w)
        while more:
            more = _store_block(ctx, store_warp * plan.warpgroups)
    else:
        each, first = plan.warpgroups // plan.store_warps, Int32(0)
        for i in cutlass.range_constexpr(each):
            _arrive_empty(store_warp * each + i)
        while more:
            for i in cutlass.range_constexpr(each):
                more = _store_piece(ctx, first + store_warp * each + i)
            first = other_slot(ctx, first)
    cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def _store_piece(ctx: Context, slot: Int32) -> Boolean:
    """Returns whether there was one."""
    cute.arch.barrier(barrier_id=FULL + slot, number_of_threads=GROUP + WARP)
    command = _read(ctx, slot)
    if command.target != 0:
        cute.arch.fence_view_async_shared()
        if cute.arch.lane_idx() == 0:
            if cutlass.const_expr(ctx.plan.features.deterministic):
                wait_dq_semaphore(command)
            if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
                _store_of_whole_heads(ctx, slot, command)
            elif cutlass.const_expr(ctx.plan.dkv_via_dq_smem):
                _store(ctx, slot, command)
            else:
                _add(ctx, slot, command)
            cute.arch.cp_async_bulk_commit_group()
            _wait_slot(ctx, command)
        cute.arch.sync_warp()
        _arrive_empty(other_slot(ctx, slot))
        if cutlass.const_expr(ctx.plan.features.deterministic):
            if cute.arch.lane_idx() == 0:
                advance_dq_semaphore(command, Int32(command.counts))
            cute.arch.sync_warp()
    return command.target != 0


@cute.jit
def _wait_slot(ctx: Context, command: StoreCommand) -> None:
    """With two slots, until the one before is free."""
    if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
        if (command.target & ENDS) != 0:
            # But for dV and dK, where those came last.
            cute.arch.cp_async_bulk_wait_group(2 if ctx.plan.dkv_via_dq_smem else 0, read=False)
    cute.arch.cp_async_bulk_wait_group(ctx.plan.config.dq_stages - 1, read=True)


@cute.jit
def _store_block(ctx: Context, first: Int32) -> Boolean:
    """The pieces of all warpgroups, in slots from `first` on; returns whether there were some.

    It takes as long until sums are there, and the next tile may add its own, as a block takes. Meanwhile the
    other storing warp has the next block.
    """
    slots = [first + w for w in range(ctx.plan.warpgroups)]
    for slot in slots:
        cute.arch.barrier(barrier_id=FULL + slot, number_of_threads=GROUP + WARP)
    commands = [_read(ctx, slot) for slot in slots]
    if commands[0].target != 0:
        cute.arch.fence_view_async_shared()
        if cute.arch.lane_idx() == 0:
            wait_dq_semaphore(commands[0])
            for slot, command in zip(slots, commands, strict=True):
                _add(ctx, slot, command)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        for slot in slots:
            _arrive_empty(slot)
        if cute.arch.lane_idx() == 0:
            advance_dq_semaphore(commands[0], sum((Int32(command.counts) for command in commands), Int32(0)))
        cute.arch.sync_warp()
    return commands[0].target != 0


@cute.jit
def _add(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """By one thread."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
        f" [{{$r0}}], [{{$r1}}], {ctx.plan.blocks.registers * GROUP * 4};",
        read_only_args=[command.target, ctx.sdQ[None, slot].iterator.toint()],
    )


@cute.jit
def _store(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """By one thread: dQ, dK or dV."""
    if command.target > DQ:
        _add(ctx, slot, command)
    else:
        _store_gradient(ctx, slot, command)


@cute.jit
def _store_of_whole_heads(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """By one thread: sums of dQ, dQ itself, dK or dV."""
    command = StoreCommand(command.target & ~ENDS, *command[1:])
    if command.target > DQ:
        _add_or_write(ctx, slot, command)
    elif command.target == DQ:
        _store_finished(ctx, slot)
    elif cutlass.const_expr(ctx.plan.dkv_via_dq_smem):
        _store_gradient(ctx, slot, command)


@cute.jit
def _store_finished(ctx: Context, slot: Int32) -> None:
    """By one thread, for each warp. The copy engine leaves out rows and columns beyond the end."""
    plan, blocks, layout = ctx.plan, ctx.plan.blocks, finished_layout(ctx.plan)
    n, head, batch = (Int32(cute.arch.load(ctx.commands + (slot * WORDS + i), Int64)) for i in (1, 2, 3))
    piece = slot if slot < plan.warpgroups else slot - plan.warpgroups
    band, part = piece // blocks.parts, piece % blocks.parts
    # If D fills one part only, a tile's number along D counts for nothing: part 1 would be stored as part 0.
    if cutlass.const_expr(blocks.filled_parts == blocks.parts) or part < blocks.filled_parts:
        for w in cutlass.range_constexpr(WARPS):
            start = ctx.sdQ[None, slot].iterator + w * (blocks.registers * WARP)
            stage = cute.make_tensor(cute.recast_ptr(start, layout.inner, plan.dtype), layout.outer)
            place = (n * blocks.bands + band) * (ROWS // WARP_ROWS) + w, part
            _store_rows(ctx.maps.store_dq, stage, ctx.maps.mdQ[None, None, head, batch], *place)


@cute.jit
def _add_or_write(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """By one thread."""
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
    """By one thread. The copy engine leaves out rows beyond the end."""
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
    """The box of the stage's size with these coordinates, in boxes."""
    rows = cute.local_tile(target, tuple(cute.size(stage, mode=[i]) for i in range(2)), (row, column))
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(stage, 0, 2), cute.group_modes(rows, 0, 2)
    )
    cute.copy(atom, s, g, **evict_first())


@cute.jit
def wait_dq_semaphore(command: StoreCommand) -> None:
    seen = _count(command.turns)
    while seen < Int32(command.awaited):
        seen = _count(command.turns)
    cute.arch.inline_ptx("fence.proxy.async;")


@cute.jit
def advance_dq_semaphore(command: StoreCommand, counts: Int32) -> None:
    """Once all that this thread has added is there, which makes it seen as any store is: no fence between."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.inline_ptx(
        "red.release.gpu.global.add.s32 [{$r0}], {$r1};",
        read_only_args=[command.turns, counts],
    )


@cute.jit
def _ordered(
    ctx: Context, command: StoreCommand, piece: Int32, work: TileState, block: Int64, n: Int32
) -> StoreCommand:
    """After the tile, or pair, whose turn is before this one's, if that visits the block.

    A block's number counts the pieces of all tiles up to the last one that has added to it; those that visit
    a block are neighbours, and the first of them counts for those before.
    """
    order = (
        tiles.read_order(ctx, work.kv) if cutlass.const_expr(ctx.plan.load_warp_sends_order) else work.order
    )
    follows = (order.before.first <= n) & (n < order.before.last)
    earlier = order.number * ctx.plan.config.dq_pieces
    counts = Int32(1) + (earlier if (piece == 0) & ~follows else Int32(0))
    turns = (ctx.dq_semaphore.iterator + block).toint()
    return StoreCommand(command.target, turns, Int64(earlier if follows else Int32(0)), Int64(counts))


@cute.jit
def _write(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """By one thread; the barrier makes it visible."""
    for i in cutlass.range_constexpr(WORDS if ctx.plan.features.deterministic else 1):
        cute.arch.store(ctx.commands + (slot * WORDS + i), command[i])


@cute.jit
def _read(ctx: Context, slot: Int32) -> StoreCommand:
    words = [Int64(0)] * WORDS
    for i in cutlass.range_constexpr(WORDS if ctx.plan.features.deterministic else 1):
        words[i] = cute.arch.load(ctx.commands + (slot * WORDS + i), Int64)
    return StoreCommand(*words)


def wait_empty(slot: Int32) -> None:
    """By a warpgroup, for room for its next piece."""
    cute.arch.barrier(barrier_id=EMPTY + slot, number_of_threads=GROUP + WARP)


def arrive_full(slot: Int32) -> None:
    """By a warpgroup, of what it leaves to a storing warp."""
    cute.arch.barrier_arrive(barrier_id=FULL + slot, number_of_threads=GROUP + WARP)


def _arrive_empty(slot: Int32) -> None:
    cute.arch.barrier_arrive(barrier_id=EMPTY + slot, number_of_threads=GROUP + WARP)


def _count(place: Int64) -> Int32:
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place]
    )
