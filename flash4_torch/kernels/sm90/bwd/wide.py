"""Two warpgroups that share 64 keys of wide heads, whose dK and dV one of them could not hold.

The first makes weights and dV, the second dS and dK, and each of them some columns of dQ:

    first    S^T = K Q^T    P^T ------.   dV += P^T dO     dQ = dS K
    second   dP^T = V dO^T            '-> dS^T             dK += dS^T Q     dQ = dS K

P lies where dS will, in shared memory: a lane of the second reads what the same lane of the first wrote, and
writes dS in its place. So the two are out of step, and products of one are under way under arithmetic of the
other.

In a cluster each CTA sends its dS to the other one, and makes half of the columns of what both tiles give to
dQ: there are half as many additions to global memory, which limit a CTA of 64 keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import warp

from ...common import key_tiles as tiles
from ...common import ring
from ...common.ring import Cursor
from ...common.rounding import round_to, widened
from ...common.warps import GROUP, WARP
from .. import wgmma
from ..warps import WARP_ROWS
from .epilogue import dk_target, dv_scale, dv_target, stage_gradient, store_gradients
from .mainloop import share
from .plan import DONE
from .store_dq import add_dq, end_adding, other_slot
from .walk import each_block
from .weights import Made, differentiate, dropped, four_of, mask_rows, take_kept, weigh
from .work import Cursors, Thread, Work

if TYPE_CHECKING:
    from .kernel import Kernel


@cute.jit
def make_weights(k: Kernel) -> None:
    """The first warpgroup."""
    plan = k.plan
    S = wgmma.scores_accumulator(plan.dtype, plan.queries)
    held = wgmma.held_fragment(plan.dtype, plan.D) if plan.config.holds > 1 else None
    t = _thread(S, None, wgmma.output_accumulator(plan.dtype, plan.Dv), held)
    at, kv_at = _start(k, 0), ring.start()
    tile = tiles.read(k, kv_at)
    while tile.block >= 0:
        if cutlass.const_expr(held is not None):
            wgmma.hold(held, k.sK[None, None, kv_at.stage], t.index)
        _begin(k, t, kv_at, 0, at)
        at = each_block(k, t, tile, kv_at, at, _weights_block, plan.masks)
        # dK leaves through K.
        cute.arch.barrier_arrive(barrier_id=DONE, number_of_threads=plan.consumers)
        ring.release(k.load_k, kv_at)
        # And dV through V, which has been read: of that the last dS was made.
        stage = k.sV[None, None, kv_at.stage]
        stage_gradient(k, t, t.dV, dv_scale(k), stage)
        store_gradients(k, t, (dv_target(k, stage),), tile)
        ring.release(k.load_v, kv_at)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(k, kv_at)
    end_adding(k, t, _slot(at, 0))


@cute.jit
def make_ds(k: Kernel) -> None:
    """The second warpgroup."""
    plan = k.plan
    dP = wgmma.scores_accumulator(plan.dtype, plan.queries)
    held = wgmma.held_fragment(plan.dtype, plan.Dv) if plan.config.holds else None
    t = _thread(dP, wgmma.output_accumulator(plan.dtype, plan.D), None, held)
    at, kv_at = _start(k, 1), ring.start()
    tile = tiles.read(k, kv_at)
    while tile.block >= 0:
        ring.wait_full(k.load_v, kv_at)
        if cutlass.const_expr(held is not None):
            wgmma.hold(held, k.sV[None, None, kv_at.stage], t.index)
        _begin(k, t, kv_at, 1, at)
        at = each_block(k, t, tile, kv_at, at, _ds_block, False)
        ring.release(k.load_v, kv_at)
        cute.arch.barrier(barrier_id=DONE, number_of_threads=plan.consumers)
        stage = k.sK[None, None, kv_at.stage]
        stage_gradient(k, t, t.dK, k.rule.scale, stage)
        store_gradients(k, t, (dk_target(k, stage),), tile)
        ring.release(k.load_k, kv_at)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(k, kv_at)
    end_adding(k, t, _slot(at, 1))


def _thread(
    S: cute.Tensor, dK: cute.Tensor | None, dV: cute.Tensor | None, held: cute.Tensor | None
) -> Thread:
    """Of either warpgroup: both hold all keys of the tile."""
    thread, _, _ = cute.arch.thread_idx()
    return Thread(Int32(0), thread % GROUP, S, dK, dV, held)


@cute.jit
def _weights_block(
    k: Kernel,
    t: Thread,
    work: Work,
    n: Int32,
    add: Boolean,
    masked: cutlass.Constexpr,
    last: cutlass.Constexpr,
    at: Cursors,
) -> Cursors:
    """Block n of a head, whose scores are under way; leaves those of the next one under way."""
    plan, after = k.plan, _after(k, at)
    ahead = plan.config.scores_first and not last
    mask = None
    if cutlass.const_expr(masked and plan.features.mask != ""):
        mask = mask_rows(k, t, work, n)
    wgmma.wait(0)
    made = weigh(k, t, work, n, at.q, mask, masked)
    ring.release(k.load_q, at.q)
    ring.wait_empty(k.share_ds, at.ds)
    _hand_over(k, t, made, at)
    ring.wait_full(k.load_do, at.do)
    wgmma.accumulate(t.dV, dropped(k, made), k.sdOt[None, None, at.do.stage], add)
    _finish(k, t, work, n, 0, ahead, last, at, after)
    return after


@cute.jit
def _ds_block(
    k: Kernel,
    t: Thread,
    work: Work,
    n: Int32,
    add: Boolean,
    masked: cutlass.Constexpr,
    last: cutlass.Constexpr,
    at: Cursors,
) -> Cursors:
    """Block n of a head, whose dP is under way; leaves that of the next one under way."""
    plan, after = k.plan, _after(k, at)
    wgmma.wait(0)
    made = _take(k, t, at)
    dS = differentiate(k, t, work, n, at.do, made, t.S)
    ring.release(k.load_do, at.do)
    cute.arch.sync_warp()
    share(k, t, dS, k.sdS[None, None, at.ds.stage])
    cute.arch.fence_view_async_shared()
    ring.fill(k.share_ds, at.ds)
    if cutlass.const_expr(plan.ctas > 1):
        _send(k, t, at.ds)
    ring.wait_full(k.load_q, at.q)
    wgmma.accumulate(t.dK, dS, k.sQt[None, None, at.q.stage], add)
    _finish(k, t, work, n, 1, False, last, at, after)
    return after


@cute.jit
def _finish(
    k: Kernel,
    t: Thread,
    work: Work,
    n: Int32,
    warpgroup: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    last: cutlass.Constexpr,
    at: Cursors,
    after: Cursors,
) -> None:
    """The warpgroup's dQ, under which its dV or dK ends; and, `ahead` of dQ's end or not, the next block."""
    plan, passes = k.plan, k.plan.config.dq_passes
    ring.wait_full(k.share_ds, at.ds)
    for i in cutlass.range_constexpr(passes):
        dQ, under_way = _issue_dq(k, work, warpgroup * passes + i, i == 0, at), 0
        if cutlass.const_expr(ahead and i == passes - 1):
            _begin(k, t, work.kv, warpgroup, after)
            under_way = 1
        if cutlass.const_expr(i == 0):
            wgmma.wait(plan.ctas + under_way)
            if cutlass.const_expr(warpgroup == 0):
                ring.release(k.load_do, at.do)
            else:
                ring.release(k.load_q, at.q)
        wgmma.wait(under_way)
        if cutlass.const_expr(i == passes - 1):
            ring.release(k.share_ds, at.ds)
        add_dq(k, t, dQ, _slot(at, warpgroup), _first_piece(k) + warpgroup * passes + i, work, n)
    if cutlass.const_expr(not last and not ahead):
        _begin(k, t, work.kv, warpgroup, after)


def _start(k: Kernel, warpgroup: int) -> Cursors:
    slot = Int32(warpgroup) if k.plan.config.dq_stages > 1 else None
    return Cursors(ring.start(), ring.start(), ring.start(), slot)


def _slot(at: Cursors, warpgroup: int) -> Int32:
    """In which the warpgroup leaves its dQ."""
    return Int32(warpgroup) if at.dq is None else at.dq


def _after(k: Kernel, at: Cursors) -> Cursors:
    config = k.plan.config
    stages = (config.q_stages, config.do_stages, config.ds_stages)
    slot = None if at.dq is None else other_slot(k, at.dq)
    return Cursors(*(ring.after(cursor, count) for cursor, count in zip(at[:3], stages, strict=True)), slot)


@cute.jit
def _begin(k: Kernel, t: Thread, kv_at: Cursor, warpgroup: cutlass.Constexpr, at: Cursors) -> None:
    """Issue a block's scores, or its dP."""
    if cutlass.const_expr(warpgroup == 0):
        ring.wait_full(k.load_q, at.q)
        keys, rows = k.sK[None, None, kv_at.stage], k.sQ[None, None, at.q.stage]
    else:
        ring.wait_full(k.load_do, at.do)
        keys, rows = k.sV[None, None, kv_at.stage], k.sdO[None, None, at.do.stage]
    if cutlass.const_expr(t.held is not None):
        wgmma.scores_of_held(t.S, t.held, rows)
    else:
        wgmma.scores(t.S, keys, rows)


