"""The merge of a tile's splits: in their cluster, and of several clusters' parts by the last one."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...configs.decode import MMA_ROWS
from ..common import softmax
from ..common.attn_mask import vector_at
from ..common.band import Span
from ..common.scores import LOG2E
from ..common.softmax import LN2
from ..common.warps import WARP
from .context import Context
from .epilogue import store_vector, with_sink
from .plan import VECTOR

DEPTH = 8
"""Parts that a thread loads at a time."""


@cute.jit
def merge(ctx: Context, rows: tuple[Int32, Int32]) -> None:
    """Merge the splits of the tile, in the order of their keys.

    The CTAs of a cluster divide the vectors of O among them, each thread those of its own place. A cluster's
    splits are merged first, then clusters; which splits a cluster has depends on their numbers alone.
    """
    plan, tile, cluster = ctx.plan, ctx.tile, ctx.plan.form.cluster
    rank = Int32(cute.arch.block_idx_in_cluster())
    clusters = Span(tile.splits.first // cluster, (tile.splits.last - 1) // cluster + 1)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    for i in cutlass.range_constexpr(0, plan.vectors, cluster):
        number, row = rank + i, rows[0] + (rank + i) % 2 * 8
        if (number < plan.vectors) & (row < tile.num_rows):
            lse, values = _merge_cluster(ctx, number, tile.split - rank)
            if cutlass.const_expr(plan.form.parts):
                if clusters.last - clusters.first > 1:
                    store_part(ctx, lse, values, row, number, tile.split // cluster, rank)
                else:
                    store(ctx, lse, values, row, number)
            else:
                store(ctx, lse, values, row, number)
    # Others may still read this CTA's part.
    cute.arch.cluster_arrive()
    if cutlass.const_expr(plan.form.parts):
        if clusters.last - clusters.first > 1:
            if is_last(ctx, rank, clusters.last - clusters.first):
                merge_parts(ctx, rows, clusters, rank)
    cute.arch.cluster_wait()


@cute.jit
def _merge_cluster(ctx: Context, number: Int32, first_split: Int32) -> tuple[Float32, cute.Tensor]:
    """Merge the parts of a vector that CTAs of the cluster have."""
    tile, thread = ctx.tile, ctx.warp * WARP + ctx.lane
    row = ctx.row_warp * MMA_ROWS + number % 2 * 8 + ctx.lane // 4
    O, lse = ctx.sO[None, thread, number].iterator, ctx.sLse.iterator + row
    parts = []
    # All of these loads are under way before one of them is waited for.
    for rank in cutlass.range_constexpr(ctx.plan.form.cluster):
        split = first_split + rank
        has_work = (tile.splits.first <= split) & (split < tile.splits.last)
        part, part_lse = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(1, Float32)
        part.fill(0.0)
        part_lse.fill(-Float32.inf)
        if has_work:
            cute.autovec_copy(_remote(O, rank, VECTOR), part)
            cute.autovec_copy(_remote(lse, rank, 1), part_lse)
        parts.append((part_lse, part))
    row_max, total, values = _nothing()
    for part_lse, part in parts:
        row_max, total = add(row_max, total, values, part_lse[0], part)
    return finish(row_max, total, values), values


def _remote(own: cute.Pointer, rank: int, size: int) -> cute.Tensor:
    """The same place in the shared memory of another CTA of the cluster."""
    return cute.make_tensor(cute.arch.map_dsmem_ptr(own, rank), cute.make_layout(size))


@cute.jit
def merge_parts(ctx: Context, rows: tuple[Int32, Int32], parts: Span, rank: Int32) -> None:
    """Merge and store those vectors of the tile whose parts this rank has."""
    for i in cutlass.range_constexpr(0, ctx.plan.vectors, ctx.plan.form.cluster):
        number, row = rank + i, rows[0] + (rank + i) % 2 * 8
        if (number < ctx.plan.vectors) & (row < ctx.tile.num_rows):
            token, head = ctx.place_of(row)
            row_max, total, values = _nothing()
            for part in cutlass.range(parts.first, parts.last, unroll=DEPTH):
                lse = ctx.tensors.partial_lse[part, rank, head, token]
                own = cute.make_rmem_tensor(VECTOR, Float32)
                cute.autovec_copy(_place(ctx, part, token, head, number), own)
                row_max, total = add(row_max, total, values, lse, own)
            store(ctx, finish(row_max, total, values), values, row, number)


@cute.jit
def store_part(
    ctx: Context, lse: Float32, values: cute.Tensor, row: Int32, number: Int32, part: Int32, rank: Int32
) -> None:
    """Store a part of a vector. In a cluster all vectors of a rank are of one row, else they are of two."""
    token, head = ctx.place_of(row)
    cute.autovec_copy(values, _place(ctx, part, token, head, number))
    target, is_first = ctx.tensors.partial_lse, number < max(ctx.plan.form.cluster, 2)
    if is_first & (ctx.key_warp == 0) & (ctx.lane % 4 == 0):
        target[part, rank, head, token] = lse


def _place(ctx: Context, part: Int32, token: Int32, head: Int32, number: Int32) -> cute.Tensor:
    """The place of a vector among the parts: of a row, lanes and warps follow one another."""
    lanes = 4 * ctx.plan.key_warps
    vector = number // 2 * lanes + ctx.key_warp * 4 + ctx.lane % 4
    return vector_at(ctx.tensors.partial_out[part, token, head, None].iterator + vector * VECTOR, VECTOR)


@cute.jit
def store(ctx: Context, lse: Float32, values: cute.Tensor, row: Int32, number: Int32) -> None:
    """Store a vector of results, and the row's lse once."""
    token, head = ctx.place_of(row)
    share, lse = with_sink(ctx, lse, head)
    for c in cutlass.range_constexpr(VECTOR):
        values[c] = values[c] * share
    store_vector(ctx, values, number // 2, token, head)
    target = ctx.tensors.lse
    if (number < 2) & (ctx.key_warp == 0) & (ctx.lane % 4 == 0):
        target[head, token] = lse


def _nothing() -> tuple[Float32, Float32, cute.Tensor]:
    """The maximum, the sum of weights, and the values of no parts."""
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.fill(0.0)
    return -Float32.inf, Float32(0.0), values


@cute.jit
def add(
    row_max: Float32, total: Float32, values: cute.Tensor, lse: Float32, part: cute.Tensor
) -> tuple[Float32, Float32]:
    """Add a part to `values`; one in which the row sees nothing changes no bit.

    What is fused is said, so that all kernels that merge give the same bits.
    """
    highest = softmax.larger(row_max, lse)
    reference = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
    factor = cute.math.exp2((row_max - reference) * LOG2E, fastmath=True)
    weight = cute.math.exp2((lse - reference) * LOG2E, fastmath=True)
    for c in cutlass.range_constexpr(cute.size(values)):
        values[c] = _fma(weight, part[c], values[c] * factor)
    return highest, _fma(total, factor, weight)


def _fma(x: Float32, y: Float32, z: Float32) -> Float32:
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[x, y, z]
    )


