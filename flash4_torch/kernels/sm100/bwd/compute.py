"""The compute warps: scores to P, and P with dP to dS; a thread has a key and half of a block's queries."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...common import attn_mask, dropout, mods, ring, scores
from ...common import band as bands
from ...common.bwd import tiles
from ...common.bwd.dmask import add_dmask
from ...common.bwd.loads import exact_lse
from ...common.bwd.tiles import Tile
from ...common.fragment import ROW_MATES, Fragment, row_fragment
from ...common.ring import Cursor
from ...common.role import role
from ...common.rounding import round_to, widened
from ...common.warps import WARP, WARPS
from .. import tmem
from .context import Context
from .epilogue import dk_of, dv_of, store_gradient
from .signal import arrive
from .stage import from_column, in_cta, row_of, write
from .state import Cursors, Probs, Thread, TileState

PART = 32
"""Queries whose dP a thread holds at a time."""
MASKED = 16
"""Queries whose mask is loaded together, where it is to be added."""
FOUR = 4
PHILOX_QUERIES = 64
"""Queries whose keep bits are generated together."""


@role(
    produces=("compute_p", "compute_ds", "epilogue_dv", "epilogue_dk"),
    consumes=("load_q", "load_k", "load_v", "mma_s", "mma_dp", "mma_dq", "mma_dv", "mma_dk"),
)
@cute.jit
def compute(ctx: Context, warp: Int32) -> None:
    plan, half = ctx.plan, warp // WARPS
    philox = None
    if cutlass.const_expr(ctx.plan.features.dropout):
        philox = dropout.load(ctx.rng_state, ctx.params.drop_byte, ctx.params.drop_fraction)
    lane, column = warp % WARPS * WARP + cute.arch.lane_idx(), half * plan.own_queries
    t = Thread(warp, lane, column, column, philox)
    if cutlass.const_expr(plan.wide):
        # The upper half of the lanes has the upper half of the queries.
        t = Thread(warp, lane % plan.keys, lane // plan.keys * (plan.queries // 2) + column, column, philox)
    at = Cursors(ring.start(), ring.start(), Int32(0), Int32(0))
    tile = tiles.read(ctx, at.kv)
    while tile.index >= 0:
        at = _tile(ctx, t, tile, at)
        tile = tiles.read(ctx, at.kv)


@cute.jit
def _tile(ctx: Context, t: Thread, tile: Tile, at: Cursors) -> Cursors:
    heads = tiles.group(ctx)
    for h in cutlass.range(heads, unroll=1):
        work = _work(ctx, t, tile, tile.kv_head * heads + h)
        for position in cutlass.range(work.blocks.span.first, work.blocks.span.last, unroll=1):
            n, partial = tiles.block_at(ctx, work.blocks, position)
            at = _block(ctx, t, work, n, partial, at)
    # Half of the warps store dV, which is complete first; the others store dK.
    if t.warp < WARPS:
        store_gradient(ctx, t.warp, dv_of(ctx, at.kv), tile, at.kv, at.tile_phase)
        ring.release(ctx.load_k, at.kv)
    else:
        store_gradient(ctx, t.warp, dk_of(ctx, at.kv), tile, at.kv, at.tile_phase)
    return at._replace(kv=ring.after(at.kv, ctx.plan.config.kv_stages), tile_phase=at.tile_phase ^ 1)


@cute.jit
def _work(ctx: Context, t: Thread, tile: Tile, head: Int32) -> TileState:
    span, band = tiles.span_of(ctx, tile), tiles.band_of(ctx, tile)
    position = tile.index * ctx.plan.keys + t.key
    own = bands.with_own(band, (position,))
    blocks = tiles.blocks_of(ctx, tile, span, head)
    return TileState(tile, own, span, tiles.full_span(ctx, tile, band, span), position, head, blocks)


@cute.jit
def _block(ctx: Context, t: Thread, work: TileState, n: Int32, partial: Boolean, at: Cursors) -> Cursors:
    plan, signals = ctx.plan, ctx.signals
    own = tmem.own_lanes(t.column, t.warp)
    mask = None
    if cutlass.const_expr(plan.features.mask != ""):
        mask = _mask_rows(ctx, t, work, n)
    keep_bits = None
    if cutlass.const_expr(plan.features.dropout):
        keep_bits = _keep_bits(ctx, t, work, n)
    ring.wait_full(ctx.load_q, at.q)
    cute.arch.mbarrier_wait(signals.mma_s, at.phase)
    tmem.fence_after()
    probs = _recompute_p(ctx, t, work, n, partial, mask, keep_bits, own + plan.s_at, at.q)
    if cutlass.const_expr(plan.wide):
        cute.arch.fence_view_async_shared()
    _arrive(ctx, signals.compute_p)

    cute.arch.mbarrier_wait(signals.mma_dp, at.phase)
    if cutlass.const_expr(plan.dq_apart):
        # The MMAs of the block before have read its dS.
        cute.arch.mbarrier_wait(signals.mma_dq, at.phase ^ 1)
    tmem.fence_after()
    _differentiate(ctx, t, work, n, probs, own + plan.dp_at, at.q)
    _fence_ds(plan.cluster_size)
    _arrive(ctx, signals.compute_ds)
    return at._replace(q=ring.after(at.q, plan.config.q_stages), phase=at.phase ^ 1)


def _fence_ds(cluster_size: int) -> None:
    """Makes dS in SMEM visible to the MMAs. In a CTA pair half of it is in the peer's SMEM."""
    if cluster_size > 1:
        cute.arch.fence_proxy("async.shared", space="cluster")
    else:
        cute.arch.fence_view_async_shared()


