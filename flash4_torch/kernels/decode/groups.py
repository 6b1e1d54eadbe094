"""Splits of a fixed length, whose results depend on nothing but their keys, and who merges them.

A cluster has groups of splits after one another; each of its CTAs has some of a group's splits, and goes
through their blocks as through one split's. A CTA alone merges the splits as they come. Else each keeps the
results of its own, and the cluster merges all of them in their order: with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..common.band import Span
from ..common.warp_mma import rows_of
from ..common.warps import WARP
from . import merge, splits
from .context import Context
from .epilogue import normalise, ordered_row, share, store_parts, store_row
from .mainloop import Splits, Thread, begin_split
from .plan import VECTOR

_AT_ONCE = 2
"""Vectors that a thread loads at a time."""

Mainloop = Callable[[Context, Thread, Span, Splits], None]
"""The loop over blocks of one of the kernels."""


class Sums(NamedTuple):
    """Registers of a group: of the thread's two rows the maxima of splits' lse, and sums of weights."""

    row_max: cute.Tensor
    total: cute.Tensor
    values: cute.Tensor | None
    """(2, columns): what O of splits is merged to. None where it is in shared memory, in the thread's own
    place."""


@cute.jit
def run(ctx: Context, t: Thread, mainloop: cutlass.Constexpr[Mainloop]) -> None:
    """Go through the cluster's groups; the last cluster of a tile merges the tile's, unless `merge_together`
    has to follow.
    """
    tile, own = ctx.tile, _own_groups(ctx)
    if cutlass.const_expr(ctx.plan.group_ctas == 1):
        _run_alone(ctx, t, mainloop)
    else:
        _run_together(ctx, t, own, mainloop)
    if cutlass.const_expr(ctx.plan.form.parts and not ctx.plan.merges_together):
        if tile.num_splits > 1:
            rank = merge.rank_of(ctx)
            if merge.is_last(ctx, rank, cute.ceil_div(tile.num_splits, _groups_of_each(ctx))):
                merge.merge_parts(ctx, t.rows, tile.splits, rank)


@cute.jit
def merge_together(ctx: Context, rows: tuple[Int32, Int32]) -> None:
    """Merge the tile's groups by the last cluster, whose CTAs divide the vectors of O among them."""
    tile, rank = ctx.tile, merge.rank_of(ctx)
    # Results of the cluster's CTAs are stored before each of them counts.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    clusters = cute.ceil_div(tile.num_splits, _groups_of_each(ctx) * ctx.plan.form.cluster)
    if merge.is_last(ctx, rank, clusters):
        merge.merge_parts(ctx, rows, tile.splits, rank)


