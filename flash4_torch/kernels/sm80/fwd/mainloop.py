"""The loop over a tile's blocks of keys: S = Q K^T, softmax, O += P V."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...common import attn_mask, dropout, mods, scores, softmax, warp_mma, warp_tf32
from ...common import band as bands
from ...common.fragment import mma_fragment
from ...common.fwd import tiles
from ...common.fwd.tiles import Tile
from ...common.rounding import round_to
from ...common.warps import WARP
from ..rows import swapped
from .context import Context
from .load import load_k, load_q, load_v
from .state import Thread, TileState


class Operands(NamedTuple):
    """What the warp's MMAs read of SMEM, where K and V have one stage."""

    q: warp_mma.Matrix
    k: warp_mma.Matrix
    v: warp_mma.Matrix


class Block(NamedTuple):
    """A block of keys that the tile visits."""

    n: Int32
    partial: Boolean
    """Whether the mask changes any of its scores."""


def make_thread(ctx: Context) -> Thread:
    """Registers that have seen nothing yet."""
    plan = ctx.plan
    if plan.is_float32:
        S, O = (warp_tf32.make_accumulators(plan.row_mmas, n) for n in (plan.own_keys, plan.own_columns))
    else:
        columns = plan.own_keys, plan.own_columns
        S, O = (warp_mma.make_accumulators(plan.dtype, plan.row_mmas, n) for n in columns)
    rows = tuple(softmax.make_rows(2) for _ in O)
    for own, accumulator in zip(rows, O, strict=True):
        softmax.reset(own)
        accumulator.fill(0.0)
    return Thread(S, O, rows)


@cute.jit
def mainloop(ctx: Context, t: Thread, tile: Tile) -> None:
    plan, stages = ctx.plan, ctx.plan.stages
    work = _work(ctx, tile)
    count = work.blocks.span.last - work.blocks.span.first
    blocks = _blocks_from(ctx, work, Int32(0))
    load_q(ctx, tile)
    load_k(ctx, tile, blocks[0].n, Int32(0), count, Int32(0))
    cute.arch.cp_async_commit_group()
    for i in cutlass.range_constexpr(1, stages):
        load_v(ctx, tile, blocks[i - 1].n, Int32(i - 1), count, Int32(i - 1))
        cute.arch.cp_async_commit_group()
        load_k(ctx, tile, blocks[i].n, Int32(i), count, Int32(i))
        cute.arch.cp_async_commit_group()
    for block in blocks:
        _prefetch_mask(ctx, work, block.n)
    if cutlass.const_expr(plan.config.splits_q):
        cute.arch.cp_async_wait_group(plan.groups_in_flight)
        cute.arch.sync_threads()
        thread = ctx.warp * WARP + ctx.lane
        warp_tf32.split_rows(ctx.sQ, plan.rest_of_q, thread, plan.threads)
    stage, freed = Int32(0), Int32(stages - 1)
    kept = _kept_operands(ctx) if plan.scarce else None
    for i in cutlass.range(count, unroll=1):
        now = _blocks_from(ctx, work, i) if cutlass.const_expr(plan.counts_blocks) else blocks
        further = _block_at(ctx, work, i + stages)
        words = _mask_words(ctx, work, now[0].n)
        if cutlass.const_expr(plan.features.dropout):
            _generate_keep_bits(ctx, work, now[0].n)
        cute.arch.cp_async_wait_group(plan.groups_in_flight)
        # This block's K is there, and all warps have used the V before it.
        cute.arch.sync_threads()
        load_v(ctx, tile, now[-1].n, i + (stages - 1), count, freed)
        cute.arch.cp_async_commit_group()
        _scores(ctx, t, stage, kept)
        bases = ()
        if cutlass.const_expr(plan.shares_rows):
            bases = _mask_scores(ctx, t, work, now[0], words)
            _announce_maxima(ctx, t, bases)
        cute.arch.cp_async_wait_group(plan.groups_in_flight)
        # Its V is there, and all warps have used its K.
        cute.arch.sync_threads()
        load_k(ctx, tile, further.n, i + stages, count, stage)
        cute.arch.cp_async_commit_group()
        _prefetch_mask(ctx, work, further.n)
        if cutlass.const_expr(not plan.shares_rows):
            bases = _mask_scores(ctx, t, work, now[0], words)
        _attend(ctx, t, stage, bases, kept)
        freed, stage = stage, Int32(0) if stage + 1 == stages else stage + 1
        blocks = (*now[1:], further)
    if cutlass.const_expr(plan.shares_rows):
        _join_sums(ctx, t)


