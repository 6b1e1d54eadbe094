"""The loop over a split's blocks of keys: scores, online softmax, and O, by warp-level MMAs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_ops

from ...configs.decode import MMA_ROWS
from ..common import band as bands
from ..common import scores, softmax, warp_mma
from ..common.band import Span
from ..common.fragment import Fragment, mma_fragment
from ..common.rounding import round_to
from ..common.softmax import Rows
from ..common.warp_mma import rows_of
from ..common.warps import WARP
from . import fp8
from .context import Context
from .load import load_k, load_q, load_v, locate, look_up_first, look_up_next
from .plan import DecodePlan


@dataclass(frozen=True)
class Splits:
    """Splits of a fixed length, for a loop over the blocks of several."""

    begins: Callable[[Int32], Boolean] | None
    """Whether one begins with a block, if the block is not the first one; None if all blocks are of one."""
    end: Callable[[Thread, Int32], None]
    """What ends one: given its registers, with its O complete, and its last block."""
    merge: Callable[[Thread], None] | None = None
    """The first part of `end`, which has no branch, so that MMAs may be in flight; None if there is none."""
    close: Callable[[Int32], None] | None = None
    """The rest of `end`, given the last block."""

    def end_after(self, n: Int32, last: Int32) -> Boolean:
        """Whether one ends after block n, of those before block `last`."""
        return n + 1 == last if self.begins is None else self.begins(n + 1) | (n + 1 == last)


class Thread(NamedTuple):
    """A thread's registers: of two rows, eight apart, those columns that four lanes share."""

    rows: tuple[Int32, Int32]
    """The sequence's rows, which may be after the last one."""
    S: cute.Tensor
    """Scores of the warp's keys, then weights."""
    O: cute.Tensor
    """The warp's columns of the output, strip by strip."""
    parts: tuple[Rows, ...]
    """The softmax of each part of the warp's keys, with one maximum for all."""