@cute.jit
def _arrive(ctx: Context, signal: cute.Pointer) -> None:
    """One arrival of this warp, when its stores to TMEM are done."""
    tmem.wait_stores()
    arrive(ctx, signal)


@cute.jit
def _recompute_p(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    partial: Boolean,
    mask: tuple | None,
    keep_bits: tuple | None,
    place: Int32,
    q_at: Cursor,
) -> Probs:
    """Scores become P, which takes their place in TMEM in 16 bits; for wide heads it goes to SMEM."""
    plan = ctx.plan
    own = plan.own_queries
    S, P = cute.make_rmem_tensor(own, Float32), cute.make_rmem_tensor(own, plan.dtype)
    dtanh = cute.make_rmem_tensor(own, plan.dtype) if plan.keeps_dtanh else None
    before = cute.make_rmem_tensor(own, Float32) if plan.keeps_scores else None
    lse = _numbers(ctx.sLseLog2, t, q_at)
    for first in cutlass.range_constexpr(0, own, plan.queries_together):
        count = plan.queries_together
        part = Probs(
            _part(S, first, count),
            None if dtanh is None else _part(dtanh, first, count),
            keep_bits,
            None if before is None else _part(before, first, count),
        )
        _recompute_part(ctx, t, work, n, partial, mask, part, _part(P, first, count), place, lse, first)
    return Probs(P if plan.keeps_dtanh else S, dtanh, keep_bits, before)


