"""The hand-over from consumers to store warps: pieces of dQ, dK and dV in shared memory, each with a command.

dK and dV are handed over only with `dkv_via_dq_smem`: then a tile's end waits for nothing but room, and the
next K and V are on their way.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....configs.types import Scope
from ...common.bwd import tiles
from ...common.ring import Cursor
from ...common.smem_layouts import row_major_layout
from ...common.warps import GROUP, WARP
from ..warps import ROWS, WARP_ROWS
from . import dq_order
from .context import Context
from .plan import NamedBarrier, Plan
from .state import Thread, TileState, other_slot

ENDS, FIRST = 1, 2
"""Flags in a target (an address, multiple of 16) with scope `KV_HEAD`. ENDS: a tile's last piece; all sums
have to be complete before the next one. FIRST: a place's first piece, which has nothing to be added to."""
DV, DK, DQ = 4, 8, 12
"""Targets that are no addresses: the slot holds dV or dK, or dQ, rounded, each warp's rows by themselves."""
WORDS = 4
"""Words of 64 bits in a store command."""


class StoreCommand(NamedTuple):
    """Four words for a store warp. The last three are for ordered sums, or say where a gradient goes."""

    target: Int64
    """Address of the piece's sums, with `ENDS` and `FIRST`; or `DV`, `DK` or `DQ`; 0: there are no more."""
    semaphore: Int64
    """Address of the block's semaphore, with sums in a fixed order; see `dq_semaphore.Step`."""
    awaited: Int64
    count: Int64


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
    """Have a warpgroup's piece of dQ, block n of a query head, added, in the layout of `dq_blocks`."""
    wait_empty(slot)
    for i in cutlass.range_constexpr(ctx.plan.blocks.registers // 4):
        own = cute.make_tensor(dQ.iterator + 4 * i, cute.make_layout(4))
        cute.autovec_copy(own, own_vector(ctx, t, slot, i))
    if t.index == 0:
        command = StoreCommand(sums_address(ctx, piece, work, n), Int64(0), Int64(0), Int64(0))
        if cutlass.const_expr(ctx.plan.features.deterministic):
            step = dq_order.step_of(ctx, piece, work, block_index(ctx, work, n), n)
            command = StoreCommand(command.target, step.address, Int64(step.awaited), Int64(step.count))
        if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
            first = Int64(0) if dq_order.was_visited(ctx, work, n) else Int64(FIRST)
            ends = ENDS if last and not ctx.plan.dkv_via_dq_smem else 0
            command = command._replace(target=command.target + first + ends)
        write(ctx, slot, command)
    arrive_full(slot)


@cute.jit
def own_vector(ctx: Context, t: Thread, slot: Int32, i: cutlass.Constexpr) -> cute.Tensor:
    """The i-th four of a thread's numbers in a slot; a warp's lie together where it rounds them."""
    vector = i * GROUP + t.index
    if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
        vector = (t.index // WARP * (ctx.plan.blocks.registers // 4) + i) * WARP + t.lane
    place = ctx.sdQ[None, slot].iterator + vector * 4
    return cute.make_tensor(
        cute.make_ptr(Float32, place.toint(), cute.AddressSpace.smem, assumed_align=16), cute.make_layout(4)
    )


@cute.jit
def sums_address(ctx: Context, piece: Int32, work: TileState, n: Int32) -> Int64:
    """The address of a piece's sums in block n."""
    blocks = ctx.plan.blocks
    start = block_index(ctx, work, n) * blocks.floats + piece * (blocks.registers * GROUP)
    return (ctx.dq_acc.iterator + start).toint()


@cute.jit
def block_index(ctx: Context, work: TileState, n: Int32) -> Int64:
    """The place of block n in the workspaces, in blocks."""
    tile, count = work.tile, ctx.dq_acc.shape[-2]
    row = Int32(0)
    if cutlass.const_expr(ctx.plan.scope == Scope.KV_HEAD):
        own, _, _ = cute.arch.block_idx()
        row = (own - tile.kv_head) * tiles.group(ctx) + work.head
    else:
        row = tiles.row_of_workspace(ctx, tile, work.head)
    return Int64(row) * count + (tiles.first_block(ctx, tile) + n)


@cute.jit
def send_gradient(ctx: Context, t: Thread, slot: Int32, what: cutlass.Constexpr, where: tuple) -> None:
    """Have a warpgroup's dK or dV stored, which lies in the slot in the layout of `slot_of`."""
    ends = ENDS if ctx.plan.scope == Scope.KV_HEAD and what == DK else 0
    if t.index == 0:
        for i, word in enumerate((what + ends, *where)):
            cute.arch.store(ctx.commands + (slot * WORDS + i), Int64(word))
    arrive_full(slot)


@cute.jit
def send_dq(ctx: Context, t: Thread, slot: Int32, work: TileState, n: Int32) -> None:
    """Have a warpgroup's finished piece of block n stored, which lies in the slot in `finished_layout`."""
    if t.index == 0:
        for i, word in enumerate((DQ, n, work.head, work.tile.batch)):
            cute.arch.store(ctx.commands + (slot * WORDS + i), Int64(word))
    arrive_full(slot)


@cute.jit
def gradient_tile(ctx: Context, kv_at: Cursor) -> tuple:
    """The tile's index, KV head and batch, read once more from shared memory.

    So `tile`'s own numbers stay in uniform registers (ptxas.md, P8).
    """
    work_tile = ctx.work_tile + kv_at.stage * tiles.WORK_TILE_WORDS
    return tuple(cute.arch.load(work_tile + i, Int32) for i in range(3))


@cute.jit
def slot_of(ctx: Context, slot: Int32, columns: cutlass.Constexpr) -> cute.Tensor:
    """A slot as 64 rows of a gradient in 16 bits."""
    layout = gradient_layout(ctx.plan, columns)
    pointer = cute.recast_ptr(ctx.sdQ[None, slot].iterator, layout.inner, ctx.plan.dtype)
    return cute.make_tensor(pointer, layout.outer)


def finished_layout(plan: Plan) -> cute.ComposedLayout:
    """The layout of a warp's rounded rows of a piece, which begin where the warp's sums began."""
    return cute.select(row_major_layout(plan.dtype, WARP_ROWS, plan.blocks.piece_columns, 1), mode=[0, 1])


def gradient_layout(plan: Plan, columns: int) -> cute.ComposedLayout:
    return cute.select(row_major_layout(plan.dtype, ROWS, columns, 1), mode=[0, 1])


@cute.jit
def send_end(ctx: Context, t: Thread, slot: Int32) -> None:
    """Signal, after a warpgroup's last piece, that there are no more; `slot` is the next one's."""
    _end(ctx, t, slot)
    if cutlass.const_expr(ctx.plan.stores_by_blocks):
        _end(ctx, t, other_slot(ctx, slot))


@cute.jit
def _end(ctx: Context, t: Thread, slot: Int32) -> None:
    wait_empty(slot)
    if t.index == 0:
        write(ctx, slot, StoreCommand(Int64(0), Int64(0), Int64(0), Int64(0)))
    arrive_full(slot)


@cute.jit
def write(ctx: Context, slot: Int32, command: StoreCommand) -> None:
    """Write a command, by one thread; the barrier makes it visible."""
    for i in cutlass.range_constexpr(WORDS if ctx.plan.features.deterministic else 1):
        cute.arch.store(ctx.commands + (slot * WORDS + i), command[i])


@cute.jit
def read(ctx: Context, slot: Int32) -> StoreCommand:
    words = [Int64(0)] * WORDS
    for i in cutlass.range_constexpr(WORDS if ctx.plan.features.deterministic else 1):
        words[i] = cute.arch.load(ctx.commands + (slot * WORDS + i), Int64)
    return StoreCommand(*words)


def wait_empty(slot: Int32) -> None:
    """Wait, by a warpgroup, until there is room for its next piece."""
    cute.arch.barrier(barrier_id=NamedBarrier.DQ_EMPTY + slot, number_of_threads=GROUP + WARP)


def arrive_full(slot: Int32) -> None:
    """Signal, by a warpgroup, that it has left a piece to a store warp."""
    cute.arch.barrier_arrive(barrier_id=NamedBarrier.DQ_FULL + slot, number_of_threads=GROUP + WARP)


def arrive_empty(slot: Int32) -> None:
    cute.arch.barrier_arrive(barrier_id=NamedBarrier.DQ_EMPTY + slot, number_of_threads=GROUP + WARP)