def make_thread(ctx: Context) -> Thread:
    """Registers of the thread; see `begin_split`."""
    plan, mma = ctx.plan, _mma(ctx.plan)
    S = cute.make_rmem_tensor(mma.partition_shape_C((MMA_ROWS, plan.warp_keys)), Float32)
    return thread_of(ctx, S, cute.make_rmem_tensor(MMA_ROWS * plan.strip * plan.strips // WARP, Float32))


def thread_of(ctx: Context, S: cute.Tensor, O: cute.Tensor) -> Thread:
    """Registers with these accumulators; see `begin_split`."""
    plan = ctx.plan
    row = ctx.tile.first_row + ctx.row_warp * MMA_ROWS + ctx.lane // 4
    first = softmax.make_rows(2)
    parts = (first, *(Rows(first.row_max, softmax.make_rows(2).row_sum) for _ in range(1, plan.parts)))
    return Thread((row, row + 8), S, O, parts)


def begin_split(t: Thread) -> None:
    """Registers that have seen nothing yet."""
    for part in t.parts:
        softmax.reset(part)
    t.O.fill(0.0)


def registers_of_ended(t: Thread) -> Thread:
    """Registers for a split that ends, with t's O; see `split_off`."""
    ended = t._replace(parts=tuple(softmax.make_rows(2) for _ in t.parts))
    for part in ended.parts:
        softmax.reset(part)
    return ended


def split_off(t: Thread, ended: Thread) -> None:
    """Keep the softmax of the split that ends, while t's begins another one."""
    for rows, part in zip(ended.parts, t.parts, strict=True):
        for own, other in zip(rows, part, strict=True):
            own.store(other.load())
        softmax.reset(part)


@cute.jit
def mainloop(ctx: Context, t: Thread, blocks: Span, splits: cutlass.Constexpr[Splits | None] = None) -> None:
    """Go through blocks, load `stages` - 1 of them ahead, and end splits of a fixed length where they end.

    In tiles of 16 rows the MMAs of K's next block run while the softmax goes through a block's scores: a
    stage of K is free one block sooner than one of V, and is filled with a block one further.
    """
    if cutlass.const_expr(ctx.plan.stages == 1):
        _mainloop_of_one_stage(ctx, t, blocks, splits)
    else:
        _mainloop_of_stages(ctx, t, blocks, splits)


@cute.jit
def _mainloop_of_one_stage(
    ctx: Context, t: Thread, blocks: Span, splits: cutlass.Constexpr[Splits | None]
) -> None:
    """The mainloop where K and V have one stage each: V of a block comes under its scores, K of the next one
    under softmax and PV.
    """
    last = blocks.last
    pages = look_up_first(ctx, blocks.first)
    q = None
    if cutlass.const_expr(ctx.plan.is_fp8):
        q = fp8.fetch_q(ctx)
    else:
        load_q(ctx)
    place = locate(ctx, pages, blocks.first, blocks.first)
    load_k(ctx, blocks.first, last, place, Int32(0))
    cute.arch.cp_async_commit_group()
    if cutlass.const_expr(ctx.plan.is_fp8):
        fp8.store_q(ctx, q)
    for n in cutlass.range(blocks.first, blocks.last, unroll=1):
        cute.arch.cp_async_wait_group(0)
        # K is there, and all warps have used the V before it.
        cute.arch.sync_threads()
        load_v(ctx, n, last, place, Int32(0))
        cute.arch.cp_async_commit_group()
        pages = look_up_next(ctx, pages, blocks.first, n + 1)
        place = locate(ctx, pages, blocks.first, n + 1)
        _multiply_keys(ctx, t.S, Int32(0))
        cute.arch.cp_async_wait_group(0)
        # V is there, and all warps have used K.
        cute.arch.sync_threads()
        load_k(ctx, n + 1, last, place, Int32(0))
        cute.arch.cp_async_commit_group()
        _attend(ctx, t, n, Int32(0))
        if cutlass.const_expr(splits is not None):
            if splits.end_after(n, last):
                splits.end(t, n)


@cute.jit
def _mainloop_of_stages(
    ctx: Context, t: Thread, blocks: Span, splits: cutlass.Constexpr[Splits | None]
) -> None:
    stages, ahead, last = ctx.plan.stages, ctx.plan.ahead, blocks.last
    # These look-ups are under way, and Q, before one of them is waited for.
    pages = look_up_first(ctx, blocks.first)
    q = None
    if cutlass.const_expr(ctx.plan.is_fp8):
        q = fp8.fetch_q(ctx)
    else:
        load_q(ctx)
    places = [locate(ctx, pages, blocks.first, blocks.first + i) for i in range(stages + ahead)]
    for i in cutlass.range_constexpr(stages - 1 + ahead):
        load_k(ctx, blocks.first + i, last, places[i], Int32(i))
        if cutlass.const_expr(i >= ahead):
            load_v(ctx, blocks.first + (i - ahead), last, places[i - ahead], Int32(i - ahead))
        cute.arch.cp_async_commit_group()
    place_v, place = places[-2], places[-1]
    if cutlass.const_expr(ctx.plan.is_fp8):
        fp8.store_q(ctx, q)
    products = t.S
    if cutlass.const_expr(ahead):
        products = cute.make_rmem_tensor(t.S.layout, Float32)
        cute.arch.cp_async_wait_group(stages - 1)
        cute.arch.sync_threads()
        _multiply_keys(ctx, products, Int32(0))
    stage, freed = Int32(0), Int32(stages - 1)
    for n in cutlass.range(blocks.first, blocks.last, unroll=1):
        cute.arch.cp_async_wait_group(stages - 2)
        # What other warps copied is there, and they have read the block before this one.
        cute.arch.sync_threads()
        next_stage = Int32(0) if stage + 1 == stages else stage + 1
        if cutlass.const_expr(ahead):
            t.S.store(products.load())
            _multiply_keys(ctx, products, next_stage)
            load_k(ctx, n + stages, last, place, stage)
            load_v(ctx, n + (stages - 1), last, place_v, freed)
        else:
            _multiply_keys(ctx, products, stage)
            load_k(ctx, n + (stages - 1), last, place, freed)
            load_v(ctx, n + (stages - 1), last, place, freed)
        cute.arch.cp_async_commit_group()
        pages = look_up_next(ctx, pages, blocks.first, n + (stages + ahead))
        place_v, place = place, locate(ctx, pages, blocks.first, n + (stages + ahead))
        _attend(ctx, t, n, stage)
        if cutlass.const_expr(splits is not None):
            if splits.end_after(n, last):
                splits.end(t, n)
        freed, stage = stage, next_stage


@cute.jit
def _multiply_keys(ctx: Context, S: cute.Tensor, stage: Int32) -> None:
    """Scores of a block, before anything is done to them."""
    if cutlass.const_expr(ctx.plan.is_fp8):
        fp8.scores(ctx, S, _mma(ctx.plan), stage)
    else:
        _scores(ctx, S, stage)


@cute.jit
def _attend(ctx: Context, t: Thread, n: Int32, stage: Int32) -> None:
    """Attend to block n, of which t.S has the products of Q and K."""
    plan, tile, fragment = ctx.plan, ctx.tile, fragment_of(ctx, t, n)
    if cutlass.const_expr(plan.is_fp8):
        fp8.apply_factors(ctx, fragment.values)
    scores.scale_and_cap(fragment.values, ctx.params, plan.features)
    if bands.is_partial(tile.band, plan.band, n, *tile.tokens):
        bands.mask(tile.band, plan.band, fragment)
    factors = to_weights(ctx, t, fragment)
    softmax.rescale_output(rows_of(t.O, plan.lane_rows), factors, plan.softmax)
    whole = _share_weights(ctx, _rounded_weights(ctx, t))
    if cutlass.const_expr(plan.is_fp8):
        fp8.add_pv(ctx, t.O, whole, _mma(plan), stage)
    else:
        _add_pv(ctx, t, whole, stage)


def fragment_of(ctx: Context, t: Thread, n: Int32) -> Fragment:
    """The thread's scores of block n."""
    plan = ctx.plan
    tokens = tuple(row // ctx.divisors.group for row in t.rows[: plan.lane_rows])
    found = mma_fragment(t.S, tokens, n * plan.form.keys + ctx.key_warp * plan.warp_keys, ctx.lane)
    return found._replace(values=rows_of(t.S, plan.lane_rows))


@cute.jit
def to_weights(ctx: Context, t: Thread, fragment: Fragment) -> cute.Tensor:
    """Turn scores into weights, in place, and return the factors (R,) of what was summed up before."""
    plan = ctx.plan
    scale, method = scores.softmax_scale(ctx.params, plan.features), plan.softmax
    maxima = softmax.block_max(fragment.values, scale, method)
    if cutlass.const_expr(plan.key_warps > 1):
        _share_maxima(ctx, maxima)
    update = softmax.raise_max(maxima, t.parts[0], scale, method)
    columns = plan.warp_keys // 4 // plan.parts
    for i in cutlass.range_constexpr(plan.parts):
        factors = softmax.rescale_row_sum(t.parts[i], update)
        block = softmax.NextBlock(factors, update.offsets)
        own = i * columns, (i + 1) * columns
        softmax.exp2_columns(fragment.values, t.parts[i], block, scale, method, *own)
    return factors


@cute.jit
def _rounded_weights(ctx: Context, t: Thread) -> cute.Tensor:
    """The thread's weights as the MMAs have them; those of rows that are not looked at are 0."""
    plan = ctx.plan
    weights = cute.make_rmem_tensor(t.S.layout, plan.mma_dtype)
    if cutlass.const_expr(plan.lane_rows == 2):
        round_to(t.S, weights)
    else:
        values, count = rows_of(t.S, 1), cute.size(t.S) // 2
        own, rounded = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, plan.mma_dtype)
        for c in cutlass.range_constexpr(count):
            own[c] = values[0, c]
        round_to(own, rounded)
        # Pairs of columns of both rows are in turn.
        flat = cute.make_tensor(weights.iterator, cute.make_layout(2 * count))
        pairs, of_row = cute.recast_tensor(flat, Uint32), cute.recast_tensor(rounded, Uint32)
        for i in cutlass.range_constexpr(count // 2):
            pairs[2 * i], pairs[2 * i + 1] = of_row[i], Uint32(0)
    return weights


def _mma(plan: DecodePlan) -> cute.TiledMma:
    return warp_mma.mma_of(plan.mma_dtype)


@cute.jit
def _scores(ctx: Context, S: cute.Tensor, stage: Int32) -> None:
    """S = Q K^T of the warp's rows and keys."""
    plan, mma = ctx.plan, _mma(ctx.plan)
    own_q = cute.local_tile(ctx.sQ, (MMA_ROWS, plan.D), (ctx.row_warp, 0))
    own_k = cute.local_tile(ctx.sK[None, None, stage], (plan.warp_keys, plan.D), (ctx.key_warp, 0))
    S.fill(0.0)
    lanes = mma.get_slice(ctx.lane)
    atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), plan.dtype)
    load_a = cute.make_tiled_copy_A(atom, mma).get_slice(ctx.lane)
    load_b = cute.make_tiled_copy_B(atom, mma).get_slice(ctx.lane)
    a, b = lanes.make_fragment_A(lanes.partition_A(own_q)), lanes.make_fragment_B(lanes.partition_B(own_k))
    from_a, from_b, to_a, to_b = (
        load_a.partition_S(own_q),
        load_b.partition_S(own_k),
        load_a.retile(a),
        load_b.retile(b),
    )
    for k in cutlass.range_constexpr(plan.D // 16):
        cute.copy(atom, from_a[None, None, k], to_a[None, None, k])
        cute.copy(atom, from_b[None, None, k], to_b[None, None, k])
        cute.gemm(mma, S, a[None, None, k], b[None, None, k], S)


@cute.jit
def _add_pv(ctx: Context, t: Thread, weights: cute.Tensor, stage: Int32) -> None:
    """O += P V of the warp's rows and columns, for weights (an operand) of all keys of the block."""
    plan, mma = ctx.plan, _mma(ctx.plan)
    lanes = mma.get_slice(ctx.lane)
    atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(True, 4), plan.dtype)
    load_b = cute.make_tiled_copy_B(atom, mma).get_slice(ctx.lane)
    sums = cute.make_layout(mma.partition_shape_C((MMA_ROWS, plan.strip)))
    for i in cutlass.range_constexpr(plan.strips):
        strip = ctx.key_warp + i * plan.key_warps
        own_v = cute.local_tile(ctx.sV[None, None, stage], (plan.strip, plan.form.keys), (strip, 0))
        O = cute.make_tensor(t.O.iterator + i * cute.size(sums), sums)
        b = lanes.make_fragment_B(lanes.partition_B(own_v))
        from_b, to_b = load_b.partition_S(own_v), load_b.retile(b)
        for k in cutlass.range_constexpr(plan.form.keys // 16):
            cute.copy(atom, from_b[None, None, k], to_b[None, None, k])
            cute.gemm(mma, O, weights[None, None, k], b[None, None, k], O)


@cute.jit
def _share_maxima(ctx: Context, maxima: cute.Tensor) -> None:
    """Raise maxima of the warp's keys to those of the whole block."""
    row, key_warp, sMax = ctx.row_warp * MMA_ROWS + ctx.lane // 4, ctx.key_warp, ctx.sMax
    if ctx.lane % 4 == 0:
        for r in cutlass.range_constexpr(cute.size(maxima)):
            sMax[row + 8 * r, key_warp] = maxima[r]
    sync_rows(ctx)
    for r in cutlass.range_constexpr(cute.size(maxima)):
        for w in cutlass.range_constexpr(ctx.plan.key_warps):
            maxima[r] = softmax.larger(maxima[r], sMax[row + 8 * r, w])


@cute.jit
def _share_weights(ctx: Context, weights: cute.Tensor) -> cute.Tensor:
    """The warp's rows of P as an operand, after warps that share them have exchanged theirs."""
    plan, mma = ctx.plan, _mma(ctx.plan)
    a = warp_mma.operand_of(weights, plan.warp_keys)
    if cutlass.const_expr(plan.key_warps > 1):
        target = cute.local_tile(ctx.sP, (MMA_ROWS, plan.warp_keys), (ctx.row_warp, ctx.key_warp))
        if cutlass.const_expr(plan.form.gpu.has_clusters):
            atom = cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(False, 4), plan.mma_dtype)
            store = cute.make_tiled_copy_C(atom, mma).get_slice(ctx.lane)
            cute.copy(atom, store.retile(weights), store.partition_D(target))
        else:
            warp_mma.store_to_smem(weights, target, ctx.lane)
        sync_rows(ctx)
        own_p = cute.local_tile(ctx.sP, (MMA_ROWS, plan.form.keys), (ctx.row_warp, 0))
        lanes = mma.get_slice(ctx.lane)
        a = lanes.make_fragment_A(lanes.partition_A(own_p))
        atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), plan.mma_dtype)
        load_a = cute.make_tiled_copy_A(atom, mma).get_slice(ctx.lane)
        cute.copy(atom, load_a.partition_S(own_p), load_a.retile(a))
    return a


def sync_rows(ctx: Context) -> None:
    """Wait for the warps that share these 16 rows."""
    cute.arch.barrier(barrier_id=ctx.row_warp + 1, number_of_threads=ctx.plan.key_warps * WARP)
