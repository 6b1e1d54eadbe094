"""The merge of a tile's splits, by the CTA that is done last."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ..common import softmax
from ..common.attn_mask import vector_at
from ..common.rounding import round_to
from ..common.scores import LOG2E
from ..common.softmax import LN2
from .context import Context
from .epilogue import with_sink

VECTOR = 4
"""Columns that a thread merges at once, 16 bytes of a part."""
DEPTH = 8
"""Splits whose parts a thread loads at a time."""


@cute.jit
def is_last(ctx: Context, thread: Int32) -> Boolean:
    """Whether all other splits of the tile are stored; counts this one as stored.

    The barrier puts all threads' stores before the count, which releases them to the GPU. It is back at 0
    after the last CTA.
    """
    cute.arch.sync_threads()
    _, y, _ = cute.arch.block_idx()
    tiles, sCount = cute.arch.grid_dim()[1], ctx.sCount
    if thread == 0:
        counter = ctx.tensors.counters.iterator + ctx.tile.batch * tiles + y
        sCount[0] = cute.arch.inline_ptx(
            "atom.acq_rel.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Uint32],
            read_only_args=[counter.toint(), Uint32(ctx.tile.num_splits - 1)],
        )
    cute.arch.sync_threads()
    return Int32(sCount[0]) == ctx.tile.num_splits - 1


@cute.jit
def merge(ctx: Context, thread: Int32) -> None:
    """Merge the splits of all rows of the tile, in the order of their keys."""
    plan, tile = ctx.plan, ctx.tile
    vectors = plan.features.Dv // VECTOR
    end = cutlass.min(tile.first_row + plan.rows, tile.num_rows)
    for i in cutlass.range(thread, (end - tile.first_row) * vectors, plan.threads, unroll=1):
        _merge_vector(ctx, tile.first_row + i // vectors, i % vectors)


@cute.jit
def _merge_vector(ctx: Context, row: Int32, vector: Int32) -> None:
    """Merge some columns of a row; a split in which the row sees nothing changes no bit."""
    splits, (token, head) = ctx.tile.splits, ctx.place_of(row)
    row_max, total, values = -Float32.inf, Float32(0.0), cute.make_rmem_tensor(VECTOR, Float32)
    values.fill(0.0)
    for split in cutlass.range(splits.first, splits.last, unroll=DEPTH):
        lse = ctx.tensors.partial_lse[split, head, token]
        own = cute.make_rmem_tensor(VECTOR, Float32)
        start = ctx.tensors.partial_out[split, token, head, None].iterator + vector * VECTOR
        cute.autovec_copy(vector_at(start, VECTOR), own)
        highest = softmax.larger(row_max, lse)
        reference = Float32(0.0) if highest == -Float32.inf else highest
        factor = cute.math.exp2((row_max - reference) * LOG2E, fastmath=True)
        weight = cute.math.exp2((lse - reference) * LOG2E, fastmath=True)
        row_max, total = highest, total * factor + weight
        for c in cutlass.range_constexpr(VECTOR):
            values[c] = values[c] * factor + weight * own[c]
    reference = Float32(0.0) if row_max == -Float32.inf else row_max
    # One split alone has weight 1: its results are those of a launch with one split, bit for bit.
    inverse, lse = Float32(1.0), reference
    if total != 1.0:
        inverse = cute.arch.rcp_approx(total)
        lse = reference + cute.math.log2(total, fastmath=True) * LN2
    share, lse = with_sink(ctx, lse, head)
    rounded = cute.make_rmem_tensor(VECTOR, ctx.plan.dtype)
    for c in cutlass.range_constexpr(VECTOR):
        product = values[c] * inverse * share
        values[c] = product if total != 0.0 else Float32(0.0)
    round_to(values, rounded)
    target, target_lse = ctx.tensors.out[token, head, None].iterator, ctx.tensors.lse
    cute.autovec_copy(rounded, vector_at(target + vector * VECTOR, VECTOR))
    if vector == 0:
        target_lse[head, token] = lse