@cute.jit
def _recompute_part(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    partial: Boolean,
    mask: tuple | None,
    probs: Probs,
    P: cute.Tensor,
    place: Int32,
    lse: cute.Tensor,
    start: cutlass.Constexpr,
) -> None:
    """P of some queries, from the thread's `start`-th on."""
    plan, features = ctx.plan, ctx.plan.features
    S, dtanh, count = probs.P, probs.dtanh, cute.size(P)
    for first in cutlass.range_constexpr(0, count, PART):
        tmem.load(place + start + first, _part(S, first))
    tmem.wait_loads()
    scores.scale_and_cap(S, ctx.params, features)
    if cutlass.const_expr(dtanh is not None):
        _keep_dtanh(ctx, S, dtanh)
    own_mods = None
    if cutlass.const_expr(any(features.mods)):
        own_mods = mods.rows_of(ctx.mods, plan, work.tile.batch, (work.head,), (work.position,))
        _modify(ctx, t, work, n, own_mods, probs, start)
    if cutlass.const_expr(plan.masks):
        if partial | (n < work.whole.first) | (n >= work.whole.last):
            if cutlass.const_expr(features.mods.blocks):
                mods.mask(ctx.mods, plan, own_mods, n * plan.queries, _fragment(ctx, t, work, n, S, start))
            _mask_part(ctx, t, work, n, mask, S, place + start, start)
        else:
            if cutlass.const_expr(features.float_mask):
                _subtract_lse(S, lse, Float32(scores.LOG2E), start)
    ramp = ()
    if cutlass.const_expr(features.mods.ramp):
        ramp = mods.step_and_bases(own_mods, n * plan.queries + t.first)
    if cutlass.const_expr(features.mods.makes_large_scores):
        _subtract_exact_lse(S, exact_lse(ctx, work.tile, work.head, n), t.first + start)
    scale = scores.softmax_scale(ctx.params, features)
    for i in cutlass.range_constexpr(0, count, FOUR):
        offsets, four = _load_four(lse, start + i), _part(S, i, FOUR)
        dtanh_of_four = None
        if cutlass.const_expr(features.softcap and dtanh is None):
            dtanh_of_four = _dtanh_of(ctx, four)
        for j in cutlass.range_constexpr(0, FOUR, 2):
            x = S[i + j], S[i + j + 1]
            if cutlass.const_expr(not features.large_scores):
                added = offsets[j], offsets[j + 1]
                if cutlass.const_expr(features.mods.ramp):
                    (step, (base,)), at = ramp, start + i + j
                    added = tuple(added[e] + (base + step * Float32(at + e)) for e in range(2))
                x = cute.arch.fma_packed_f32x2(x, (scale, scale), added)
            for e, number in enumerate(x):
                S[i + j + e] = cute.math.exp2(number, fastmath=True)
        if cutlass.const_expr(features.softcap):
            # By fours: what would wait for all of them spills (ptxas.md, P18).
            round_to(four, _part(P, i, FOUR))
            if cutlass.const_expr(dtanh_of_four is not None):
                _multiply(four, dtanh_of_four)
    if cutlass.const_expr(not features.softcap):
        round_to(S, P)
    dropped = P
    if cutlass.const_expr(features.dropout):
        if cutlass.const_expr(dtanh is not None):
            dropped = cute.make_rmem_tensor(count, plan.dtype)
            cute.recast_tensor(dropped, Uint32).store(cute.recast_tensor(P, Uint32).load())
        dropout.KeyLane.drop(dropped, probs.keep_bits, start)
    if cutlass.const_expr(plan.wide):
        write(from_column(row_of(ctx.sP, t.key), t.first), start, dropped)
    else:
        tmem.store(place + start // 2, cute.recast_tensor(dropped, Uint32))


@cute.jit
def _modify(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    own: mods.Rows,
    probs: Probs,
    start: cutlass.Constexpr,
) -> None:
    """Apply score_mod to the scores of some queries, and mask_mod unless there are blocks that it leaves
    alone; keep the scores before, if the derivative reads them.
    """
    plan, S = ctx.plan, probs.P
    if cutlass.const_expr(probs.scores is not None):
        for i in cutlass.range_constexpr(cute.size(S)):
            probs.scores[i] = S[i]
    fragment = _fragment(ctx, t, work, n, S, start)
    # Rows beyond the end have an infinite lse, which does not hide what score_mod makes of them.
    mods.modify(ctx.mods, plan, own, fragment, work.tile.Sq)
    if cutlass.const_expr(not plan.features.mods.blocks):
        mods.mask(ctx.mods, plan, own, n * plan.queries, fragment)


@cute.jit
def _differentiate(
    ctx: Context, t: Thread, work: TileState, n: Int32, probs: Probs, place: Int32, q_at: Cursor
) -> None:
    """dS = P (dP - delta), with respect to scaled scores: over dP in TMEM, or for wide heads in SMEM, for dK;
    and in SMEM for dQ.
    """
    plan, features = ctx.plan, ctx.plan.features
    delta = _numbers(ctx.sDelta, t, q_at)
    own_mods = None
    if cutlass.const_expr(plan.differentiates_mod):
        own_mods = mods.derivative_rows(ctx.mods, plan, work.tile.batch, work.head, (work.position,))
    # The addresses of dmask take registers, and so do softcap's derivatives.
    together = PART >> (features.dmask + plan.keeps_dtanh)
    for first in cutlass.range_constexpr(0, plan.own_queries, together):
        dS = cute.make_rmem_tensor(together, Float32)
        tmem.load(place + first, dS)
        tmem.wait_loads()
        if cutlass.const_expr(features.dropout):
            dropout.KeyLane.drop(dS, probs.keep_bits, first)
        for i in cutlass.range_constexpr(0, together, FOUR):
            offsets, weights = _load_four(delta, first + i), _part(probs.P, first + i, FOUR)
            if cutlass.const_expr(probs.dtanh is not None):
                weights = widened(weights)
            for j in cutlass.range_constexpr(0, FOUR, 2):
                at = i + j
                less = _less((dS[at], dS[at + 1]), (offsets[j], offsets[j + 1]), ctx)
                dS[at], dS[at + 1] = cute.arch.mul_packed_f32x2(less, (weights[j], weights[j + 1]))
        if cutlass.const_expr(features.dmask):
            add_dmask(ctx, work, n, _fragment(ctx, t, work, n, dS, first))
        if cutlass.const_expr(plan.differentiates_mod):
            before = None
            if cutlass.const_expr(probs.scores is not None):
                own = _part(probs.scores, first, together)
                before = cute.make_tensor(own.iterator, cute.make_layout((1, together), stride=(0, 1)))
            mods.differentiate(
                ctx.mods, plan, own_mods, before, _fragment(ctx, t, work, n, dS, first), ROW_MATES
            )
        if cutlass.const_expr(probs.dtanh is not None):
            _multiply(dS, widened(_part(probs.dtanh, first, together)))
        rounded = cute.make_rmem_tensor(together, plan.dtype)
        round_to(dS, rounded)
        if cutlass.const_expr(plan.wide):
            write(from_column(row_of(ctx.sOwndS, t.key), t.first), first, rounded)
        else:
            tmem.store(place + first // 2, cute.recast_tensor(rounded, Uint32))
        _share(ctx, t, work.tile.index, first, rounded)


@cute.jit
def _share(ctx: Context, t: Thread, block: Int32, column: cutlass.Constexpr, dS: cute.Tensor) -> None:
    """Write dS where dQ of its queries is computed: in a CTA pair maybe in the peer."""
    plan = ctx.plan
    if cutlass.const_expr(plan.cluster_size == 1):
        write(from_column(row_of(ctx.sdS, t.key), t.first), column, dS)
    else:
        own, own_rank = plan.queries // plan.cluster_size, ctx.cta_pair.rank
        if cutlass.const_expr(plan.scarce):
            # The same, from the tile's index: the rank itself is kept in a register in all roles, and spills
            # (ptxas.md, P15).
            own_rank = block % plan.cluster_size
        row = row_of(ctx.sdS, own_rank * plan.keys + t.key)
        row, rank = from_column(row, t.first % own), t.first // own
        if rank == own_rank:
            write(row, column, dS)
        else:
            write(in_cta(row, rank), column, dS)


def _less(gradients: tuple, offsets: tuple, ctx: Context) -> tuple:
    """dP, as dropout scales it, minus delta."""
    if ctx.plan.features.dropout:
        return cute.arch.fma_packed_f32x2(gradients, (ctx.params.keep_scale, ctx.params.keep_scale), offsets)
    return cute.arch.add_packed_f32x2(gradients, offsets)


@cute.jit
def _keep_bits(ctx: Context, t: Thread, work: TileState, n: Int32) -> tuple:
    philox_row = work.tile.batch * ctx.maps.mQ.shape[2] + work.head
    row = dropout.KeyLane.at(t.philox, work.position, philox_row, cute.arch.lane_idx())
    first = t.first // PHILOX_QUERIES * PHILOX_QUERIES
    keep_bits = row.keep_bits(n * ctx.plan.queries + first)
    # A thread may have 32 of the 64 queries whose bits are generated together.
    return (
        keep_bits
        if ctx.plan.own_queries == PHILOX_QUERIES
        else (keep_bits[1] if t.first > first else keep_bits[0], Uint32(0))
    )


@cute.jit
def _subtract_lse(S: cute.Tensor, lse: cute.Tensor, scale: Float32, start: cutlass.Constexpr) -> None:
    """Scores, of the thread's queries from its `start`-th on, become exponents: times `scale`, minus lse."""
    for i in cutlass.range_constexpr(0, cute.size(S), FOUR):
        offsets = _load_four(lse, start + i)
        for j in cutlass.range_constexpr(0, FOUR, 2):
            S[i + j], S[i + j + 1] = cute.arch.fma_packed_f32x2(
                (S[i + j], S[i + j + 1]), (scale, scale), (offsets[j], offsets[j + 1])
            )


@cute.jit
def _subtract_exact_lse(S: cute.Tensor, exact: tuple, query: Int32) -> None:
    """Scores in natural units, of queries from `query` of a block on, become exponents.

    lse and lse_low come from global memory, as the mask does: SMEM has no room for more numbers.
    """
    scale = Float32(scores.LOG2E)
    for i in cutlass.range_constexpr(0, cute.size(S), FOUR):
        lse, low = (_loaded(numbers, query + i) for numbers in exact)
        for j in cutlass.range_constexpr(0, FOUR, 2):
            x = cute.arch.add_packed_f32x2((S[i + j], S[i + j + 1]), (lse[j], lse[j + 1]))
            S[i + j], S[i + j + 1] = cute.arch.fma_packed_f32x2(x, (scale, scale), (low[j], low[j + 1]))


def _loaded(numbers: cute.Tensor, first: Int32) -> cute.Tensor:
    loaded = cute.make_rmem_tensor(FOUR, Float32)
    cute.autovec_copy(attn_mask.vector_at(numbers.iterator + first, FOUR), loaded)
    return loaded


@cute.jit
def _keep_dtanh(ctx: Context, S: cute.Tensor, dtanh: cute.Tensor) -> None:
    for i in cutlass.range_constexpr(0, cute.size(S), FOUR):
        round_to(_dtanh_of(ctx, _part(S, i, FOUR)), _part(dtanh, i, FOUR))


@cute.jit
def _dtanh_of(ctx: Context, S: cute.Tensor) -> cute.Tensor:
    """Derivatives of capped scores; 0 where they are masked."""
    inverse = 1.0 / (ctx.params.softcap * scores.unit(ctx.plan.features))
    dtanh_of_four = cute.make_rmem_tensor(cute.size(S), Float32)
    for i in cutlass.range_constexpr(cute.size(S)):
        tanh = S[i] * inverse
        dtanh_of_four[i] = cutlass.max(1.0 - tanh * tanh, Float32(0.0))
    return dtanh_of_four


@cute.jit
def _multiply(values: cute.Tensor, others: cute.Tensor) -> None:
    for i in cutlass.range_constexpr(0, cute.size(values), 2):
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(
            (values[i], values[i + 1]), (others[i], others[i + 1])
        )


@cute.jit
def _mask_rows(ctx: Context, t: Thread, work: TileState, n: Int32) -> tuple:
    """attn_mask for the thread's key: where its row lies, and the words loaded of it for the block."""
    rows = attn_mask.rows_of(ctx.mask, work.tile.batch, (work.head,), (work.position,))
    words = attn_mask.words_of(rows, n)
    for row in words:
        for i in cutlass.range_constexpr(cute.size(row)):
            # A word has two bits for every eight queries.
            row[i] = row[i] >> Uint32(t.first // FOUR)
    return rows, words


@cute.jit
def _mask_part(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    mask: tuple | None,
    S: cute.Tensor,
    place: Int32,
    start: cutlass.Constexpr,
) -> None:
    plan, count = ctx.plan, cute.size(S)
    if cutlass.const_expr(plan.features.mask):
        own, words = mask
        if cutlass.const_expr(plan.features.mask == "bool"):
            attn_mask.apply(ctx.mask, own, words, n, _fragment(ctx, t, work, n, S, start))
        else:
            _add_mask(ctx, t, work, n, own, S, place, start)
    if cutlass.const_expr(plan.band.masks):
        bands.mask(work.band, plan.band, _fragment(ctx, t, work, n, S, start))
    if cutlass.const_expr(plan.config.ragged_k):
        hidden = work.position >= work.tile.Sk
        for i in cutlass.range_constexpr(count):
            S[i] = -Float32.inf if hidden else S[i]


@cute.jit
def _add_mask(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    own: attn_mask.Rows,
    S: cute.Tensor,
    place: Int32,
    start: cutlass.Constexpr,
) -> None:
    """Add the mask to the scores in TMEM, in a rolled loop; the sums become exponents.

    Unrolled, the addresses of all numbers of the mask are live at once, and spill (ptxas.md, P21). The branch
    alone does not confine them: ptxas turns a body without a loop into predicates (ptxas.md, P19).
    """
    exact = exact_lse(ctx, work.tile, work.head, n)
    tmem.store(place, S)
    tmem.wait_stores()
    for i in cutlass.range(cute.size(S) // MASKED, unroll=1):
        first, some = i * MASKED, cute.make_rmem_tensor(MASKED, Float32)
        tmem.load(place + first, some)
        tmem.wait_loads()
        row = cute.make_tensor(some.iterator, cute.make_layout((1, MASKED)))
        query = t.first + start + first
        attn_mask.add_by_steps(ctx.mask, own, row_fragment(row, work.position, n * ctx.plan.queries + query))
        _subtract_exact_lse(some, exact, query)
        tmem.store(place + first, some)
    tmem.wait_stores()
    tmem.load(place, S)
    tmem.wait_loads()


def _part(values: cute.Tensor, first: int, count: int = PART) -> cute.Tensor:
    return cute.make_tensor(values.iterator + first, cute.make_layout(count))


def _fragment(
    ctx: Context, t: Thread, work: TileState, n: Int32, values: cute.Tensor, first: int
) -> Fragment:
    """Fragment of the thread's queries from the `first` on."""
    count = cute.size(values)
    row = cute.make_tensor(values.iterator, cute.make_layout((1, count), stride=(0, 1)))
    return Fragment(row, (work.position,), n * ctx.plan.queries + t.first, tuple(range(first, first + count)))


def _numbers(staged: cute.Tensor, t: Thread, at: Cursor) -> cute.Tensor:
    """lse or delta of the thread's queries, by fours."""
    start = (staged[None, at.stage].iterator + t.first).toint()
    fours = cute.make_ptr(Float32, start, cute.AddressSpace.smem, assumed_align=4 * FOUR)
    return cute.make_tensor(fours, cute.make_layout((FOUR, PART * 2 // FOUR)))


@cute.jit
def _load_four(numbers: cute.Tensor, first: cutlass.Constexpr) -> cute.Tensor:
    loaded = cute.make_rmem_tensor(FOUR, Float32)
    cute.autovec_copy(numbers[None, first // FOUR], loaded)
    return loaded
