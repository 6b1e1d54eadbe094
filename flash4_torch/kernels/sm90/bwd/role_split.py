"""Two warpgroups that share 64 keys of wide heads, whose dK and dV one of them could not hold.

The first computes P and dV, the second dS and dK, and each of them some columns of dQ:

    first    S^T = K Q^T    P^T ------.   dV += P^T dO     dQ = dS K
    second   dP^T = V dO^T            '-> dS^T             dK += dS^T Q     dQ = dS K

P lies in shared memory where dS will lie: a lane of the second warpgroup reads what the same lane of the
first wrote, and writes dS in its place. So the two are out of step, and wgmmas of one overlap arithmetic of
the other.

In a cluster each CTA sends its dS to its peer, and computes half of the columns of what both tiles add to dQ:
this halves the additions to global memory, which limit a CTA of 64 keys.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import warp

from ...common import ring
from ...common.bwd import tiles
from ...common.bwd.probs import four_of
from ...common.ring import Cursor
from ...common.role import role
from ...common.rounding import round_to, widened
from ...common.warps import GROUP, WARP
from .. import wgmma
from ..warps import WARP_ROWS
from .context import Context
from .epilogue import dk_target, dv_scale, dv_target, stage_gradient, store_gradients
from .mainloop import share
from .plan import NamedBarrier
from .state import Cursors, Thread, TileState, other_slot
from .store_commands import add_dq, send_end
from .walk import each_block
from .weights import (
    Probs,
    differentiate,
    dropped,
    mask_rows,
    recompute_p,
    shared_scores,
    take_keep_bits,
)


@role(
    produces=("weights",),
    consumes=("load_q", "load_do", "load_k", "load_v", "keep_bits", "share_ds", "exchange"),
)
@cute.jit
def p_warpgroup(ctx: Context) -> None:
    """The first warpgroup: P and dV."""
    plan = ctx.plan
    S = wgmma.scores_accumulator(plan.dtype, plan.queries)
    t = _thread(S, None, wgmma.output_accumulator(plan.dtype, plan.Dv))
    at, kv_at = _start(ctx, 0), ring.start()
    tile = tiles.read(ctx, kv_at)
    while tile.index >= 0:
        _begin(ctx, t, kv_at, 0, at)
        at = each_block(ctx, t, tile, kv_at, at, _p_block, plan.masks)
        # dK leaves through the stage of K.
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.K_READ, number_of_threads=plan.consumers)
        ring.release(ctx.load_k, kv_at)
        # dV leaves through the stage of V, which has been read: the last dS was computed from it.
        stage = ctx.sV[None, None, kv_at.stage]
        stage_gradient(ctx, t, t.dV, dv_scale(ctx), stage)
        store_gradients(ctx, t, (dv_target(ctx, stage),), tile)
        ring.release(ctx.load_v, kv_at)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(ctx, kv_at)
    send_end(ctx, t, _slot(at, 0))


@role(
    produces=("share_ds", "exchange"),
    consumes=("load_q", "load_do", "load_k", "load_v", "keep_bits", "weights", "share_ds", "exchange"),
)
@cute.jit
def ds_warpgroup(ctx: Context) -> None:
    """The second warpgroup: dS and dK."""
    plan = ctx.plan
    dP = wgmma.scores_accumulator(plan.dtype, plan.queries)
    v_regs = wgmma.operand_fragment(plan.dtype, plan.Dv) if plan.config.v_in_regs else None
    t = _thread(dP, wgmma.output_accumulator(plan.dtype, plan.D), None, v_regs)
    at, kv_at = _start(ctx, 1), ring.start()
    tile = tiles.read(ctx, kv_at)
    while tile.index >= 0:
        ring.wait_full(ctx.load_v, kv_at)
        if cutlass.const_expr(v_regs is not None):
            wgmma.load_operand(v_regs, ctx.sV[None, None, kv_at.stage], t.index)
        _begin(ctx, t, kv_at, 1, at)
        at = each_block(ctx, t, tile, kv_at, at, _ds_block, False)
        ring.release(ctx.load_v, kv_at)
        cute.arch.barrier(barrier_id=NamedBarrier.K_READ, number_of_threads=plan.consumers)
        stage = ctx.sK[None, None, kv_at.stage]
        stage_gradient(ctx, t, t.dK, ctx.params.scale, stage)
        store_gradients(ctx, t, (dk_target(ctx, stage),), tile)
        ring.release(ctx.load_k, kv_at)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(ctx, kv_at)
    send_end(ctx, t, _slot(at, 1))


def _thread(
    S: cute.Tensor, dK: cute.Tensor | None, dV: cute.Tensor | None, v_regs: cute.Tensor | None = None
) -> Thread:
    """A thread of either warpgroup: both hold all keys of the tile."""
    thread, _, _ = cute.arch.thread_idx()
    return Thread(Int32(0), thread % GROUP, S, dK, dV, v_regs)


@cute.jit
def _p_block(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    add: Boolean,
    masked: cutlass.Constexpr,
    last: cutlass.Constexpr,
    at: Cursors,
) -> Cursors:
    """Process block n of a head, whose scores are in flight; leaves those of the next one in flight."""
    plan, after = ctx.plan, _after(ctx, at)
    ahead = not last
    mask = None
    if cutlass.const_expr(masked and plan.features.mask != ""):
        mask = mask_rows(ctx, t, work, n)
    wgmma.wait(0)
    probs = recompute_p(ctx, t, work, n, at.q, mask, masked)
    ring.release(ctx.load_q, at.q)
    ring.wait_empty(ctx.share_ds, at.ds)
    _hand_over(ctx, t, probs, at)
    ring.wait_full(ctx.load_do, at.do)
    wgmma.accumulate(t.dV, dropped(ctx, probs), ctx.sdOt[None, None, at.do.stage], add)
    _finish(ctx, t, work, n, 0, ahead, last, at, after)
    return after


@cute.jit
def _ds_block(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    add: Boolean,
    masked: cutlass.Constexpr,
    last: cutlass.Constexpr,
    at: Cursors,
) -> Cursors:
    """Process block n of a head, whose dP is in flight; leaves that of the next one in flight."""
    plan, after = ctx.plan, _after(ctx, at)
    wgmma.wait(0)
    probs = _take(ctx, t, at)
    dS = differentiate(ctx, t, work, n, at.do, probs, t.S)
    ring.release(ctx.load_do, at.do)
    cute.arch.sync_warp()
    share(ctx, t, dS, ctx.sdS[None, None, at.ds.stage])
    cute.arch.fence_view_async_shared()
    ring.fill(ctx.share_ds, at.ds)
    if cutlass.const_expr(plan.cluster_size > 1):
        _send(ctx, t, at.ds)
    ring.wait_full(ctx.load_q, at.q)
    wgmma.accumulate(t.dK, dS, ctx.sQt[None, None, at.q.stage], add)
    _finish(ctx, t, work, n, 1, False, last, at, after)
    return after


@cute.jit
def _finish(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    warpgroup: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    last: cutlass.Constexpr,
    at: Cursors,
    after: Cursors,
) -> None:
    """Compute dQ, during which dV or dK ends, and begin the next block: before the end of dQ if `ahead`."""
    plan, passes = ctx.plan, ctx.plan.config.dq_passes
    ring.wait_full(ctx.share_ds, at.ds)
    for i in cutlass.range_constexpr(passes):
        dQ, under_way = _issue_dq(ctx, work, warpgroup * passes + i, i == 0, at), 0
        if cutlass.const_expr(ahead and i == passes - 1):
            _begin(ctx, t, work.kv, warpgroup, after)
            under_way = 1
        if cutlass.const_expr(i == 0):
            wgmma.wait(plan.cluster_size + under_way)
            if cutlass.const_expr(warpgroup == 0):
                ring.release(ctx.load_do, at.do)
            else:
                ring.release(ctx.load_q, at.q)
        wgmma.wait(under_way)
        if cutlass.const_expr(i == passes - 1):
            ring.release(ctx.share_ds, at.ds)
        add_dq(ctx, t, dQ, _slot(at, warpgroup), _first_piece(ctx) + warpgroup * passes + i, work, n)
    if cutlass.const_expr(not last and not ahead):
        _begin(ctx, t, work.kv, warpgroup, after)


def _start(ctx: Context, warpgroup: int) -> Cursors:
    slot = Int32(warpgroup) if ctx.plan.config.dq_stages > 1 else None
    return Cursors(ring.start(), ring.start(), ring.start(), slot)


def _slot(at: Cursors, warpgroup: int) -> Int32:
    """The slot in which the warpgroup leaves its dQ."""
    return Int32(warpgroup) if at.dq is None else at.dq


def _after(ctx: Context, at: Cursors) -> Cursors:
    config = ctx.plan.config
    stages = (config.q_stages, config.do_stages, config.ds_stages)
    slot = None if at.dq is None else other_slot(ctx, at.dq)
    return Cursors(*(ring.after(cursor, count) for cursor, count in zip(at[:3], stages, strict=True)), slot)


@cute.jit
def _begin(ctx: Context, t: Thread, kv_at: Cursor, warpgroup: cutlass.Constexpr, at: Cursors) -> None:
    """Issue a block's scores, or its dP."""
    if cutlass.const_expr(warpgroup == 0):
        ring.wait_full(ctx.load_q, at.q)
        keys, rows = ctx.sK[None, None, kv_at.stage], ctx.sQ[None, None, at.q.stage]
    else:
        ring.wait_full(ctx.load_do, at.do)
        if cutlass.const_expr(ctx.plan.features.lists_blocks):
            # The block's entry comes with Q.
            ring.wait_full(ctx.load_q, at.q)
        keys, rows = ctx.sV[None, None, kv_at.stage], ctx.sdO[None, None, at.do.stage]
    if cutlass.const_expr(t.v_regs is not None):
        wgmma.scores_from_regs(t.S, t.v_regs, rows)
    else:
        wgmma.scores(t.S, keys, rows)