def _groups_of_each(ctx: Context) -> Int32:
    """Groups that a cluster has, or a CTA alone; the tile's last one may have fewer."""
    return cute.ceil_div(ctx.tile.num_splits, cute.arch.grid_dim()[0] // ctx.plan.group_ctas)


@cute.jit
def _own_groups(ctx: Context) -> Span:
    """The groups of the cluster, or of a CTA alone."""
    tile, each = ctx.tile, _groups_of_each(ctx)
    first = tile.splits.first + tile.split * each
    return Span(first, cutlass.min(first + each, tile.splits.last))


@cute.jit
def blocks_of_all(ctx: Context) -> Span:
    """The blocks of a CTA that has its groups alone."""
    groups, number = _own_groups(ctx), merge.parts_of(ctx)
    shares = [
        splits.splits_of_group(ctx.tile.blocks, n, ctx.divisors, number)
        for n in (groups.first, groups.last - 1)
    ]
    return splits.blocks_of(ctx.tile.blocks, Span(shares[0].first, shares[1].last), ctx.divisors)


@cute.jit
def _run_alone(ctx: Context, t: Thread, mainloop: cutlass.Constexpr[Mainloop]) -> None:
    """Go through groups one after another as through one split, without a stop between them."""
    values = None
    if cutlass.const_expr(ctx.plan.form.group_in_regs):
        values = cute.make_rmem_tensor((2, ctx.plan.row_columns), Float32)
    sums = Sums(*(cute.make_rmem_tensor(2, Float32) for _ in range(2)), values)
    number, blocks = merge.parts_of(ctx), blocks_of_all(ctx)
    _begin(ctx, sums)
    begin_split(t)
    add, close = partial(_add, ctx, sums), partial(_close, ctx, t, sums, number, blocks.last)
    in_regs = ctx.plan.form.group_in_regs
    end = partial(_end, add, close)
    mainloop(ctx, t, blocks, Splits(partial(_begins, ctx), end, add if in_regs else None, close))


@cute.jit
def _run_together(ctx: Context, t: Thread, groups: Span, mainloop: cutlass.Constexpr[Mainloop]) -> None:
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
        begins = partial(_begins_kept, ctx, own) if ctx.plan.kept > 1 else None
        own_splits = Splits(begins, partial(_keep, ctx, own))
        if cutlass.const_expr(ctx.plan.form.group_in_regs):
            held = _make_held(ctx)
            own_splits = Splits(begins, partial(_keep_both, ctx, own, held), partial(_hold, ctx, held))
        mainloop(ctx, t, blocks, own_splits)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        merge.merge_cluster(ctx, t.rows, shares, group, ctx.tile.num_splits > 1, rank)
        # Others may still read this CTA's results.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def _begin(ctx: Context, sums: Sums) -> None:
    sums.row_max.fill(-Float32.inf)
    sums.total.fill(0.0)
    if cutlass.const_expr(sums.values is not None):
        sums.values.fill(0.0)
    else:
        nothing = cute.make_rmem_tensor(VECTOR, Float32)
        nothing.fill(0.0)
        for number in cutlass.range_constexpr(ctx.plan.vectors):
            cute.autovec_copy(nothing, _place(ctx, number))


def _begins(ctx: Context, n: Int32) -> Boolean:
    """Whether a split begins with block n."""
    return n % ctx.divisors.split_blocks == 0


def _begins_kept(ctx: Context, own: Span, n: Int32) -> Boolean:
    """Whether block n begins a split that is kept separately. Only the first plan.kept splits are: further
    ones join the last of these, and then bits are not batch invariant.
    """
    return _begins(ctx, n) & (n // ctx.divisors.split_blocks - own.first < ctx.plan.kept)


@cute.jit
def _keep(ctx: Context, own: Span, t: Thread, n: Int32) -> None:
    """Keep the results of a split that ends after block n, and begin another one."""
    kept = ctx.plan.kept
    slot = cutlass.min(n // ctx.divisors.split_blocks - own.first, kept - 1)
    lse, values = normalise(ctx, t), rows_of(t.O)
    if slot == kept - 1:
        # Every warp has read the last block, whose place O takes.
        cute.arch.sync_threads()
    for r in cutlass.range_constexpr(2):
        share(ctx, values[r, None], lse[r], r, slot)
    begin_split(t)


class Held(NamedTuple):
    """Registers for results of the thread's two rows of the first of two splits that a CTA keeps."""

    lse: cute.Tensor
    values: cute.Tensor
    """(2, columns)"""


def _make_held(ctx: Context) -> Held:
    held = Held(*(cute.make_rmem_tensor(shape, Float32) for shape in (2, (2, ctx.plan.row_columns))))
    for registers in held:
        registers.fill(0.0)
    return held


@cute.jit
def _hold(ctx: Context, held: Held, t: Thread) -> None:
    """Keep the results of the first of two splits, and begin another one."""
    held.lse.store(normalise(ctx, t).load())
    values = rows_of(t.O)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(ctx.plan.row_columns):
            held.values[r, c] = values[r, c]
    begin_split(t)


@cute.jit
def _keep_both(ctx: Context, own: Span, held: Held, t: Thread, n: Int32) -> None:
    """Keep the results of the last split, which ends after block n, and of the one that is held, if any."""
    slot = cutlass.min(n // ctx.divisors.split_blocks - own.first, 1)
    lse, values = normalise(ctx, t), rows_of(t.O)
    # Every warp has read the last block, whose place both take.
    cute.arch.sync_threads()
    for r in cutlass.range_constexpr(2):
        if slot == 1:
            share(ctx, held.values[r, None], held.lse[r], r, 0)
        share(ctx, values[r, None], lse[r], r, slot)


@cute.jit
def _end(add: cutlass.Constexpr[Callable], close: cutlass.Constexpr[Callable], t: Thread, n: Int32) -> None:
    add(t)
    close(n)


@cute.jit
def _add(ctx: Context, sums: Sums, t: Thread) -> None:
    """Merge a split with those of its group before it, and begin another one."""
    lse, values = normalise(ctx, t), rows_of(t.O)
    for r in cutlass.range_constexpr(2):
        sums.row_max[r], sums.total[r], weights = merge.weights_of(sums.row_max[r], sums.total[r], lse[r])
        if cutlass.const_expr(sums.values is not None):
            merge.add_values(sums.values[r, None], values[r, None], weights)
        else:
            _add_in_smem(ctx, values[r, None], weights, r)
    begin_split(t)


@cute.jit
def _close(ctx: Context, t: Thread, sums: Sums, number: Int32, last: Int32, n: Int32) -> None:
    """Store a group, and begin another one, if its last split ended after block n."""
    group = splits.group_of(n, ctx.divisors, number)
    if (splits.group_of(n + 1, ctx.divisors, number) != group) | (n + 1 == last):
        _store(ctx, t, sums, group)
        _begin(ctx, sums)


@cute.jit
def _add_in_smem(ctx: Context, values: cute.Tensor, weights: merge.Weights, r: cutlass.Constexpr) -> None:
    """Add a split's values of the thread's row r to those of its group."""
    ordered = ordered_row(values, ctx.plan)
    for m in cutlass.range_constexpr(ctx.plan.vectors // 2):
        part, sum_ = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        for c in cutlass.range_constexpr(VECTOR):
            part[c] = ordered[VECTOR * m + c]
        cute.autovec_copy(_place(ctx, 2 * m + r), sum_)
        merge.add_values(sum_, part, weights)
        cute.autovec_copy(sum_, _place(ctx, 2 * m + r))
        if cutlass.const_expr(m % _AT_ONCE == _AT_ONCE - 1):
            # Else ptxas loads all of them first, and has no registers left.
            cute.arch.sync_warp()


@cute.jit
def _store(ctx: Context, t: Thread, sums: Sums, group: Int32) -> None:
    """Store results if the tile has one group, else this group's part of them."""
    if cutlass.const_expr(sums.values is not None):
        _store_regs(ctx, t, sums, group)
    else:
        _store_smem(ctx, t, sums, group)


@cute.jit
def _store_regs(ctx: Context, t: Thread, sums: Sums, group: Int32) -> None:
    plan, values = ctx.plan, sums.values
    for r in cutlass.range_constexpr(2):
        if t.rows[r] < ctx.tile.num_rows:
            lse = merge.finish(sums.row_max[r], sums.total[r], values[r, None])
            if cutlass.const_expr(plan.form.parts):
                if ctx.tile.num_splits > 1:
                    store_parts(ctx, values[r, None], lse, r, t.rows[r], group, Int32(r % plan.form.cluster))
                else:
                    store_row(ctx, values[r, None], lse, t.rows[r])
            else:
                store_row(ctx, values[r, None], lse, t.rows[r])


@cute.jit
def _store_smem(ctx: Context, t: Thread, sums: Sums, group: Int32) -> None:
    tile = ctx.tile
    # A loop, since ptxas would keep the addresses of all vectors while blocks are gone through.
    for number in cutlass.range(ctx.plan.vectors, unroll=1):
        row, is_second = t.rows[0] + number % 2 * 8, number % 2 == 1
        if row < tile.num_rows:
            own = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(_place(ctx, number), own)
            row_max, total = (cutlass.select_(is_second, x[1], x[0]) for x in sums[:2])
            lse = merge.finish(row_max, total, own)
            # The rank that merges the vector, if several do.
            rank = number % ctx.plan.form.cluster
            merge.store_result(ctx, lse, own, row, number, group, tile.num_splits > 1, rank)


def _place(ctx: Context, number: Int32) -> cute.Tensor:
    """The thread's place for a vector of its rows, two rows in turn."""
    return ctx.sGroup[None, ctx.warp * WARP + ctx.lane, number]
