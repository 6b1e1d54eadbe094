"""A CTA that has whole groups of splits: it goes through their blocks as through one split's, and merges a
group's splits in registers, with the bits that a cluster's merge has.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import merge, splits
from .context import Context
from .epilogue import normalise, ordered_row, store_row
from .mainloop import Thread, begin_split, mainloop, values_of
from .plan import VECTOR


class Group(NamedTuple):
    """What a group's splits are merged to: O as `Thread` has it, and a maximum and a sum of each row."""

    O: cute.Tensor
    row_max: cute.Tensor
    total: cute.Tensor


@cute.jit
def run(ctx: Context, t: Thread) -> None:
    """Go through the CTA's groups; the last CTA of a tile merges the tile's."""
    tile = ctx.tile
    group = Group(cute.make_rmem_tensor_like(t.O), *(cute.make_rmem_tensor(2, Float32) for _ in range(2)))
    step, several = cute.arch.grid_dim()[0], tile.splits.last - tile.splits.first > 1
    index = tile.split
    while index < tile.splits.last:
        _begin(group)
        begin_split(t)
        # Every warp has read the last block before another one takes its place.
        cute.arch.sync_threads()
        blocks = splits.blocks_of_group(tile.blocks, index, ctx.divisors, ctx.tensors.partial_lse.shape[0])
        mainloop(ctx, t, blocks, partial(_after_block, ctx, t, group, blocks.last))
        for r in cutlass.range_constexpr(2):
            if t.rows[r] < tile.num_rows:
                own = values_of(group.O)[r, None]
                lse = merge.finish(group.row_max[r], group.total[r], own)
                if several:
                    _store_part(ctx, lse, own, t.rows[r], r, index)
                else:
                    store_row(ctx, own, lse, t.rows[r])
        index = index + step
    if several:
        ctas = cutlass.min(tile.splits.last - tile.splits.first, step)
        if merge.is_last(ctx, Int32(0), ctas):
            merge.merge_parts(ctx, t.rows, tile.splits, Int32(0))


@cute.jit
def _begin(group: Group) -> None:
    group.O.fill(0.0)
    group.row_max.fill(-Float32.inf)
    group.total.fill(0.0)


@cute.jit
def _after_block(ctx: Context, t: Thread, group: Group, last: Int32, n: Int32) -> None:
    """Merge a split that ends after block n, and begin another one."""
    if (n + 1 == splits.end_of_split(n, ctx.divisors)) | (n + 1 == last):
        lse = normalise(ctx, t)
        for r in cutlass.range_constexpr(2):
            sums, part = values_of(group.O)[r, None], values_of(t.O)[r, None]
            group.row_max[r], group.total[r] = merge.add(group.row_max[r], group.total[r], sums, lse[r], part)
        begin_split(t)


@cute.jit
def _store_part(
    ctx: Context, lse: Float32, values: cute.Tensor, row: Int32, r: cutlass.Constexpr, group: Int32
) -> None:
    ordered = ordered_row(values, ctx.plan)
    for m in cutlass.range_constexpr(cute.size(values) // VECTOR):
        vector = cute.make_rmem_tensor(VECTOR, Float32)
        for c in cutlass.range_constexpr(VECTOR):
            vector[c] = ordered[VECTOR * m + c]
        merge.store_part(ctx, lse, vector, row, Int32(2 * m + r), group, Int32(0))
