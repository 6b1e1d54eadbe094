"""The end of dQ with scope `KV_HEAD`: the first tile, which comes last, fetches what others have added up.

A thread fetches the numbers that it has left itself at other tiles. The numbers that its warp has rounded
take their place in shared memory, for a store warp.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...common.bwd.tiles import Tile
from ...common.rounding import round_to
from ...common.smem_layouts import chunk_of
from ...common.warps import WARP
from ..warps import WARP_ROWS
from .context import Context
from .dq_order import was_visited
from .state import Thread, TileState
from .store_commands import own_vector, send_dq, sums_address, wait_empty

VECTOR = 16
"""Bytes that a lane copies at a time."""
COLUMNS = 8
"""Columns that these bytes hold, rounded to 16 bits."""


@cute.jit
def is_last(tile: Tile) -> Boolean:
    """Whether the tile is its head's last one, by a vote, which ptxas knows to be uniform (ptxas.md, P7)."""
    return cute.arch.vote_any_sync(tile.index == 0)


@cute.jit
def fetch_sums(ctx: Context, t: Thread, slot: Int32, piece: Int32, work: TileState, n: Int32) -> None:
    """Begin to fetch what earlier tiles have added up of a piece of block n; zeros if none has."""
    wait_empty(slot)
    size = Int32(VECTOR) if was_visited(ctx, work, n) else Int32(0)
    target = own_vector(ctx, t, slot, 0).iterator.toint()
    source = sums_address(ctx, piece, work, n) + (target - ctx.sdQ[None, slot].iterator.toint())
    for i in cutlass.range_constexpr(ctx.plan.blocks.registers // 4):
        at = i * WARP * VECTOR
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global [{{$r0}} + {at}], [{{$r1}} + {at}], {VECTOR}, {{$r2}};",
            read_only_args=[target, source, size],
        )


@cute.jit
def finish_dq(ctx: Context, t: Thread, dQ: cute.Tensor, slot: Int32, work: TileState, n: Int32) -> None:
    """Add the fetched sums to a piece, scale it, round it, and have it stored."""
    cute.arch.inline_ptx("cp.async.wait_all;")
    for i in cutlass.range_constexpr(ctx.plan.blocks.registers // 4):
        fetched = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(own_vector(ctx, t, slot, i), fetched)
        for j in cutlass.range_constexpr(4):
            dQ[4 * i + j] = (dQ[4 * i + j] + fetched[j]) * ctx.params.scale
    rounded = cute.make_rmem_tensor(dQ.layout, ctx.plan.dtype)
    round_to(dQ, rounded)
    cute.arch.sync_warp()
    _stage(ctx, t, slot, rounded)
    send_dq(ctx, t, slot, work, n)


@cute.jit
def _stage(ctx: Context, t: Thread, slot: Int32, rounded: cute.Tensor) -> None:
    """Write a warp's 16 rows over what its lanes have fetched, in `finished_layout`."""
    words, chunk = cute.recast_tensor(rounded, Uint32), chunk_of(ctx.plan.blocks.piece_columns)
    vectors = chunk // COLUMNS  # in a row of a chunk
    row, half = t.lane % WARP_ROWS, t.lane // WARP_ROWS
    start = own_vector(ctx, t, slot, 0).iterator.toint() - t.lane * VECTOR + row * (vectors * VECTOR)
    swizzle = (half ^ row // (8 // vectors) % vectors) * VECTOR
    for c in cutlass.range_constexpr(cute.size(words) // 4):
        chunks, vector = divmod(2 * c, vectors)
        place = start + chunks * (WARP_ROWS * vectors * VECTOR) + (swizzle ^ vector * VECTOR)
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[place, *(words[4 * c + i] for i in range(4))],
        )
