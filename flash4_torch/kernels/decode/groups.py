"""Splits of a fixed length, whose results depend on nothing but their keys, and who merges them.

A cluster has groups of splits after one another; each of its CTAs has some of a group's splits, and goes
through their blocks as through one split's. A CTA alone merges the splits as they come. Else each keeps the
results of its own, and the cluster merges all of them in their order: with the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.band import Span
from ..common.warp_mma import rows_of
from ..common.warps import WARP
from . import mainloop as narrow
from . import merge, splits, wide
from .context import Context
from .epilogue import normalise, ordered_row, share
from .mainloop import AfterBlock, Thread, begin_split
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
    tile, clusters = ctx.tile, cute.arch.grid_dim()[0] // ctx.plan.form.cluster
    each = cute.ceil_div(tile.num_splits, clusters)
    first = tile.splits.first + tile.split * each
    own = Span(first, cutlass.min(first + each, tile.splits.last))
    if cutlass.const_expr(ctx.plan.form.cluster == 1):
        _run_alone(ctx, t, own)
    else:
        _run_together(ctx, t, own)
    if cutlass.const_expr(ctx.plan.form.parts):
        if tile.num_splits > 1:
            rank = merge.rank_of(ctx)
            if merge.is_last(ctx, rank, cute.ceil_div(tile.num_splits, each)):
                merge.merge_parts(ctx, t.rows, tile.splits, rank)


@cute.jit
def _run_alone(ctx: Context, t: Thread, groups: Span) -> None:
    """Go through groups one after another as through one split, without a stop between them."""
    sums = Sums(*(cute.make_rmem_tensor(2, Float32) for _ in range(2)))
    number = merge.parts_of(ctx)
    shares = [
        splits.splits_of_group(ctx.tile.blocks, n, ctx.divisors, number)
        for n in (groups.first, groups.last - 1)
    ]
    blocks = splits.blocks_of(ctx.tile.blocks, Span(shares[0].first, shares[1].last), ctx.divisors)
    _begin(ctx, sums)
    begin_split(t)
    _mainloop(ctx, t, blocks, partial(_add_after, ctx, t, sums, number, blocks.last))


@cute.jit
def _run_together(ctx: Context, t: Thread, groups: Span) -> None:
    """Go through groups together with the CTAs of the cluster, which merge each of them."""
    rank, number = merge.rank_of(ctx), merge.parts_of(ctx)
    for group in cutlass.range(groups.first, groups.last, unroll=1):
        begin_split(t)
        # Every warp has read the last block before another one takes its place, and Q, which a CTA without
        # blocks does not wait for, is there before it is copied once more.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        shares = splits.shares_of_group(ctx.tile.blocks, group, ctx.divisors, number, ctx.plan.form.cluster)
        own = shares.of(rank)
        blocks = splits.blocks_of(ctx.tile.blocks, own, ctx.divisors)
        _mainloop(ctx, t, blocks, partial(_keep_after, ctx, t, own, blocks.last))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        merge.merge_cluster(ctx, t.rows, shares, group, ctx.tile.num_splits > 1, rank)
        # Others may still read this CTA's results.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def _mainloop(ctx: Context, t: Thread, blocks: Span, after_block: AfterBlock) -> None:
    (wide if ctx.plan.form.wgmma else narrow).mainloop(ctx, t, blocks, after_block)


@cute.jit
def _begin(ctx: Context, sums: Sums) -> None:
    sums.row_max.fill(-Float32.inf)
    sums.total.fill(0.0)
    nothing = cute.make_rmem_tensor(VECTOR, Float32)
    nothing.fill(0.0)
    for number in cutlass.range_constexpr(ctx.plan.vectors):
        cute.autovec_copy(nothing, _place(ctx, number))


@cute.jit
def _keep_after(ctx: Context, t: Thread, own: Span, last: Int32, n: Int32) -> None:
    """Keep the results of a split that ends after block n, and begin another one.

    Of more splits than there is room for, which are no law's, all but the first few are one.
    """
    blocks, kept = ctx.divisors.split_blocks, ctx.plan.kept
    slot = cutlass.min(n // blocks - own.first, kept - 1)
    if ((n + 1) % blocks == 0) & (slot < kept - 1) | (n + 1 == last):
        lse, values = normalise(ctx, t), rows_of(t.O)
        if slot == kept - 1:
            # Every warp has read the last block, whose place O takes.
            cute.arch.sync_threads()
        for r in cutlass.range_constexpr(2):
            share(ctx, values[r, None], lse[r], r, slot)
        begin_split(t)


@cute.jit
def _add_after(ctx: Context, t: Thread, sums: Sums, number: Int32, last: Int32, n: Int32) -> None:
    """Merge a split that ends after block n with those of its group before it, and begin another one."""
    if ((n + 1) % ctx.divisors.split_blocks == 0) | (n + 1 == last):
        lse, values = normalise(ctx, t), rows_of(t.O)
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
        group = splits.group_of(n, ctx.divisors, number)
        if (splits.group_of(n + 1, ctx.divisors, number) != group) | (n + 1 == last):
            _store(ctx, t, sums, group)
            _begin(ctx, sums)


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
