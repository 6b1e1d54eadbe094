"""Running results: O and lse in float32, to which calls on further keys add in the epilogue of their tiles.

The first call writes them, the others read and merge them. Each row belongs to one tile of a launch.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..attn_mask import vector_at
from ..softmax import Final, join_sink
from .context import ForwardContext
from .tiles import Tile, results_of

CHUNK = 8
"""Columns of which a lane has two, side by side, in an accumulator."""
VECTOR = 4
"""Columns that a thread with a whole row loads or stores at a time."""
AT_ONCE = 16
"""Loads of a lane in flight, of two columns each."""


@cute.jit
def join(
    ctx: ForwardContext, ends: Final, tile: Tile, first: Int32, rows: tuple[Int32, ...]
) -> tuple[Float32, ...] | None:
    """Make `ends` those of all keys so far, and return what to multiply the running rows of O by.

    first: query position of row 0. rows: numbers of the thread's rows, counted from there. Where this call
    saw nothing of a row, the factors are exactly 0 and 1. None if there are no running rows yet; lse is to be
    stored when all threads of its row have come here.
    """
    if cutlass.const_expr(ctx.plan.features.running != "add"):
        return None
    factors = cute.make_rmem_tensor(len(rows), Float32)
    for r in cutlass.range_constexpr(len(rows)):
        before, (i, h) = -Float32.inf, place(ctx, tile, first, rows[r])
        if has(ctx, tile, i, h):
            head = query_head(ctx, tile, h)
            if cutlass.const_expr(ctx.plan.features.varlen):
                before = ctx.lse[head, tile.q_offset + i]
            else:
                before = ctx.lse[tile.batch, head, i]
        share, joined = join_sink(ends.lse[r], before)
        ends.inverse[r] = ends.inverse[r] * share
        ends.lse[r] = joined
        factors[r] = 1.0 - share
    return tuple(factors[r] for r in range(len(rows)))


@cute.jit
def write_fragment(
    ctx: ForwardContext,
    O: cute.Tensor,
    factors: tuple[Float32, ...] | None,
    tile: Tile,
    first: Int32,
    rows: tuple[Int32, ...],
    lane: Int32,
) -> None:
    """Write the normalised rows (R, C) of an MMA's accumulator; all columns of a row are its four lanes'."""
    Dv, pairs = ctx.plan.features.Dv, cute.size(O, mode=[1]) // 2
    for r in cutlass.range_constexpr(len(rows)):
        i, h = place(ctx, tile, first, rows[r])
        if has(ctx, tile, i, h):
            start = out_row(ctx, tile, i, h).iterator + 2 * (lane % 4)
            for begin in cutlass.range_constexpr(0, pairs, AT_ONCE):
                chunks = [j for j in range(begin, min(begin + AT_ONCE, pairs)) if j * CHUNK < Dv]
                values = cute.make_rmem_tensor((2, max(len(chunks), 1)), Float32)
                if cutlass.const_expr(factors is not None):
                    for n, j in enumerate(chunks):
                        cute.autovec_copy(vector_at(start + j * CHUNK, 2), values[None, n])
                for n, j in enumerate(chunks):
                    for e in range(2):
                        own = O[r, 2 * j + e]
                        if cutlass.const_expr(factors is not None):
                            own = own + values[e, n] * factors[r]
                        values[e, n] = own
                for n, j in enumerate(chunks):
                    cute.autovec_copy(values[None, n], vector_at(start + j * CHUNK, 2))


@cute.jit
def write_vectors(
    values: cute.Tensor, factor: Float32 | None, start: cute.Pointer, count: cutlass.Constexpr
) -> None:
    """Write the first `count` vectors of a thread's normalised columns, which begin at `start` in memory."""
    if cutlass.const_expr(factor is not None):
        before = cute.make_rmem_tensor(VECTOR * max(count, 1), Float32)
        for n in cutlass.range_constexpr(count):
            four = cute.make_tensor(before.iterator + n * VECTOR, cute.make_layout(VECTOR))
            cute.autovec_copy(vector_at(start + n * VECTOR, VECTOR), four)
        for j in cutlass.range_constexpr(VECTOR * count):
            values[j] = values[j] + before[j] * factor
    for n in cutlass.range_constexpr(count):
        four = cute.make_tensor(values.iterator + n * VECTOR, cute.make_layout(VECTOR))
        cute.autovec_copy(four, vector_at(start + n * VECTOR, VECTOR))


def place(ctx: ForwardContext, tile: Tile, first: Int32, row: Int32) -> tuple[Int32, Int32]:
    """Query position of a row, and its head among those of the KV head; neither may exist."""
    pack = ctx.plan.pack_gqa
    return first + row // pack, tile.q_head_group * pack + row % pack


def has(ctx: ForwardContext, tile: Tile, i: Int32, h: Int32) -> Boolean:
    return (i < tile.Sq) & (h < ctx.maps.mQ.shape[0][0])


def query_head(ctx: ForwardContext, tile: Tile, h: Int32) -> Int32:
    return tile.kv_head * ctx.maps.mQ.shape[0][0] + h


def out_row(ctx: ForwardContext, tile: Tile, i: Int32, h: Int32) -> cute.Tensor:
    """A row of O in memory."""
    head, (out, _, _) = query_head(ctx, tile, h), results_of(ctx, tile)
    if ctx.plan.features.varlen:
        return out[tile.q_offset + i, head, None]
    return out[tile.batch, i, head, None]
