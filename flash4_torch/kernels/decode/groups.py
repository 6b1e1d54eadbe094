"""Splits of a fixed length, whose results depend on nothing but their keys, and who merges them.

A cluster has a group of splits, or several groups in turn; each of its CTAs has some of a group's splits, and
goes through their blocks as through one split's. A CTA alone merges the splits as they come. Else each keeps
the results of its own, and the cluster merges all of them in their order: with the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.band import Span
from ..common.warps import WARP
from . import merge, splits
from .context import Context
from .epilogue import normalise, ordered_row, share
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
    """Go through the cluster's groups; the last cluster of a tile merges the tile's."""
    tile, cluster = ctx.tile, ctx.plan.form.cluster
    rank = merge.rank_of(ctx)
    step, several = cute.arch.grid_dim()[0] // cluster, tile.num_splits > 1
    number = merge.parts_of(ctx)
    sums = Sums(*(cute.make_rmem_tensor(2, Float32) for _ in range(2)))
    group = tile.split
    while group < tile.splits.last:
        begin_split(t)
        # Every warp has read the last block before another one takes its place.
        cute.arch.sync_threads()
        shares = splits.shares_of_group(tile.blocks, group, ctx.divisors, number, cluster)
        own = shares.of(rank)
        blocks = splits.blocks_of(tile.blocks, own, ctx.divisors)
        if cutlass.const_expr(cluster == 1):
            _begin(ctx, sums)
            mainloop(ctx, t, blocks, partial(_add_after, ctx, t, sums, own, blocks.last))
            _store(ctx, t, sums, group)
        else:
            mainloop(ctx, t, blocks, partial(_keep_after, ctx, t, own, blocks.last))
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            merge.merge_cluster(ctx, t.rows, shares, group, several, rank)
            # Others may still read this CTA's results.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        group = group + step
    if cutlass.const_expr(ctx.plan.form.parts):
        if several:
            if merge.is_last(ctx, rank, cutlass.min(tile.num_splits, step)):
                merge.merge_parts(ctx, t.rows, tile.splits, rank)


@cute.jit
def _begin(ctx: Context, sums: Sums) -> None:
    sums.row_max.fill(-Float32.inf)
    sums.total.fill(0.0)
    nothing = cute.make_rmem_tensor(VECTOR, Float32)
    nothing.fill(0.0)
    for number in cutlass.range_constexpr(ctx.plan.vectors):
        cute.autovec_copy(nothing, _place(ctx, number))


@cute.jit
def _ends(ctx: Context, own: Span, last: Int32, n: Int32) -> cutlass.Boolean:
    """Whether a split ends after block n; of too many, which are no law's, all but the first few are one."""
    blocks = ctx.divisors.split_blocks
    at_end = (n + 1) % blocks == 0
    if cutlass.const_expr(ctx.plan.kept > 0):
        at_end = at_end & (n // blocks - own.first < ctx.plan.kept - 1)
    return at_end | (n + 1 == last)


@cute.jit
def _keep_after(ctx: Context, t: Thread, own: Span, last: Int32, n: Int32) -> None:
    """Keep the results of a split that ends after block n, and begin another one."""
    if _ends(ctx, own, last, n):
        lse, values, kept = normalise(ctx, t), values_of(t.O), ctx.plan.kept
        slot = cutlass.min(n // ctx.divisors.split_blocks - own.first, kept - 1)
        if slot == kept - 1:
            # Every warp has read the last block, whose place O takes.
            cute.arch.sync_threads()
        for r in cutlass.range_constexpr(2):
            share(ctx, values[r, None], lse[r], r, slot)
        begin_split(t)


@cute.jit
def _add_after(ctx: Context, t: Thread, sums: Sums, own: Span, last: Int32, n: Int32) -> None:
    """Merge a split that ends after block n with those before it, and begin another one."""
    if _ends(ctx, own, last, n):
        lse, values = normalise(ctx, t), values_of(t.O)
        for r in cutlass.range_constexpr(2):
            ordered, row_max, total = ordered_row(values[r, None], ctx.plan), sums.row_max[r], sums.total[r]
            for m in cutlass.range_constexpr(ctx.plan.vectors // 2):
                part, sum_ = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
                for c in cutlass.range_constexpr(VECTOR):
                    part[c] = ordered[VECTOR * m + c]
                cute.autovec_copy(_place(ctx, 2 * m + r), sum_)
                sums.row_max[r], sums.total[r] = merge.add(row_max, total, sum_, lse[r], part)
                cute.autovec_copy(sum_, _place(ctx, 2 * m + r))
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
            merge.store_result(ctx, lse, own, row, number, group, tile.num_splits > 1, Int32(0))


def _place(ctx: Context, number: Int32) -> cute.Tensor:
    """The thread's place for a vector of its rows, two rows in turn."""
    return ctx.sGroup[None, ctx.warp * WARP + ctx.lane, number]