@cute.jit
def _issue_dq(
    k: Kernel, work: Work, place: cutlass.Constexpr, first: cutlass.Constexpr, at: Cursors
) -> cute.Tensor:
    """A piece of dQ = dS K, the `place`-th of this CTA's: of the own keys, then of the other CTA's."""
    columns = k.plan.blocks.piece_columns
    dQ, box = wgmma.output_accumulator(k.plan.dtype, columns), (columns, k.plan.keys)
    keys, own = k.sKt[None, None, work.kv.stage], k.sdS[None, None, at.ds.stage]
    wgmma.transposed(dQ, own, cute.local_tile(keys, box, (_first_piece(k) + place, 0)))
    if cutlass.const_expr(k.plan.ctas > 1):
        others, received = k.sOtherKt[None, None, work.kv.stage], k.sOtherdS[None, None, at.ds.stage]
        if cutlass.const_expr(first):
            ring.wait_full(k.exchange, at.ds)
        wgmma.transposed(dQ, received, cute.local_tile(others, box, (place, 0)), True)
    return dQ


def _first_piece(k: Kernel) -> Int32:
    """Which range of dQ's columns is the first that this CTA adds."""
    config = k.plan.config
    return Int32(0) if k.plan.ctas == 1 else k.pair.rank * (config.warpgroups * config.dq_passes)


