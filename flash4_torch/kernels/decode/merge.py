"""The merge of a tile's splits: in their cluster, and of several clusters' parts by the last one."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...configs.decode import MMA_ROWS
from ..common import softmax
from ..common.band import Span
from ..common.scores import LOG2E
from ..common.softmax import LN2
from ..common.warps import WARP
from .context import Context
from .epilogue import part_place, store_part, store_vector, with_sink
from .plan import VECTOR
from .splits import Shares

_VECTORS, _LOADS, _DEPTH = 4, 16, 8
"""Vectors whose parts a thread merges at a time, loads that it has under way, and parts of a vector that it
loads at a time."""


@cute.jit
def merge(ctx: Context, rows: tuple[Int32, Int32]) -> None:
    """Merge the splits of the tile, in the order of their keys: those of a cluster first, then clusters."""
    tile, cluster = ctx.tile, ctx.plan.form.cluster
    if cutlass.const_expr(cluster == 1):
        if is_last(ctx, Int32(0), tile.num_splits):
            merge_parts(ctx, rows, tile.splits, Int32(0))
    else:
        _merge_clusters(ctx, rows)


@cute.jit
def _merge_clusters(ctx: Context, rows: tuple[Int32, Int32]) -> None:
    tile, cluster = ctx.tile, ctx.plan.form.cluster
    rank = rank_of(ctx)
    clusters = Span(tile.splits.first // cluster, (tile.splits.last - 1) // cluster + 1)
    several = clusters.last - clusters.first > 1
    first = tile.split - rank
    shares = Shares(Span(first, tile.splits.last), Int32(1))
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    merge_cluster(ctx, rows, shares, tile.split // cluster, several, rank)
    # Others may still read this CTA's part.
    cute.arch.cluster_arrive()
    if cutlass.const_expr(ctx.plan.form.parts):
        if several:
            if is_last(ctx, rank, clusters.last - clusters.first):
                merge_parts(ctx, rows, clusters, rank)
    cute.arch.cluster_wait()


def rank_of(ctx: Context) -> Int32:
    """The CTA's number in its cluster."""
    return Int32(cute.arch.block_idx_in_cluster()) if ctx.plan.form.cluster > 1 else Int32(0)


def parts_of(ctx: Context) -> Int32:
    """Places in global memory for parts of a tile's results."""
    return ctx.tensors.partial_lse.shape[0] if ctx.plan.form.parts else Int32(1)


@cute.jit
def merge_cluster(
    ctx: Context, rows: tuple[Int32, Int32], shares: Shares, part: Int32, several: Boolean, rank: Int32
) -> None:
    """Merge what the CTAs of a cluster have, and store it, as a part of several or as results.

    The CTAs divide the vectors of O among them, each thread those of its own place.
    """
    cluster = ctx.plan.form.cluster
    # The CTAs of a cluster are an even number, so that all vectors of a rank are of one row.
    row = rows[0] + rank % 2 * 8
    if row < ctx.tile.num_rows:
        # A loop, since ptxas would keep the addresses of all vectors while blocks are gone through.
        for number in cutlass.range(rank, ctx.plan.vectors, cluster, unroll=1):
            lse, values = _merge_vector(ctx, number, shares)
            store_result(ctx, lse, values, row, number, part, several, rank)


@cute.jit
def store_result(
    ctx: Context,
    lse: Float32,
    values: cute.Tensor,
    row: Int32,
    number: Int32,
    part: Int32,
    several: Boolean,
    rank: Int32,
) -> None:
    """Store a vector as a part of several, or as a result."""
    if cutlass.const_expr(ctx.plan.form.parts):
        if several:
            store_part(ctx, lse, values, row, number, part, rank)
        else:
            store(ctx, lse, values, row, number)
    else:
        store(ctx, lse, values, row, number)


@cute.jit
def _merge_vector(ctx: Context, number: Int32, shares: Shares) -> tuple[Float32, cute.Tensor]:
    """Merge a vector's results of all splits that CTAs of the cluster have."""
    plan, thread = ctx.plan, ctx.warp * WARP + ctx.lane
    row = ctx.row_warp * MMA_ROWS + number % 2 * 8 + ctx.lane // 4
    parts = []
    # All of these loads are under way before one of them is waited for.
    for peer in cutlass.range_constexpr(plan.form.cluster):
        own = shares.of(peer)
        for slot in cutlass.range_constexpr(max(plan.kept, 1)):
            part_lse, part = cute.make_rmem_tensor(1, Float32), _zeros()
            part_lse.fill(-Float32.inf)
            if own.first + slot < own.last:
                kept = ctx.kept(thread, slot)[None, number].iterator
                cute.autovec_copy(_remote(ctx.sLse.iterator + slot * plan.rows + row, peer, 1), part_lse)
                cute.autovec_copy(_remote(kept, peer, VECTOR), part)
            parts.append((part_lse, part))
    row_max, total, values = -Float32.inf, Float32(0.0), _zeros()
    for part_lse, part in parts:
        row_max, total, weights = weights_of(row_max, total, part_lse[0])
        add_values(values, part, weights)
    return finish(row_max, total, values), values


