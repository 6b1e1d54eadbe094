"""A consumer warpgroup's mainloop: S = Q K^T, softmax, O += P V, block after block, tile after tile.

During the softmax of one block the tensor cores work on the block before: QK of block i and PV of block
i - 1 are issued together, and the softmax waits for QK only.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from ...common import attn_mask, dropout, mods, ring, scores, softmax
from ...common import band as bands
from ...common.fragment import mma_fragment
from ...common.fwd import tiles
from ...common.fwd.tiles import Blocks, Tile
from ...common.ring import Cursor, Ring
from ...common.role import role
from ...common.rounding import round_to
from ...common.warps import GROUP, WARP, WARPS
from .. import wgmma
from ..warps import LANES
from . import ramp
from .context import Context
from .epilogue import epilogue
from .plan import NamedBarrier
from .state import Thread, TileState, WarpgroupSlice


@role(consumes=("load_q", "load_k", "load_v", "keep_bits"))
@cute.jit
def mainloop(ctx: Context, warpgroup: Int32) -> None:
    plan = ctx.plan
    thread, _, _ = cute.arch.thread_idx()
    t = Thread(
        warpgroup,
        thread % GROUP,
        wgmma.scores_accumulator(plan.dtype, plan.keys),
        wgmma.output_accumulator(plan.dtype, plan.Dv),
        wgmma.p_fragment(plan.dtype, plan.keys),
        softmax.make_rows(2),
        wgmma.operand_fragment(BFloat16, wgmma.DEPTH) if plan.ramp_by_mma else None,
    )
    if cutlass.const_expr(plan.config.pingpong):
        if warpgroup == plan.warpgroups - 1:
            _warp_scheduler_arrive(ctx, t)
    if cutlass.const_expr(plan.config.next_tile):
        _tiles_overlapped(ctx, t)
    else:
        _tiles(ctx, t)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _tiles(ctx: Context, t: Thread) -> None:
    """Process one tile after the other."""
    plan = ctx.plan
    q_at, k_at, v_at = ring.start(), ring.start(), ring.start()
    tile = tiles.read(ctx, ctx.load_q, q_at)
    while tile.index >= 0:
        blocks = tiles.blocks_of(ctx, tile)
        work = _work(ctx, t, tile, blocks, _slice(ctx, t, tile, blocks))
        if cutlass.const_expr(plan.skips_both):
            k_at, v_at = _skip_both(ctx, t, work.rows.before, k_at, v_at)
        else:
            k_at = _skip_k(ctx, t, work.rows.before, k_at)
        ring.wait_full(ctx.load_k, k_at)
        _first_scores(ctx, t, work, q_at, k_at)
        k_at, v_at = _blocks(ctx, t, work, q_at, k_at, v_at)
        wgmma.wait(0)
        ring.release(ctx.load_v, v_at)
        v_at = ring.after(v_at, plan.config.kv_stages)
        if cutlass.const_expr(plan.band.left):
            k_at, v_at = _skip_both(ctx, t, work.rows.after, k_at, v_at)
        epilogue(ctx, t, tile, q_at)
        q_at = ring.after(q_at, plan.config.q_stages)
        tile = tiles.read(ctx, ctx.load_q, q_at)


@cute.jit
def _tiles_overlapped(ctx: Context, t: Thread) -> None:
    """Process tiles with the next tile's first scores in flight while this tile is normalised and stored.

    A wgmma that a branch skips could not stay in flight (ptxas.md, P1). So scores are computed after the last
    tile, too, from whatever is left in shared memory, and are not used.
    """
    plan = ctx.plan
    q_at, k_at, v_at = ring.start(), ring.start(), ring.start()
    tile = tiles.read(ctx, ctx.load_q, q_at)
    slice_ = _slice(ctx, t, tile, tiles.blocks_of(ctx, tile))
    if cutlass.const_expr(plan.features.varlen):
        # A CTA may claim no tile that has rows.
        if tile.index >= 0:
            k_at = _await_first_k(ctx, t, slice_, k_at)
    else:
        k_at = _await_first_k(ctx, t, slice_, k_at)
    _issue_scores(ctx, t, q_at, k_at)
    while tile.index >= 0:
        work = _work(ctx, t, tile, tiles.blocks_of(ctx, tile), slice_)
        wgmma.wait(0)
        k_at, v_at = _blocks(ctx, t, work, q_at, k_at, v_at)
        own_q, q_at = q_at, ring.after(q_at, plan.config.q_stages)
        next_tile = tiles.read(ctx, ctx.load_q, q_at)
        next_slice = _slice(ctx, t, next_tile, tiles.blocks_of(ctx, next_tile))
        if next_tile.index >= 0:
            k_at = _await_first_k(ctx, t, next_slice, k_at)
        _issue_scores(ctx, t, q_at, k_at)
        wgmma.wait(1)
        ring.release(ctx.load_v, v_at)
        v_at = ring.after(v_at, plan.config.kv_stages)
        epilogue(ctx, t, tile, own_q)
        tile, slice_ = next_tile, next_slice
    wgmma.wait(0)


@cute.jit
def _await_first_k(ctx: Context, t: Thread, slice_: WarpgroupSlice, k_at: Cursor) -> Cursor:
    """The cursor of the warpgroup's first K, after waiting for it."""
    k_at = _skip_k(ctx, t, slice_.before, k_at)
    ring.wait_full(ctx.load_k, k_at)
    return k_at