@cute.jit
def _issue_dq(
    ctx: Context, work: TileState, place: cutlass.Constexpr, first: cutlass.Constexpr, at: Cursors
) -> cute.Tensor:
    """Issue the `place`-th piece of this CTA's dQ = dS K: from its own keys, then from the peer's."""
    columns = ctx.plan.blocks.piece_columns
    dQ, box = wgmma.output_accumulator(ctx.plan.dtype, columns), (columns, ctx.plan.keys)
    keys, own = ctx.sKt[None, None, work.kv.stage], ctx.sdS[None, None, at.ds.stage]
    wgmma.transposed(dQ, own, cute.local_tile(keys, box, (_first_piece(ctx) + place, 0)))
    if cutlass.const_expr(ctx.plan.cluster_size > 1):
        others, received = ctx.sPeerKt[None, None, work.kv.stage], ctx.sPeerdS[None, None, at.ds.stage]
        if cutlass.const_expr(first):
            ring.wait_full(ctx.exchange, at.ds)
        wgmma.transposed(dQ, received, cute.local_tile(others, box, (place, 0)), True)
    return dQ


def _first_piece(ctx: Context) -> Int32:
    """The first range of dQ's columns that this CTA adds."""
    config = ctx.plan.config
    return (
        Int32(0)
        if ctx.plan.cluster_size == 1
        else ctx.cta_pair.rank * (ctx.plan.warpgroups * config.dq_passes)
    )