@cute.jit
def _work(ctx: Context, tile: Tile) -> TileState:
    plan = ctx.plan
    first = tiles.first_query(ctx, tile)
    own_row = ctx.row_warp * plan.warp_rows
    rows = tuple(row_pair(ctx, m) for m in range(plan.row_mmas))
    positions = tuple(tuple(first + row // plan.pack_gqa for row in pair) for pair in rows)
    last = first + (own_row + plan.warp_rows - 1) // plan.pack_gqa
    own = first + own_row // plan.pack_gqa, cutlass.min(last, tile.Sq - 1)
    masks, own_mods, philox = (), (), None
    if cutlass.const_expr(plan.features.dropout):
        philox = dropout.load(ctx.rng_state, ctx.params.drop_byte, ctx.params.drop_fraction)
    if cutlass.const_expr(any(plan.features.mods)):
        head = tiles.query_head(ctx, tile)
        heads = [tuple(head + row % plan.pack_gqa for row in pair) for pair in rows]
        own_mods = tuple(
            mods.rows_of(ctx.mods, plan, tile.batch, heads[m], positions[m], tile.Sq)
            for m in range(plan.row_mmas)
        )
    if cutlass.const_expr(plan.keeps_mask_rows):
        masks = tuple(_mask_rows(ctx, tile, rows[m], positions[m], ctx.lane) for m in range(plan.row_mmas))
    band = tiles.band_of(ctx, tile)
    return TileState(tile, first, own, band, tiles.blocks_of(ctx, tile), positions, masks, own_mods, philox)


def _mask_rows(
    ctx: Context, tile: Tile, rows: tuple[Int32, Int32], positions: tuple[Int32, Int32], lane: Int32
) -> attn_mask.Rows:
    """The mask of the lane's rows of an MMA, by their places in the tile and their query positions."""
    head, pack = tiles.query_head(ctx, tile), ctx.plan.pack_gqa
    heads = tuple(head + row % pack for row in rows)
    return attn_mask.rows_of(ctx.mask, tile.batch, heads, positions, lane % warp_mma.LANES)


def row_pair(ctx: Context, m: int) -> tuple[Int32, Int32]:
    """The thread's rows of its m-th MMA, among those of the tile."""
    row = ctx.row_warp * ctx.plan.warp_rows + m * warp_mma.ROWS + ctx.lane // warp_mma.LANES
    return row, row + 8


def _block_at(ctx: Context, work: TileState, i: Int32) -> Block:
    """The i-th block from the last one down; past the end it is arbitrary."""
    return Block(*tiles.block_at(ctx, work.blocks, work.blocks.span.last - 1 - i))


def _blocks_from(ctx: Context, work: TileState, i: Int32) -> tuple[Block, ...]:
    """The i-th block and those after it whose copies are under way with it."""
    return tuple(_block_at(ctx, work, i + ahead) for ahead in range(ctx.plan.stages))


def _mask_words(ctx: Context, work: TileState, n: Int32) -> tuple:
    """The words of a bool mask for block n, loaded before the scores are ready."""
    if not ctx.plan.keeps_mask_rows:
        return ()
    words = tuple(attn_mask.words_of(rows, n) for rows in work.mask)
    if ctx.plan.shares_rows:
        # A word's bits begin with the block's first key; two stand for eight keys.
        for of_rows in words:
            for of_row in of_rows:
                for i in range(cute.size(of_row)):
                    of_row[i] = of_row[i] >> Uint32(_first_key(ctx) // 4)
    return words


def _prefetch_mask(ctx: Context, work: TileState, n: Int32) -> None:
    """Bring the lane's rows of a floating mask nearer, which are read when block n's scores are ready."""
    if ctx.plan.features.float_mask and ctx.plan.keeps_mask_rows:
        for rows in work.mask:
            attn_mask.prefetch(ctx.mask, rows, n, ctx.lane)


def _first_key(ctx: Context) -> Int32:
    """The first of the warp's keys in a block."""
    return ctx.column_warp * ctx.plan.own_keys


def _kept_operands(ctx: Context) -> Operands:
    """The operands of all blocks, whose addresses ptxas must not find anew from the lane: what it would keep
    for that takes more registers than they do.
    """
    zero = Int32(0)
    found = Operands(_q_operand(ctx), _k_operand(ctx, zero), _v_operand(ctx, zero))
    # The shuffle changes nothing, but ptxas does not know that.
    return Operands(*(x._replace(address=cute.arch.shuffle_sync(x.address, ctx.lane)) for x in found))


def _q_operand(ctx: Context) -> warp_mma.Matrix:
    return warp_mma.left(ctx.sQ, ctx.row_warp * ctx.plan.warp_rows, ctx.lane)


def _k_operand(ctx: Context, stage: Int32) -> warp_mma.Matrix:
    return warp_mma.right(ctx.sK[None, None, stage], _first_key(ctx), ctx.lane)


def _v_operand(ctx: Context, stage: Int32) -> warp_mma.Matrix:
    column, part = ctx.column_warp * ctx.plan.own_columns, ctx.plan.own_columns
    values = swapped(ctx.sV[None, None, stage])
    return warp_mma.right(values, Int32(0), ctx.lane, column=column, part=part, transposed=True)


@cute.jit
def _scores(ctx: Context, t: Thread, stage: Int32, kept: Operands | None) -> None:
    """S = Q K^T."""
    plan, keys = ctx.plan, ctx.sK[None, None, stage]
    if cutlass.const_expr(plan.is_float32):
        own_q = warp_tf32.Rows(ctx.sQ, ctx.row_warp * plan.warp_rows, plan.rest_of_q)
        own_k = warp_tf32.Rows(keys, _first_key(ctx))
        warp_tf32.scores(t.S, own_q, own_k, ctx.lane, plan.tf32_method)
    elif cutlass.const_expr(kept is not None):
        warp_mma.scores_by_parts(t.S, kept.q, kept.k, plan.D)
    else:
        warp_mma.scores(t.S, _q_operand(ctx), _k_operand(ctx, stage), plan.D)


@cute.jit
def _mask_scores(ctx: Context, t: Thread, work: TileState, block: Block, words: tuple) -> tuple:
    """Scale, cap and mask the scores of a block; returns what a ramp leaves to the softmax, for each MMA."""
    plan, bases = ctx.plan, ((),) * ctx.plan.row_mmas
    for S in t.S:
        scores.scale_and_cap(S, ctx.params, plan.features)
    if cutlass.const_expr(any(plan.features.mods)):
        bases = _modify(ctx, t, work, block.n)
    if cutlass.const_expr(plan.band.masks or plan.features.lists_blocks):
        partial = block.partial | bands.is_partial(work.band, plan.band, block.n, *work.own)
        if cutlass.const_expr(plan.features.splits):
            # They serve few rows, of which most warps of a tile have none.
            partial = partial & (work.own[0] <= work.own[1])
        if partial:
            _mask(ctx, t, work, block.n, words)
    return bases


@cute.jit
def _announce_maxima(ctx: Context, t: Thread, bases: tuple) -> None:
    """Write the maxima of the warp's scores, for the warps that share its rows."""
    scale = scores.softmax_scale(ctx.params, ctx.plan.features)
    maxima = softmax.block_max(warp_mma.rows_of(t.S[0]), scale, ctx.plan.softmax, bases[0])
    _exchange(ctx, maxima)


@cute.jit
def _exchange(ctx: Context, numbers: cute.Tensor) -> None:
    """Write a number of each of the warp's rows."""
    rows, own = row_pair(ctx, 0), ctx.sExchange[None, ctx.column_warp]
    if ctx.lane % warp_mma.LANES == 0:
        for r in cutlass.range_constexpr(2):
            own[rows[r]] = numbers[r]


@cute.jit
def _exchanged(ctx: Context) -> tuple[cute.Tensor, ...]:
    """The numbers of the lane's rows, of each of the warps that share these."""
    rows, found = row_pair(ctx, 0), []
    for w in cutlass.range_constexpr(ctx.plan.column_warps):
        numbers = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            numbers[r] = ctx.sExchange[rows[r], w]
        found.append(numbers)
    return tuple(found)


@cute.jit
def _update(ctx: Context, t: Thread, m: cutlass.Constexpr, bases: tuple) -> softmax.NextBlock:
    """How a block enters the softmax of 16 rows."""
    plan, rows = ctx.plan, t.rows[m]
    scale = scores.softmax_scale(ctx.params, plan.features)
    if cutlass.const_expr(not plan.shares_rows):
        return softmax.next_block(warp_mma.rows_of(t.S[m]), rows, scale, plan.softmax, bases)
    maxima, *others = _exchanged(ctx)
    for other in others:
        for r in cutlass.range_constexpr(2):
            maxima[r] = softmax.larger(maxima[r], other[r])
    update = softmax.raise_max(maxima, rows, scale, plan.softmax, bases)
    return softmax.NextBlock(softmax.rescale_row_sum(rows, update), update.offsets)


@cute.jit
def _join_sums(ctx: Context, t: Thread) -> None:
    """Give one lane of each row the sum of all weights, and the others 0."""
    sums = t.rows[0].row_sum
    for r in cutlass.range_constexpr(2):
        for step in cutlass.range_constexpr(warp_mma.LANES.bit_length() - 1):
            sums[r] = sums[r] + cute.arch.shuffle_sync_bfly(sums[r], 1 << step)
    # All have read the last maxima: P has been waited for since.
    _exchange(ctx, sums)
    cute.arch.sync_threads()
    first, *others = _exchanged(ctx)
    for r in cutlass.range_constexpr(2):
        total = first[r]
        for other in others:
            total = total + other[r]
        sums[r] = total if ctx.lane % warp_mma.LANES == 0 else Float32(0.0)


def _attend(ctx: Context, t: Thread, stage: Int32, bases: tuple, kept: Operands | None) -> None:
    """Turn the scores of a block into weights, P, and O += P V."""
    plan = ctx.plan
    scale, method = scores.softmax_scale(ctx.params, plan.features), plan.softmax
    factors, operands = [], []
    for m in range(plan.row_mmas):
        rows, update = warp_mma.rows_of(t.S[m]), _update(ctx, t, m, bases[m])
        softmax.exp2_columns(rows, t.rows[m], update, scale, method, 0, cute.size(rows, mode=[1]))
        factors.append(update.factors)
        if not (plan.is_float32 or method.lazy_rescale):
            softmax.rescale_output(warp_mma.rows_of(t.O[m]), update.factors, method)
        weights = cute.make_rmem_tensor(t.S[m].layout, plan.dtype)
        round_to(t.S[m], weights)
        if plan.features.dropout:
            keep_bits = dropout.take(ctx.sKeepBits[None, None, m, ctx.warp], ctx.lane)
            dropout.QueryRows.drop(weights, keep_bits)
        if plan.shares_rows:
            operands.append(_share(ctx, weights))
        elif plan.is_float32:
            operands.append(warp_tf32.InRegisters(weights))
        else:
            operands.append(weights)
    if plan.is_float32:
        values = ctx.sV[None, None, stage]
        own_values = warp_tf32.Columns(swapped(values), ctx.column_warp * plan.own_columns)
        warp_tf32.accumulate(t.O, factors, operands, own_values, ctx.lane, plan.tf32_method)
        return
    if method.lazy_rescale:
        # Between exponentials and MMAs, which ptxas does not mix across the branch (ptxas.md, P31).
        for m in range(plan.row_mmas):
            softmax.rescale_output(warp_mma.rows_of(t.O[m]), factors[m], method)
    own_values = _v_operand(ctx, stage) if kept is None else kept.v
    if plan.shares_rows:
        own_weights = warp_mma.from_smem(operands[0], 1)
    else:
        own_weights = warp_mma.from_registers(operands)
    warp_mma.accumulate(t.O, own_weights, own_values, plan.keys)


def _share(ctx: Context, weights: cute.Tensor):
    """Write the warp's weights to SMEM, and return those of all keys as the operand of its rows."""
    plan, first = ctx.plan, ctx.row_warp * warp_mma.ROWS
    if plan.is_float32:
        warp_tf32.store_rows(weights, ctx.sP, first, _first_key(ctx), ctx.lane)
    else:
        tiler, place = (warp_mma.ROWS, plan.own_keys), (ctx.row_warp, ctx.column_warp)
        warp_mma.store_to_smem(weights, cute.local_tile(ctx.sP, tiler, place), ctx.lane)
    cute.arch.sync_threads()
    if plan.is_float32:
        return warp_tf32.from_rows(warp_tf32.Rows(ctx.sP, first), ctx.lane)
    return warp_mma.left(ctx.sP, first, ctx.lane, part=plan.own_keys)


@cute.jit
def _modify(ctx: Context, t: Thread, work: TileState, n: Int32) -> tuple:
    """Apply score_mod, and mask_mod where no block mask says which blocks it masks; returns what a ramp
    leaves to the softmax, for each MMA.
    """
    plan, bases = ctx.plan, []
    for m in cutlass.range_constexpr(plan.row_mmas):
        fragment = mma_fragment(t.S[m], work.positions[m], n * plan.keys, ctx.lane)
        mods.modify(ctx.mods, plan, work.mods[m], fragment)
        scale = scores.softmax_scale(ctx.params, plan.features)
        bases.append(mods.climb(work.mods[m], scale, fragment))
        if cutlass.const_expr(not plan.features.mods.blocks):
            mods.mask(ctx.mods, plan, work.mods[m], n * plan.keys, fragment)
    return tuple(bases)


@cute.jit
def _mask(ctx: Context, t: Thread, work: TileState, n: Int32, words: tuple) -> None:
    plan = ctx.plan
    for m in cutlass.range_constexpr(plan.row_mmas):
        fragment = mma_fragment(t.S[m], work.positions[m], n * plan.keys + _first_key(ctx), ctx.lane)
        if cutlass.const_expr(plan.features.mods.blocks):
            mods.mask(ctx.mods, plan, work.mods[m], n * plan.keys, fragment)
        if cutlass.const_expr(plan.features.mask):
            own, bits = (
                (work.mask[m], words[m]) if plan.keeps_mask_rows else _mask_found_anew(ctx, work, n, m)
            )
            attn_mask.apply(ctx.mask, own, bits, n, fragment)
        if cutlass.const_expr(plan.band.masks):
            bands.mask(work.band, plan.band, fragment)


def _mask_found_anew(ctx: Context, work: TileState, n: Int32, m: int) -> tuple[attn_mask.Rows, tuple]:
    """The mask of the lane's rows of the m-th MMA, and its words for block n.

    Kept from block to block they would be spilled (ptxas.md, P17).
    """
    # The shuffle changes nothing, but ptxas does not know that.
    lane = cute.arch.shuffle_sync(ctx.lane, ctx.lane)
    row = ctx.row_warp * ctx.plan.warp_rows + m * warp_mma.ROWS + lane // warp_mma.LANES
    rows = row, row + 8
    positions = tuple(work.first + r // ctx.plan.pack_gqa for r in rows)
    own = _mask_rows(ctx, work.tile, rows, positions, lane)
    return own, attn_mask.words_of(own, n)


@cute.jit
def _generate_keep_bits(ctx: Context, work: TileState, n: Int32) -> None:
    """Generate the keep bits of the warp's weights of block n, strip by strip: see `dropout.passes`."""
    plan, tile = ctx.plan, work.tile
    strips = dropout.strips(plan.own_keys)
    count = plan.row_mmas * strips
    head = tile.batch * ctx.lse.shape[0 if plan.features.varlen else 1] + tiles.query_head(ctx, tile)
    first, key = work.first + ctx.row_warp * plan.warp_rows, n * plan.keys + _first_key(ctx)
    cute.arch.sync_warp()  # the bits of the block before have been taken
    philox = work.philox.with_keys_anew() if plan.makes_keys_anew else work.philox
    # Shared strips of float32 spill 13 times (D 128 in TF32 with a bool mask and softcap, sm_86).
    for base, lanes in dropout.passes(count, may_share=not plan.is_float32):
        slot = base + ctx.lane // lanes
        m, strip = slot // strips, Uint32(slot % strips)
        rows = dropout.QueryRows.at(philox, first + m * warp_mma.ROWS, head, ctx.lane)
        keep_bits = ctx.sKeepBits[None, None, m, ctx.warp]
        if cutlass.const_expr(lanes == dropout.SHARED_LANES):
            rows.generate_shared(key, strip, keep_bits, strip, ctx.lane, slot < count)
        elif slot < count:
            rows.generate(key, strip, keep_bits)
    cute.arch.sync_warp()