def _remote(own: cute.Pointer, rank: int, size: int) -> cute.Tensor:
    """The same place in the shared memory of another CTA of the cluster."""
    return cute.make_tensor(cute.arch.map_dsmem_ptr(own, rank), cute.make_layout(size))


@cute.jit
def merge_parts(ctx: Context, rows: tuple[Int32, Int32], parts: Span, rank: Int32) -> None:
    """Merge and store those vectors of the tile whose parts this rank has."""
    plan = ctx.plan
    step = plan.form.cluster
    # Vectors of even numbers are of the thread's first row, others of its second one.
    for parity in cutlass.range_constexpr(2 if step == 1 else 1):
        own = range(parity, plan.vectors, max(step, 2))
        if rows[0] - ctx.lane // 4 + (rank + parity) % 2 * 8 < ctx.tile.num_rows:
            for i in cutlass.range_constexpr(0, len(own), _VECTORS):
                _merge_vectors(ctx, rows, parts, rank, tuple(own[i : i + _VECTORS]))


@cute.jit
def _merge_vectors(
    ctx: Context, rows: tuple[Int32, Int32], parts: Span, rank: Int32, first: cutlass.Constexpr
) -> None:
    """Merge and store some vectors of one row, whose numbers are `rank` more than those in `first`."""
    tile, count = ctx.tile, len(first)
    row_max, total = -Float32.inf, Float32(0.0)
    sums = [_zeros() for _ in first]
    # Of rows after the last one, and vectors after the last one, the last one's are loaded.
    numbers = [cutlass.min(rank + i, ctx.plan.vectors - 1) for i in first]
    # All are of one row. With one place for all, a tile of 64 rows at D 256 spills.
    own_rows = [rows[0] + number % 2 * 8 for number in numbers]
    places = [ctx.place_of(cutlass.min(row, tile.num_rows - 1)) for row in own_rows]
    for part in cutlass.range(parts.first, parts.last, unroll=min(_DEPTH, _LOADS // count)):
        token, head = places[0]
        row_max, total, weights = weights_of(row_max, total, ctx.tensors.partial_lse[part, rank, head, token])
        for i in cutlass.range_constexpr(count):
            own = cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(part_place(ctx, part, *places[i], numbers[i]), own)
            add_values(sums[i], own, weights)
    for i in cutlass.range_constexpr(count):
        if (rank + first[i] < ctx.plan.vectors) & (own_rows[i] < tile.num_rows):
            store(ctx, finish(row_max, total, sums[i]), sums[i], own_rows[i], numbers[i])


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


def _zeros() -> cute.Tensor:
    values = cute.make_rmem_tensor(VECTOR, Float32)
    values.fill(0.0)
    return values


class Weights(NamedTuple):
    """How a part joins those before it, the same for all of a row's values."""

    factor: Float32
    """The factor of what was added up before."""
    weight: Float32


@cute.jit
def weights_of(row_max: Float32, total: Float32, lse: Float32) -> tuple[Float32, Float32, Weights]:
    """The maximum and the sum of weights with one more part, and how its values are added.

    A part in which the row sees nothing changes no bit. What is fused is said, so that all kernels that merge
    give the same bits.
    """
    highest = softmax.larger(row_max, lse)
    reference = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
    factor = cute.math.exp2((row_max - reference) * LOG2E, fastmath=True)
    weight = cute.math.exp2((lse - reference) * LOG2E, fastmath=True)
    return highest, _fma(total, factor, weight), Weights(factor, weight)


@cute.jit
def add_values(values: cute.Tensor, part: cute.Tensor, weights: Weights) -> None:
    """Add a part's values to those before it."""
    for c in cutlass.range_constexpr(cute.size(values)):
        values[c] = _fma(weights.weight, part[c], values[c] * weights.factor)


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
    ctx.sync()
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
    ctx.sync()
    return Int32(sCount[0]) == number - 1