@cute.jit
def finish(row_max: Float32, total: Float32, values: cute.Tensor) -> Float32:
    """Normalise the values, and return their lse.

    A part alone has weight 1: what is left of it is the same, bit for bit.
    """
    lse, inverse = row_max, Float32(1.0)
    if total != 1.0:
        reference = cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max)
        inverse = cute.arch.rcp_approx(total)
        lse = _fma(cute.math.log2(total, fastmath=True), Float32(LN2), reference)
    for c in cutlass.range_constexpr(cute.size(values)):
        values[c] = cutlass.select_(total != 0.0, values[c] * inverse, Float32(0.0))
    return lse


@cute.jit
def is_last(ctx: Context, rank: Int32, number: Int32) -> Boolean:
    """Whether the other ones of `number` CTAs of this rank have stored their parts; counts this one.

    The barrier puts all threads' stores before the count, which releases them to the GPU. It is back at 0
    after the last one.
    """
    cute.arch.sync_threads()
    _, y, _ = cute.arch.block_idx()
    tiles, sCount = cute.arch.grid_dim()[1], ctx.sCount
    if ctx.warp * WARP + ctx.lane == 0:
        tile = ctx.tile.batch * tiles + y
        counter = ctx.tensors.counters.iterator + tile * ctx.plan.form.cluster + rank
        sCount[0] = cute.arch.inline_ptx(
            "atom.acq_rel.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Uint32],
            read_only_args=[counter.toint(), Uint32(number - 1)],
        )
    cute.arch.sync_threads()
    return Int32(sCount[0]) == number - 1