@cute.jit
def _slice(ctx: Context, t: Thread, tile: Tile, blocks: Blocks) -> WarpgroupSlice:
    plan = ctx.plan
    first = (tile.index * plan.warpgroups + t.warpgroup) * plan.tokens
    last = cutlass.min(first + plan.tokens, tile.Sq) - 1
    whole, own = blocks.span, tiles.own_span(ctx, tile, blocks, first, last)
    before, count, after = whole.last - own.last, own.last - own.first, own.first - whole.first
    return WarpgroupSlice(first, last, own.last - 1, before, count, after)


@cute.jit
def _work(ctx: Context, t: Thread, tile: Tile, blocks: Blocks, slice_: WarpgroupSlice) -> TileState:
    plan = ctx.plan
    band = tiles.band_of(ctx, tile)
    rows = (t.row, t.row + 8)
    positions = tuple(slice_.first + row // plan.pack_gqa for row in rows)
    band = bands.with_own(band, positions)
    half_block, mask, own_mods = Boolean(False), None, None
    if cutlass.const_expr(plan.config.half_block):
        seen = cutlass.min(band.Sk, band.last_key(slice_.last) + 1)
        half_block = seen - slice_.top * plan.keys <= plan.keys // 2
    if cutlass.const_expr(plan.features.mask):
        head = tiles.query_head(ctx, tile)
        heads = tuple(head + row % plan.pack_gqa for row in rows)
        pair, shares = t.lane % LANES, plan.shares_mask_loads
        mask = attn_mask.rows_of(ctx.mask, tile.batch, heads, positions, pair, shares)
    if cutlass.const_expr(any(plan.features.mods)):
        head = tiles.query_head(ctx, tile)
        heads = tuple(head + row % plan.pack_gqa for row in rows)
        own_mods = mods.rows_of(ctx.mods, plan, tile.batch, heads, positions, tile.Sq)
        if cutlass.const_expr(plan.ramp_by_mma):
            ramp.load_steps(t.ramp, own_mods, scores.softmax_scale(ctx.params, plan.features), t.lane)
    return TileState(tile, slice_, band, blocks, positions, half_block, mask, own_mods)


@cute.jit
def _blocks(ctx: Context, t: Thread, work: TileState, q_at: Cursor, k_at: Cursor, v_at: Cursor):
    """Process all blocks, given the first one's scores; leaves the last PV in flight and its V unreleased."""
    plan = ctx.plan
    ring.release(ctx.load_k, k_at)
    k_at = ring.after(k_at, plan.config.kv_stages)
    n, _ = tiles.block_at(ctx, work.blocks, work.rows.top)
    if cutlass.const_expr(plan.config.half_block):
        if work.half_block:
            _first_p(ctx, t, work, _lower_half(t.S), n)
            for i in cutlass.range_constexpr(cute.size(t.S) // 2, cute.size(t.S)):
                t.S[i] = Float32(0.0)
        else:
            _first_p(ctx, t, work, t.S, n)
    else:
        _first_p(ctx, t, work, t.S, n)
    _round_p(ctx, t, _skip_bits(ctx, work.rows.before, v_at))
    if cutlass.const_expr(plan.band.may_mask_rows and not plan.skips_both):
        v_at = _skip(ctx.load_v, work.rows.before, v_at)
    if cutlass.const_expr(plan.only_end_is_partial):
        k_at, v_at = _blocks_partial_at_end(ctx, t, work, q_at, k_at, v_at)
    else:
        k_at, v_at = _blocks_partial_anywhere(ctx, t, work, q_at, k_at, v_at)
    if cutlass.const_expr(not plan.config.o_over_q):
        ring.release(ctx.load_q, q_at)
    ring.wait_full(ctx.load_v, v_at)
    wgmma.accumulate(t.O, t.P, ctx.sV[None, None, v_at.stage], work.rows.count > 1)
    return k_at, v_at


@cute.jit
def _blocks_partial_at_end(
    ctx: Context, t: Thread, work: TileState, q_at: Cursor, k_at: Cursor, v_at: Cursor
):
    """Process the blocks after the first one, where those that have to be masked come first."""
    plan, count, num_partial = ctx.plan, work.rows.count, Int32(1)
    if cutlass.const_expr(plan.band.right):
        first, top = work.rows.first, work.rows.top
        num_partial = bands.partial_at_end(work.band, plan.inner_band, first, top, count)
        for i in cutlass.range(1, num_partial, unroll=1):
            k_at, v_at = _block(ctx, t, work, i, work.rows.top - i, True, q_at, k_at, v_at)
    for i in cutlass.range(num_partial, count, unroll=1):
        k_at, v_at = _block(ctx, t, work, i, work.rows.top - i, False, q_at, k_at, v_at)
    return k_at, v_at


@cute.jit
def _blocks_partial_anywhere(
    ctx: Context, t: Thread, work: TileState, q_at: Cursor, k_at: Cursor, v_at: Cursor
):
    """Process the blocks after the first one, where any of them may have to be masked."""
    plan, edges = ctx.plan, bands.edges_of(work.band, work.rows.first, work.rows.last)
    if cutlass.const_expr(ctx.mask is not None):
        after, is_after_partial = tiles.block_at(ctx, work.blocks, work.rows.top - 1)
    for i in cutlass.range(1, work.rows.count, unroll=1):
        if cutlass.const_expr(ctx.mask is not None):
            n, partial = after, is_after_partial
            # A block ahead: the list lies in memory, and the branch below waits for its entry. Without a list
            # ptxas serialises wgmmas next to half blocks if a number is kept from block to block.
            after, is_after_partial = tiles.block_at(ctx, work.blocks, work.rows.top - i - 1)
        else:
            n, partial = tiles.block_at(ctx, work.blocks, work.rows.top - i)
        partial = partial | bands.is_partial(edges.band, plan.inner_band, n, edges.first, edges.last)
        # The branch encloses a whole block: one between its wgmmas would have to wait for both (ptxas.md,
        # P1). ptxas knows a vote to be uniform, which keeps the wgmmas' addresses in uniform registers (P7).
        if cute.arch.vote_any_sync(partial):
            k_at, v_at = _block(ctx, t, work, i, n, True, q_at, k_at, v_at)
        else:
            k_at, v_at = _block(ctx, t, work, i, n, False, q_at, k_at, v_at)
    return k_at, v_at


@cute.jit
def _block(
    ctx: Context,
    t: Thread,
    work: TileState,
    i: Int32,
    n: Int32,
    masked: cutlass.Constexpr,
    q_at: Cursor,
    k_at: Cursor,
    v_at: Cursor,
):
    """Process the i-th block, number n, up to its P; its QK and softmax overlap PV of the block before."""
    plan = ctx.plan
    ring.wait_full(ctx.load_k, k_at)
    _warp_scheduler_wait(ctx, t)
    wgmma.scores(t.S, _own_q(ctx, t, q_at), ctx.sK[None, None, k_at.stage], t.ramp, ctx.sRamp)
    ring.wait_full(ctx.load_v, v_at)
    wgmma.accumulate(t.O, t.P, ctx.sV[None, None, v_at.stage], i > 1)
    _warp_scheduler_arrive(ctx, t)
    words = _mask_words(ctx, work, n) if masked else ()
    wgmma.wait(1)
    ring.release(ctx.load_k, k_at)
    bases = _finish_scores(ctx, t, work, t.S, n, plan.inner_band if masked else None, words)
    values, scale = wgmma.rows_of(t.S), scores.softmax_scale(ctx.params, plan.features)
    method = plan.softmax_of(masked)
    block = softmax.next_block(values, t.rows, scale, method, bases)
    early, columns = plan.columns_before_wait, cute.size(values, mode=[1])
    softmax.exp2_columns(values, t.rows, block, scale, method, 0, early)
    if cutlass.const_expr(plan.config.exp_quarters_before_pv):
        wgmma.wait_after(t.rows.row_sum)
    else:
        wgmma.wait(0)
    ring.release(ctx.load_v, v_at)
    softmax.rescale_output(wgmma.rows_of(t.O), block.factors, method)
    if cutlass.const_expr(early < columns):
        softmax.exp2_columns(values, t.rows, block, scale, method, early, columns)
    k_at, v_at = ring.after(k_at, plan.config.kv_stages), ring.after(v_at, plan.config.kv_stages)
    _round_p(ctx, t, v_at)
    return k_at, v_at


@cute.jit
def _issue_scores(ctx: Context, t: Thread, q_at: Cursor, k_at: Cursor) -> None:
    _warp_scheduler_wait(ctx, t)
    wgmma.scores(t.S, _own_q(ctx, t, q_at), ctx.sK[None, None, k_at.stage], t.ramp, ctx.sRamp)
    _warp_scheduler_arrive(ctx, t)


@cute.jit
def _first_scores(ctx: Context, t: Thread, work: TileState, q_at: Cursor, k_at: Cursor) -> None:
    """Compute the first block's scores, or their lower half."""
    plan = ctx.plan
    if cutlass.const_expr(plan.config.half_block):
        if work.half_block:
            _warp_scheduler_wait(ctx, t)
            half = cute.local_tile(ctx.sK[None, None, k_at.stage], (plan.keys // 2, plan.D), (0, 0))
            half_ramp = None
            if cutlass.const_expr(plan.ramp_by_mma):
                half_ramp = cute.local_tile(ctx.sRamp, (plan.keys // 2, wgmma.DEPTH), (0, 0))
            wgmma.scores(_lower_half(t.S), _own_q(ctx, t, q_at), half, t.ramp, half_ramp)
            _warp_scheduler_arrive(ctx, t)
            wgmma.wait(0)
        else:
            _issue_scores(ctx, t, q_at, k_at)
            wgmma.wait(0)
    else:
        _issue_scores(ctx, t, q_at, k_at)
        wgmma.wait(0)


@cute.jit
def _first_p(ctx: Context, t: Thread, work: TileState, S: cute.Tensor, n: Int32) -> None:
    bases = _finish_scores(ctx, t, work, S, n, ctx.plan.band, _mask_words(ctx, work, n))
    scale = scores.softmax_scale(ctx.params, ctx.plan.features)
    softmax.first_block(wgmma.rows_of(S), t.rows, scale, ctx.plan.softmax, bases)


@cute.jit
def _finish_scores(ctx: Context, t: Thread, work: TileState, S: cute.Tensor, n: Int32, band, words) -> tuple:
    """Scale and modify the scores of block n, and mask them unless `band` is None; returns what a ramp leaves
    to the softmax.
    """
    plan, bases = ctx.plan, ()
    scores.scale_and_cap(S, ctx.params, plan.features)
    if cutlass.const_expr(any(plan.features.mods)):
        of_mods = mma_fragment(S, work.positions, n * plan.keys, t.lane)
        mods.modify(ctx.mods, plan, work.mods, of_mods)
        if cutlass.const_expr(plan.ramp_by_mma):
            bases = mods.bases_of(work.mods.ramp, n * plan.keys)
        else:
            bases = mods.climb(work.mods, scores.softmax_scale(ctx.params, plan.features), of_mods)
        if cutlass.const_expr(band is not None or not plan.features.mods.blocks):
            mods.mask(ctx.mods, plan, work.mods, n * plan.keys, of_mods)
    if cutlass.const_expr(band is not None):
        fragment = mma_fragment(S, work.positions, n * plan.keys, t.lane)
        if cutlass.const_expr(plan.features.mask):
            attn_mask.apply(ctx.mask, work.mask, words, n, fragment)
        if cutlass.const_expr(band.masks):
            bands.mask(work.band, band, fragment)
    return bases


@cute.jit
def _mask_words(ctx: Context, work: TileState, n: Int32):
    """The words of the mask for block n, loaded before the scores are ready."""
    if cutlass.const_expr(ctx.plan.features.mask):
        return attn_mask.words_of(work.mask, n)
    return ()


@cute.jit
def _round_p(ctx: Context, t: Thread, at: Cursor) -> None:
    """Round S to P, the operand of the next PV, and apply dropout. `at`: cursor of its V and keep bits."""
    round_to(t.S, t.P)
    if cutlass.const_expr(ctx.plan.features.dropout):
        ring.wait_full(ctx.keep_bits, at)
        own_warp = t.warpgroup * WARPS + t.index // WARP
        keep_bits = dropout.take(ctx.sKeepBits[None, None, own_warp, at.stage], t.lane)
        ring.release(ctx.keep_bits, at)
        dropout.QueryRows.drop(t.P, keep_bits)


def _lower_half(S: cute.Tensor) -> cute.Tensor:
    """The accumulator of the first half of the columns."""
    (c, r, columns), m, n = S.shape
    return cute.make_tensor(S.iterator, cute.make_layout(((c, r, columns // 2), m, n)))


def _own_q(ctx: Context, t: Thread, at: Cursor) -> cute.Tensor:
    return ctx.sQ[None, None, at.stage * ctx.plan.warpgroups + t.warpgroup]


@cute.jit
def _skip_k(ctx: Context, t: Thread, count: Int32, at: Cursor) -> Cursor:
    """Skip `count` blocks of K. A stage is released only after it was seen full, or phases would mix."""
    if cutlass.const_expr(ctx.plan.band.may_mask_rows):
        for _ in cutlass.range(count, unroll=1):
            ring.wait_full(ctx.load_k, at)
            _warp_scheduler_wait(ctx, t)
            _warp_scheduler_arrive(ctx, t)
            ring.release(ctx.load_k, at)
            at = ring.after(at, ctx.load_k.stages)
    return at


@cute.jit
def _skip_bits(ctx: Context, count: Int32, at: Cursor) -> Cursor:
    """Skip the keep bits of `count` blocks."""
    if cutlass.const_expr(ctx.plan.features.dropout and ctx.plan.band.may_mask_rows):
        at = _skip(ctx.keep_bits, count, at)
    return at


@cute.jit
def _skip(edge: Ring, count: Int32, at: Cursor) -> Cursor:
    """Skip `count` stages."""
    for _ in cutlass.range(count, unroll=1):
        ring.wait_full(edge, at)
        ring.release(edge, at)
        at = ring.after(at, edge.stages)
    return at


@cute.jit
def _skip_both(ctx: Context, t: Thread, count: Int32, k_at: Cursor, v_at: Cursor):
    """Skip `count` blocks of K and V, in the order in which they are loaded."""
    for _ in cutlass.range(count, unroll=1):
        k_at = _skip_k(ctx, t, Int32(1), k_at)
        _skip_bits(ctx, Int32(1), v_at)
        v_at = _skip(ctx.load_v, Int32(1), v_at)
    return k_at, v_at


@cute.jit
def _warp_scheduler_wait(ctx: Context, t: Thread) -> None:
    if cutlass.const_expr(ctx.plan.config.pingpong):
        cute.arch.barrier(barrier_id=NamedBarrier.WARP_SCHEDULER + t.warpgroup, number_of_threads=2 * GROUP)


@cute.jit
def _warp_scheduler_arrive(ctx: Context, t: Thread) -> None:
    if cutlass.const_expr(ctx.plan.config.pingpong):
        after = t.warpgroup + 1
        after = Int32(0) if after == ctx.plan.warpgroups else after
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.WARP_SCHEDULER + after, number_of_threads=2 * GROUP)
