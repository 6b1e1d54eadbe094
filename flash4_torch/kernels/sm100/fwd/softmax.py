"""A softmax warpgroup: scores to P, one row per thread, block after block, tile after tile; and lse."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common import attn_mask, dropout, mods, ring, rounding, scores
from ...common import band as bands
from ...common import softmax as online
from ...common.fragment import Fragment, row_fragment
from ...common.fwd import running, tiles
from ...common.fwd.stores import store_lse
from ...common.fwd.tiles import Tile
from ...common.ring import Cursor
from ...common.role import role
from ...common.warps import GROUP, WARP, WARPS
from .. import tmem
from ..signal import arrive
from . import partial as partials
from . import spans
from .context import Context
from .partial import PIECE, PartialBlock
from .plan import LOADED, TILE_STAGES, NamedBarrier
from .state import SoftmaxThread, TileState


@role(produces=("s_p", "late", "inverse"), consumes=("tile", "s_p"))
@cute.jit
def softmax(ctx: Context, t: Int32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    philox = None
    if cutlass.const_expr(ctx.plan.features.dropout):
        philox = dropout.load(ctx.rng_state, ctx.params.drop_byte, ctx.params.drop_fraction)
    own = SoftmaxThread(
        t,
        thread % GROUP,
        tmem.own_lanes(t * ctx.plan.keys, warp),
        online.make_rows(1),
        philox,
    )
    at, s_at, end_at = ring.start(), Cursor(t, Int32(0)), Cursor(t, Int32(0))
    tile = tiles.read(ctx, ctx.tile, at)
    while tile.index >= 0:
        s_at = _blocks(ctx, own, _work(ctx, own, tile), s_at)
        _finish(ctx, own, at, end_at)
        ring.release(ctx.tile, at)
        end_at = Cursor(t, end_at.phase ^ 1)
        at = ring.after(at, TILE_STAGES)
        tile = tiles.read(ctx, ctx.tile, at)


@cute.jit
def _work(ctx: Context, t: SoftmaxThread, tile: Tile) -> TileState:
    plan = ctx.plan
    blocks = tiles.blocks_of(ctx, tile)
    first = spans.first_query(ctx, tile, t.q_tile)
    position, mask, own_mods, philox_row = first + t.row // plan.pack_gqa, None, None, None
    if cutlass.const_expr(plan.features.mask):
        head = tiles.query_head(ctx, tile) + t.row % plan.pack_gqa
        mask = attn_mask.rows_of(ctx.mask, tile.batch, (head,), (position,))
    if cutlass.const_expr(any(plan.features.mods)):
        head = tiles.query_head(ctx, tile) + t.row % plan.pack_gqa
        own_mods = mods.rows_of(ctx.mods, plan, tile.batch, (head,), (position,), tile.Sq)
    if cutlass.const_expr(plan.features.dropout):
        heads = ctx.maps.mQ.shape[0][0] * ctx.maps.mQ.shape[2]
        head = tile.batch * heads + tiles.query_head(ctx, tile)
        philox_row = dropout.QueryLane.at(t.philox, position, head, cute.arch.lane_idx())
    return TileState(
        bands.with_own(tiles.band_of(ctx, tile), (position,)),
        blocks,
        spans.own_span(ctx, tile, blocks, t.q_tile),
        first,
        spans.last_query(ctx, tile, first),
        position,
        mask,
        own_mods,
        philox_row,
    )


@cute.jit
def _blocks(ctx: Context, t: SoftmaxThread, work: TileState, s_at: Cursor) -> Cursor:
    online.reset(t.rows)
    if cutlass.const_expr(ctx.plan.only_end_is_partial):
        return _blocks_partial_at_end(ctx, t, work, s_at)
    return _blocks_partial_anywhere(ctx, t, work, s_at)


@cute.jit
def _blocks_partial_at_end(ctx: Context, t: SoftmaxThread, work: TileState, s_at: Cursor) -> Cursor:
    """Blocks from the last one down; those that have to be masked come first."""
    plan, top, count, num_partial = ctx.plan, work.own.last - 1, work.own.last - work.own.first, Int32(0)
    if cutlass.const_expr(plan.band.masks):
        num_partial = Int32(1)
        if cutlass.const_expr(plan.band.right):
            num_partial = bands.partial_at_end(work.band, plan.band, work.first, top, count)
        for i in cutlass.range(num_partial, unroll=1):
            s_at = _block(ctx, t, work, i, top - i, True, s_at)
    for i in cutlass.range(num_partial, count, unroll=1):
        s_at = _block(ctx, t, work, i, top - i, False, s_at)
    return s_at


@cute.jit
def _blocks_partial_anywhere(ctx: Context, t: SoftmaxThread, work: TileState, s_at: Cursor) -> Cursor:
    """Blocks from the last one down; any of them may have to be masked."""
    plan, top, edges = ctx.plan, work.own.last - 1, bands.edges_of(work.band, work.first, work.last)
    for i in cutlass.range(work.own.last - work.own.first, unroll=1):
        n, partial = tiles.block_at(ctx, work.blocks, top - i)
        partial = partial | bands.is_partial(edges.band, plan.band, n, edges.first, edges.last)
        if cute.arch.vote_any_sync(partial):
            s_at = _block(ctx, t, work, i, n, True, s_at)
        else:
            s_at = _block(ctx, t, work, i, n, False, s_at)
    return s_at


@cute.jit
def _block(
    ctx: Context,
    t: SoftmaxThread,
    work: TileState,
    i: Int32,
    n: Int32,
    masked: cutlass.Constexpr,
    s_at: Cursor,
) -> Cursor:
    """The i-th block, number n: S to P, and the factors that rescale O, unless it is the first."""
    plan = ctx.plan
    words = _mask_words(ctx, work, n) if masked else ()
    keep_bits = _keep_bits(ctx, work, n)
    ring.wait_full(ctx.s_p, s_at)
    tmem.fence_after()
    in_pieces = plan.changes_in_pieces(masked)
    if cutlass.const_expr(in_pieces):
        _change_in_pieces(ctx, t, work, n, masked)
    S = _load_scores(ctx, t)
    if cutlass.const_expr(not in_pieces):
        scores.scale_and_cap(S, ctx.params, plan.features)
    bases = ()
    if cutlass.const_expr(any(plan.features.mods)):
        bases = _modify(ctx, work, S, n, masked)
    seen = (None,) * (plan.keys // PIECE)
    if cutlass.const_expr(masked):
        if cutlass.const_expr(plan.skips_pieces):
            block = _partial_block(ctx, t, work, n)
            for begin in cutlass.range_constexpr(0, plan.keys, PIECE):
                partials.mask(block, work.band, plan.band, S, work.position, n * plan.keys, begin)
            seen = tuple(partials.is_visible(block, begin) for begin in range(0, plan.keys, PIECE))
        else:
            _mask(ctx, work, S, n, words)
    scale = scores.softmax_scale(ctx.params, plan.features)
    values = cute.make_tensor(S.iterator, cute.make_layout((1, plan.keys)))
    method = plan.softmax_of(masked)
    update = online.update_max(values, t.rows, scale, method, bases)
    place, barrier = ctx.sScale, _scale_barrier(t)
    if i > 0:
        place[t.row, t.q_tile] = online.rescale_row_sum(t.rows, update)[0]
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARP)
    sums = online.begin_packed_sum(t.rows)
    for piece in cutlass.range_constexpr(plan.keys // PIECE):
        begin = piece * PIECE
        sums = _exp2_piece(ctx, t, S, sums, update, method, begin, keep_bits, seen[piece])
        if cutlass.const_expr(begin + PIECE == plan.config.early):
            tmem.wait_stores()
            tmem.fence_before()
            arrive(ctx.s_p.empty + s_at.stage, plan.cluster_size)
    tmem.wait_stores()
    tmem.fence_before()
    arrive(ctx.late.full + s_at.stage, plan.cluster_size)
    online.end_packed_sum(t.rows, sums)
    return Cursor(s_at.stage, s_at.phase ^ 1)


def _load_scores(ctx: Context, t: SoftmaxThread) -> cute.Tensor:
    S = cute.make_rmem_tensor(ctx.plan.keys, Float32)
    for column in range(0, ctx.plan.keys, LOADED):
        tmem.load(t.lanes + column, cute.make_tensor(S.iterator + column, cute.make_layout(LOADED)))
    tmem.wait_loads()
    return S


@cute.jit
def _change_in_pieces(
    ctx: Context, t: SoftmaxThread, work: TileState, n: Int32, masked: cutlass.Constexpr
) -> None:
    """Scale scores, and add a floating mask or apply programs, in TMEM: registers do not hold a row of scores
    next to what is loaded and computed for each of them (ptxas.md, P21).
    """
    plan = ctx.plan
    for piece in cutlass.range(plan.keys // PIECE, unroll=1):
        begin, S = piece * PIECE, cute.make_rmem_tensor(PIECE, Float32)
        tmem.load(t.lanes + begin, S)
        tmem.wait_loads()
        scores.scale_and_cap(S, ctx.params, plan.features)
        fragment = _of_row(ctx, work, S, n, begin)
        if cutlass.const_expr(plan.features.float_mask):
            attn_mask.apply(ctx.mask, work.mask, (), n, fragment)
        else:
            mods.modify(ctx.mods, plan, work.mods, fragment)
            _hide(ctx, work, fragment, n, masked)
        tmem.store(t.lanes + begin, S)
    tmem.wait_stores()


@cute.jit
def _partial_block(ctx: Context, t: SoftmaxThread, work: TileState, n: Int32) -> PartialBlock:
    """What the band masks of block n in the rows of the thread's warp."""
    plan = ctx.plan
    row = cute.arch.make_warp_uniform(t.row // WARP) * WARP
    first, last = work.first + row // plan.pack_gqa, work.first + (row + WARP - 1) // plan.pack_gqa
    return partials.partial_block(work.band, plan.band, first, last, n * plan.keys)


def _of_row(ctx: Context, work: TileState, S: cute.Tensor, n: Int32, begin: Int32 | int = 0) -> Fragment:
    """Scores of the thread's row, from column `begin` of block n on."""
    values = cute.make_tensor(S.iterator, cute.make_layout((1, cute.size(S))))
    return row_fragment(values, work.position, n * ctx.plan.keys + begin)


@cute.jit
def _modify(ctx: Context, work: TileState, S: cute.Tensor, n: Int32, masked: cutlass.Constexpr) -> tuple:
    """Apply programs to block n unless pieces had it done; returns what a ramp leaves to the softmax."""
    plan, fragment, in_pieces = ctx.plan, _of_row(ctx, work, S, n), ctx.plan.changes_in_pieces(masked)
    if cutlass.const_expr(not in_pieces):
        mods.modify(ctx.mods, plan, work.mods, fragment)
    bases = mods.climb(work.mods, scores.softmax_scale(ctx.params, plan.features), fragment)
    if cutlass.const_expr(not in_pieces):
        _hide(ctx, work, fragment, n, masked)
    return bases


def _hide(ctx: Context, work: TileState, fragment: Fragment, n: Int32, masked: bool) -> None:
    """Apply mask_mod and a block mask where they may hide something of block n."""
    plan = ctx.plan
    if masked or not plan.features.mods.blocks:
        mods.mask(ctx.mods, plan, work.mods, n * plan.keys, fragment)


@cute.jit
def _mask(ctx: Context, work: TileState, S: cute.Tensor, n: Int32, words) -> None:
    """Apply a bool mask and the band."""
    plan, fragment = ctx.plan, _of_row(ctx, work, S, n)
    if cutlass.const_expr(plan.features.mask == "bool"):
        attn_mask.apply(ctx.mask, work.mask, words, n, fragment)
    if cutlass.const_expr(plan.band.masks):
        bands.mask(work.band, plan.band, fragment)


@cute.jit
def _mask_words(ctx: Context, work: TileState, n: Int32):
    """Words of the mask, loaded before the scores are there."""
    if cutlass.const_expr(ctx.plan.features.mask):
        return attn_mask.words_of(work.mask, n)
    return ()


def _keep_bits(ctx: Context, work: TileState, n: Int32) -> tuple:
    """Dropout's keep bits of a block, a word for each piece, generated before the scores are there."""
    if not ctx.plan.features.dropout:
        return ()
    first = n * ctx.plan.keys
    return tuple(work.philox_row.keep_bits(first + begin) for begin in range(0, ctx.plan.keys, PIECE))


@cute.jit
def _exp2_piece(
    ctx: Context,
    t: SoftmaxThread,
    S: cute.Tensor,
    sums: tuple,
    update: online.MaxUpdate,
    method: cutlass.Constexpr,
    begin: cutlass.Constexpr,
    keep_bits: tuple,
    seen: Boolean | None,
) -> tuple:
    """Write a piece of P, two elements to a column, over scores that all have been read; return the sums.

    seen: whether the warp sees something of the piece; None: every warp takes it as seen.
    """
    rounded = cute.make_rmem_tensor(PIECE, ctx.plan.dtype)
    if cutlass.const_expr(seen is None) or seen:
        sums = _exp2_and_round(ctx, S, sums, update, method, begin, keep_bits, rounded)
    else:
        rounded.fill(0.0)
    tmem.store(t.lanes + begin // 2, cute.recast_tensor(rounded, cutlass.Int32))
    return sums


@cute.jit
def _exp2_and_round(
    ctx: Context,
    S: cute.Tensor,
    sums: tuple,
    update: online.MaxUpdate,
    method: cutlass.Constexpr,
    begin: cutlass.Constexpr,
    keep_bits: tuple,
    rounded: cute.Tensor,
) -> tuple:
    plan, scale = ctx.plan, scores.softmax_scale(ctx.params, ctx.plan.features)
    values = cute.make_tensor(S.iterator, cute.make_layout((1, plan.keys)))
    sums = online.exp2_packed(values, sums, update, scale, method, begin, begin + PIECE)
    rounding.round_to(cute.make_tensor(S.iterator + begin, cute.make_layout(PIECE)), rounded)
    if cutlass.const_expr(plan.features.dropout):
        dropout.QueryLane.drop(rounded, keep_bits[begin // PIECE])
    return sums


def _scale_barrier(t: SoftmaxThread) -> Int32:
    return NamedBarrier.RESCALE + t.q_tile * WARPS + cute.arch.make_warp_uniform(t.row // WARP)


@cute.jit
def _finish(ctx: Context, t: SoftmaxThread, at: Cursor, end_at: Cursor) -> None:
    """Write what normalises O, for the correction warps, and lse."""
    plan, tile = ctx.plan, tiles.read(ctx, ctx.tile, at)  # again: few registers in between (ptxas.md, P17)
    scale = scores.max_scale(ctx.params, plan.features)
    keep_scale = ctx.params.keep_scale if plan.features.dropout else Float32(1.0)
    sinks = tiles.sinks_of(ctx, tile, (t.row,))
    ends = online.finalize(t.rows, scale, keep_scale, plan.softmax, sinks)
    tiles.hide_empty_split(ctx, tile, ends.lse)
    first = spans.first_query(ctx, tile, t.q_tile)
    factors = running.join(ctx, ends, tile, first, (t.row,))
    ring.wait_empty(ctx.inverse, end_at)
    ctx.sInverse[t.row, t.q_tile] = ends.inverse[0]
    if cutlass.const_expr(factors is not None):
        ctx.sRunning[t.row, t.q_tile] = factors[0]
    ring.fill(ctx.inverse, end_at)
    store_lse(ctx, ends, tile, first, (t.row,), t.row)