@cute.jit
def _hand_over(k: Kernel, t: Thread, made: Made, at: Cursors) -> None:
    """The first warpgroup's weights to the second; for dS they may have softcap's derivatives in them."""
    P, features = made.P, k.plan.features
    if cutlass.const_expr(k.plan.hands_slopes_over):
        share(k, t, made.slopes, k.sSlopes[None, None, at.ds.stage])
    elif cutlass.const_expr(features.softcap):
        P = wgmma.weights_fragment(k.plan.dtype, k.plan.queries)
        for j in cutlass.range_constexpr(cute.size(P) // 4):
            slopes, weights = widened(four_of(made.slopes, j)), four_of(t.S, j)
            for i in cutlass.range_constexpr(4):
                slopes[i] = slopes[i] * weights[i]
            round_to(slopes, four_of(P, j))
    share(k, t, P, k.sdS[None, None, at.ds.stage])
    ring.fill(k.weights, at.ds)


@cute.jit
def _take(k: Kernel, t: Thread, at: Cursors) -> Made:
    """What the first warpgroup has handed over, and what dropout keeps."""
    slopes, kept = None, None
    if cutlass.const_expr(k.plan.features.dropout):
        kept = take_kept(k, t, at.q)
    ring.wait_full(k.weights, at.ds)
    P = _shared(k, t, k.sdS[None, None, at.ds.stage])
    if cutlass.const_expr(k.plan.hands_slopes_over):
        slopes = _shared(k, t, k.sSlopes[None, None, at.ds.stage])
    return Made(P, slopes, kept)


@cute.jit
def _shared(k: Kernel, t: Thread, stage: cute.Tensor) -> cute.Tensor:
    """What `share` wrote, in the same registers."""
    found = cute.make_rmem_tensor(t.S.layout, k.plan.dtype)
    turned = cute.make_tensor(stage.iterator, cute.select(stage.layout, [1, 0]))
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), k.plan.dtype)
    copy = cute.make_tiled_copy_C(atom, wgmma.scores_mma(k.plan.dtype, k.plan.queries)).get_slice(t.index)
    cute.copy(atom, copy.partition_S(turned), copy.retile(found))
    return found


@cute.jit
def _send(k: Kernel, t: Thread, ds_at: Cursor) -> None:
    """The warp's 16 keys of dS to the other CTA, from which as many are to come."""
    count = 2 * WARP_ROWS * k.plan.queries
    offset = cute.arch.make_warp_uniform(t.index // WARP) * count
    source, target = (x[None, None, ds_at.stage].iterator.toint() for x in (k.sdS, k.sOtherdS))
    full = k.exchange.full + ds_at.stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, count)
        cute.arch.inline_ptx(
            "{ .reg .b32 to, barrier; mapa.shared::cluster.u32 to, {$r0}, {$r3};"
            " mapa.shared::cluster.u32 barrier, {$r2}, {$r3};"
            " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            f" [to], [{{$r1}}], {count}, [barrier]; }}",
            read_only_args=[target + offset, source + offset, full.toint(), k.pair.rank ^ 1],
        )
