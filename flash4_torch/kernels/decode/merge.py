"""The merge of a tile's splits: in their cluster, and by the last cluster if there are several."""

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
"""Clusters whose parts a thread loads at a time."""


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
            if cutlass.const_expr(plan.form.clusters):
                if clusters.last - clusters.first > 1:
                    _store_part(ctx, lse, values, row, number, rank)
                else:
                    _store(ctx, lse, values, row, number)
            else:
                _store(ctx, lse, values, row, number)
    # Others may still read this CTA's part.
    cute.arch.cluster_arrive()
    if cutlass.const_expr(plan.form.clusters):
        if clusters.last - clusters.first > 1:
            if _is_last(ctx, rank, clusters.last - clusters.first):
                for i in cutlass.range_constexpr(0, plan.vectors, cluster):
                    number, row = rank + i, rows[0] + (rank + i) % 2 * 8
                    if (number < plan.vectors) & (row < tile.num_rows):
                        lse, values = _merge_clusters(ctx, row, number, clusters, rank)
                        _store(ctx, lse, values, row, number)
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
        row_max, total = _add(row_max, total, values, part_lse[0], part)
    return _finish(row_max, total, values), values


def _remote(own: cute.Pointer, rank: int, size: int) -> cute.Tensor:
    """The same place in the shared memory of another CTA of the cluster."""
    return cute.make_tensor(cute.arch.map_dsmem_ptr(own, rank), cute.make_layout(size))


@cute.jit
def _merge_clusters(
    ctx: Context, row: Int32, number: Int32, clusters: Span, rank: Int32
) -> tuple[Float32, cute.Tensor]:
    """Merge the parts of a vector that clusters have stored."""
    token, head = ctx.place_of(row)
    row_max, total, values = _nothing()
    for cluster in cutlass.range(clusters.first, clusters.last, unroll=DEPTH):
        lse = ctx.tensors.partial_lse[cluster, rank, head, token]
        part = cute.make_rmem_tensor(VECTOR, Float32)
        cute.autovec_copy(_place(ctx, cluster, token, head, number), part)
        row_max, total = _add(row_max, total, values, lse, part)
    return _finish(row_max, total, values), values


@cute.jit
def _store_part(
    ctx: Context, lse: Float32, values: cute.Tensor, row: Int32, number: Int32, rank: Int32
) -> None:
    """Store the cluster's part of a vector for the last cluster. A rank's vectors are all of one row."""
    (token, head), cluster = ctx.place_of(row), ctx.tile.split // ctx.plan.form.cluster
    cute.autovec_copy(values, _place(ctx, cluster, token, head, number))
    target = ctx.tensors.partial_lse
    if (number == rank) & (ctx.key_warp == 0) & (ctx.lane % 4 == 0):
        target[cluster, rank, head, token] = lse


def _place(ctx: Context, cluster: Int32, token: Int32, head: Int32, number: Int32) -> cute.Tensor:
    """The place of a vector among the parts: of a row, lanes and warps follow one another."""
    lanes = 4 * ctx.plan.key_warps
    vector = number // 2 * lanes + ctx.key_warp * 4 + ctx.lane % 4
    return vector_at(ctx.tensors.partial_out[cluster, token, head, None].iterator + vector * VECTOR, VECTOR)


@cute.jit
def _store(ctx: Context, lse: Float32, values: cute.Tensor, row: Int32, number: Int32) -> None:
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
def _add(
    row_max: Float32, total: Float32, values: cute.Tensor, lse: Float32, part: cute.Tensor
) -> tuple[Float32, Float32]:
    """Add a part to `values`; one in which the row sees nothing changes no bit."""
    highest = softmax.larger(row_max, lse)
    reference = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
    factor = cute.math.exp2((row_max - reference) * LOG2E, fastmath=True)
    weight = cute.math.exp2((lse - reference) * LOG2E, fastmath=True)
    for c in cutlass.range_constexpr(VECTOR):
        values[c] = values[c] * factor + weight * part[c]
    return highest, total * factor + weight


@cute.jit
def _finish(row_max: Float32, total: Float32, values: cute.Tensor) -> Float32:
    """Normalise the values, and return their lse.

    A part alone has weight 1: what is left of it is the same, bit for bit.
    """
    lse, inverse = row_max, Float32(1.0)
    if total != 1.0:
        reference = cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max)
        inverse = cute.arch.rcp_approx(total)
        lse = reference + cute.math.log2(total, fastmath=True) * LN2
    for c in cutlass.range_constexpr(VECTOR):
        values[c] = cutlass.select_(total != 0.0, values[c] * inverse, Float32(0.0))
    return lse


@cute.jit
def _is_last(ctx: Context, rank: Int32, clusters: Int32) -> Boolean:
    """Whether this part of the tile is stored by all other clusters; counts this one's as stored.

    The barrier puts all threads' stores before the count, which releases them to the GPU. It is back at 0
    after the last cluster.
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
            read_only_args=[counter.toint(), Uint32(clusters - 1)],
        )
    cute.arch.sync_threads()
    return Int32(sCount[0]) == clusters - 1