@cute.jit
def _hand_over(ctx: Context, t: Thread, probs: Probs, at: Cursors) -> None:
    """Hand P from the first warpgroup to the second, times softcap's derivative unless that is separate."""
    P, features = probs.P, ctx.plan.features
    if cutlass.const_expr(ctx.plan.shares_dtanh):
        share(ctx, t, probs.dtanh, ctx.sDtanh[None, None, at.ds.stage])
    elif cutlass.const_expr(features.softcap and not ctx.plan.shares_scores):
        P = wgmma.p_fragment(ctx.plan.dtype, ctx.plan.queries)
        for j in cutlass.range_constexpr(cute.size(P) // 4):
            dtanh, weights = widened(four_of(probs.dtanh, j)), four_of(t.S, j)
            for i in cutlass.range_constexpr(4):
                dtanh[i] = dtanh[i] * weights[i]
            round_to(dtanh, four_of(P, j))
    share(ctx, t, P, ctx.sdS[None, None, at.ds.stage])
    ring.fill(ctx.weights, at.ds)


@cute.jit
def _take(ctx: Context, t: Thread, at: Cursors) -> Probs:
    """What the first warpgroup has handed over, and the keep bits."""
    dtanh, keep_bits, scores = None, None, None
    if cutlass.const_expr(ctx.plan.features.dropout):
        keep_bits = take_keep_bits(ctx, t, at.q)
    ring.wait_full(ctx.weights, at.ds)
    P = _shared(ctx, t, ctx.sdS[None, None, at.ds.stage])
    if cutlass.const_expr(ctx.plan.shares_dtanh):
        dtanh = _shared(ctx, t, ctx.sDtanh[None, None, at.ds.stage])
    if cutlass.const_expr(ctx.plan.shares_scores):
        scores = shared_scores(ctx, t)
    return Probs(P, dtanh, keep_bits, scores)


@cute.jit
def _shared(ctx: Context, t: Thread, stage: cute.Tensor) -> cute.Tensor:
    """What `share` wrote, loaded in the same register order."""
    found = cute.make_rmem_tensor(t.S.layout, ctx.plan.dtype)
    turned = cute.make_tensor(stage.iterator, cute.select(stage.layout, [1, 0]))
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), ctx.plan.dtype)
    copy = cute.make_tiled_copy_C(atom, wgmma.scores_mma(ctx.plan.dtype, ctx.plan.queries)).get_slice(t.index)
    cute.copy(atom, copy.partition_S(turned), copy.retile(found))
    return found


@cute.jit
def _send(ctx: Context, t: Thread, ds_at: Cursor) -> None:
    """Send dS of the warp's 16 keys to the peer CTA, and expect as many bytes from it."""
    count = 2 * WARP_ROWS * ctx.plan.queries
    offset = cute.arch.make_warp_uniform(t.index // WARP) * count
    source, target = (x[None, None, ds_at.stage].iterator.toint() for x in (ctx.sdS, ctx.sPeerdS))
    full = ctx.exchange.full + ds_at.stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, count)
        cute.arch.inline_ptx(
            "{ .reg .b32 to, barrier; mapa.shared::cluster.u32 to, {$r0}, {$r3};"
            " mapa.shared::cluster.u32 barrier, {$r2}, {$r3};"
            " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            f" [to], [{{$r1}}], {count}, [barrier]; }}",
            read_only_args=[target + offset, source + offset, full.toint(), ctx.cta_pair.rank ^ 1],
        )
