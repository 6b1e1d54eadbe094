"""A CTA that has whole groups of splits: it goes through their blocks as through one split's, and merges a
group's splits in shared memory, with the bits that a cluster's merge has.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.warps import WARP
from . import merge, splits
from .context import Context
from .epilogue import normalise, ordered_row
from .mainloop import Thread, begin_split, mainloop, values_of
from .plan import VECTOR

_AT_ONCE = 2
"""Vectors that a thread loads at a time."""


class Sums(NamedTuple):
    """Registers of a group: of the thread's two rows the maxima of splits' lse, and sums of weights.

    The values are in shared memory, where each thread has a place of its own.
    """

    row_max: cute.Tensor
    total: cute.Tensor


@cute.jit
def run(ctx: Context, t: Thread) -> None:
    """Go through the CTA's groups; the last CTA of a tile merges the tile's."""
    tile = ctx.tile
    sums = Sums(*(cute.make_rmem_tensor(2, Float32) for _ in range(2)))
    step, several = cute.arch.grid_dim()[0], tile.splits.last - tile.splits.first > 1
    index = tile.split
    while index < tile.splits.last:
        _begin(ctx, sums)
        begin_split(t)
        # Every warp has read the last block before another one takes its place.
        cute.arch.sync_threads()
        blocks = splits.blocks_of_group(tile.blocks, index, ctx.divisors, ctx.tensors.partial_lse.shape[0])
        mainloop(ctx, t, blocks, partial(_after_block, ctx, t, sums, blocks.last))
        _store(ctx, t, sums, index)
        index = index + step
    if several:
        ctas = cutlass.min(tile.splits.last - tile.splits.first, step)
        if merge.is_last(ctx, Int32(0), ctas):
            merge.merge_parts(ctx, t.rows, tile.splits, Int32(0))


@cute.jit
def _begin(ctx: Context, sums: Sums) -> None:
    sums.row_max.fill(-Float32.inf)
    sums.total.fill(0.0)
    nothing = cute.make_rmem_tensor(VECTOR, Float32)
    nothing.fill(0.0)
    for number in cutlass.range_constexpr(ctx.plan.vectors):
        cute.autovec_copy(nothing, _place(ctx, number))


@cute.jit
def _after_block(ctx: Context, t: Thread, sums: Sums, last: Int32, n: Int32) -> None:
    """Merge a split that ends after block n, and begin another one."""
    if (n + 1 == splits.end_of_split(n, ctx.divisors)) | (n + 1 == last):
        lse, values = normalise(ctx, t), values_of(t.O)
        for r in cutlass.range_constexpr(2):
            ordered, row_max, total = ordered_row(values[r, None], ctx.plan), sums.row_max[r], sums.total[r]
            for m in cutlass.range_constexpr(ctx.plan.vectors // 2):
                part, own = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
                for c in cutlass.range_constexpr(VECTOR):
                    part[c] = ordered[VECTOR * m + c]
                cute.autovec_copy(_place(ctx, 2 * m + r), own)
                sums.row_max[r], sums.total[r] = merge.add(row_max, total, own, lse[r], part)
                cute.autovec_copy(own, _place(ctx, 2 * m + r))
                if cutlass.const_expr(m % _AT_ONCE == _AT_ONCE - 1):
                    # Else ptxas loads all of them first, and has no registers left.
                    cute.arch.sync_warp()
        begin_split(t)


@cute.jit
def _store(ctx: Context, t: Thread, sums: Sums, group: Int32) -> None:
    """Store results if the tile has one group, else this group's part of them."""
    tile = ctx.tile
    # A loop, since ptxas would keep the addresses of all vectors while blocks are gone through.
    for number in cutlass.range(ctx.plan.vectors, unroll=1):
        row, is_second = t.rows[0] + number % 2 * 8, number % 2 == 1
        if row < tile.num_rows:
            own = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(_place(ctx, number), own)
            row_max, total = (cutlass.select_(is_second, x[1], x[0]) for x in sums)
            lse = merge.finish(row_max, total, own)
            if tile.splits.last - tile.splits.first > 1:
                merge.store_part(ctx, lse, own, row, number, group, Int32(0))
            else:
                merge.store(ctx, lse, own, row, number)


def _place(ctx: Context, number: Int32) -> cute.Tensor:
    """The thread's place for a vector of its rows, two rows in turn."""
    return ctx.sGroup[None, ctx.warp * WARP + ctx.lane, number]
