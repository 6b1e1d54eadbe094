"""The consumer warps: scores, their weights, dropout, and the sums over heads."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_ops

from ...configs.weights import QUERIES, WARP_GRID, WARP_TILE
from ..common import attn_mask, dropout, ring, scores, warp_mma, warp_tf32
from ..common import band as bands
from ..common.fragment import Fragment, mma_fragment
from ..common.ring import Cursor
from ..common.role import role
from ..common.rounding import round_to
from ..common.scores import LOG2E
from .context import Context
from .load import copy_chunk, start_copies
from .plan import WeightsPlan


class Thread(NamedTuple):
    """A thread's place in the tile, and its registers; each MMA's rows of the warp have their own."""

    lane: Int32
    warp: Int32
    rows: tuple[tuple[Int32, Int32], ...]
    """Queries."""
    key_block: Int32
    """The warp's keys, in blocks of as many."""
    S: tuple[cute.Tensor, ...]
    """Scores, then weights."""
    sums: tuple[cute.Tensor, ...]
    """Sums of the weights over the heads, if they are averaged."""


@role(consumes=("load_qk",))
@cute.jit
def mainloop(ctx: Context, warp: Int32) -> None:
    plan, tile = ctx.plan, ctx.tile
    at = ring.start() if cutlass.const_expr(plan.tma) else start_copies(ctx, warp)
    t = _thread(ctx, warp)
    philox = _philox(ctx) if cutlass.const_expr(plan.features.dropout and not plan.loads_late) else None
    for sums in t.sums:
        sums.fill(0.0)
    for head in cutlass.range(tile.first_head, tile.end_head, unroll=1):
        if cutlass.const_expr(plan.features.dropout):
            _generate_keep_bits(ctx, t, philox, head)
        if cutlass.const_expr(plan.loads_late):
            at = _scores_of_copies(ctx, t, head, at)
        lse, low = _lse_of(ctx, t, ctx.lse, head), None
        if cutlass.const_expr(ctx.lse_low is not None):
            low = _lse_of(ctx, t, ctx.lse_low, head)
        if cutlass.const_expr(not plan.loads_late):
            at = _scores(ctx, t, at) if cutlass.const_expr(plan.tma) else _scores_of_copies(ctx, t, head, at)
        for m in cutlass.range_constexpr(len(t.S)):
            fragment = mma_fragment(t.S[m], t.rows[m], t.key_block * WARP_TILE[1], t.lane)
            _mask(ctx, t, fragment, m, head)
            _weights(ctx, fragment, lse[m], None if low is None else low[m])
            if cutlass.const_expr(plan.features.dropout):
                keep_bits = dropout.take(ctx.sKeepBits[None, None, m, t.warp], t.lane)
                if cutlass.const_expr(plan.signed):
                    dropout.QueryRows.negate(t.S[m], keep_bits)
                else:
                    dropout.QueryRows.drop(t.S[m], keep_bits)
            if cutlass.const_expr(plan.average):
                for i in cutlass.range_constexpr(cute.size(t.S[m])):
                    t.sums[m][i] = t.sums[m][i] + t.S[m][i]
            else:
                factor = Float32(1.0) if cutlass.const_expr(plan.signed) else ctx.params.keep_scale
                _store(ctx, fragment, ctx.weights[tile.batch, head, None, None], factor)
    if cutlass.const_expr(plan.average):
        factor = ctx.params.keep_scale / Float32(ctx.maps.mQ.shape[2])
        for m in cutlass.range_constexpr(len(t.S)):
            fragment = mma_fragment(t.sums[m], t.rows[m], t.key_block * WARP_TILE[1], t.lane)
            _store(ctx, fragment, ctx.weights[tile.batch, None, None], factor)


@cute.jit
def _thread(ctx: Context, warp: Int32) -> Thread:
    plan, tile = ctx.plan, ctx.tile
    queries, keys = WARP_TILE
    lane = cute.arch.lane_idx()
    along_keys = WARP_GRID[1]
    first = tile.query_block * QUERIES + warp // along_keys * queries
    mmas = queries // warp_mma.ROWS
    own = (first + m * warp_mma.ROWS + lane // warp_mma.LANES for m in range(mmas))
    rows = tuple((row, row + 8) for row in own)
    S, sums = _accumulators(plan, mmas, keys), _accumulators(plan, mmas if plan.average else 0, keys)
    return Thread(lane, warp, rows, tile.key_block * along_keys + warp % along_keys, S, sums)


def _accumulators(plan: WeightsPlan, count: int, columns: int) -> tuple[cute.Tensor, ...]:
    if plan.is_float32:
        return warp_tf32.make_accumulators(count, columns)
    return warp_mma.make_accumulators(plan.dtype, count, columns)


@cute.jit
def _scores(ctx: Context, t: Thread, at: Cursor) -> Cursor:
    """S = Q K^T; returns the cursor of the next head's first chunk."""
    for S in t.S:
        S.fill(0.0)
    ring.wait_full(ctx.load_qk, at)
    _multiply(ctx, t, at.stage)
    for _ in cutlass.range(ctx.plan.chunks - 1, unroll=1):
        before, at = at, ring.after(at, ctx.plan.stages)
        ring.wait_full(ctx.load_qk, at)
        # Late: by now nothing is left to wait for in the fence.
        ring.release_read(ctx.load_qk, before)
        _multiply(ctx, t, at.stage)
    ring.release_read(ctx.load_qk, at)
    return ring.after(at, ctx.plan.stages)


@cute.jit
def _scores_of_copies(ctx: Context, t: Thread, head: Int32, stage: Int32) -> Int32:
    """The same of chunks that all warps copy; returns the stage of the next head's first one."""
    stages = ctx.plan.stages
    for S in t.S:
        S.fill(0.0)
    # A loop of one turn would be none, and what all heads share would spill, 223 times (ptxas.md, P16).
    chunks = ctx.plan.chunks + Int32(ctx.maps.mQ.shape[0] <= 0)
    for i in cutlass.range(chunks, unroll=1):
        cute.arch.cp_async_wait_group(stages - 2)
        # What other warps copied is there, and they have used the chunk before it.
        cute.arch.sync_threads()
        freed = Int32(stages - 1) if stage == 0 else stage - 1
        copy_chunk(ctx, t.warp, head, i + stages - 1, freed)
        if cutlass.const_expr(ctx.plan.is_float32):
            _multiply_float32(ctx, t, stage)
        else:
            _multiply(ctx, t, stage)
        stage = Int32(0) if stage + 1 == stages else stage + 1
    return stage


@cute.jit
def _multiply(ctx: Context, t: Thread, stage: Int32) -> None:
    """Add the products of a stage's chunk to S."""
    plan, mma = ctx.plan, warp_mma.mma_of(ctx.plan.dtype)
    queries, keys = WARP_TILE
    atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), plan.dtype)
    lanes = mma.get_slice(t.lane)
    copy_q, copy_k = cute.make_tiled_copy_A(atom, mma), cute.make_tiled_copy_B(atom, mma)
    q_lanes, k_lanes = copy_q.get_slice(t.lane), copy_k.get_slice(t.lane)
    own_q = cute.local_tile(ctx.sQ[None, None, stage], (queries, plan.chunk), (t.warp // WARP_GRID[1], 0))
    own_k = cute.local_tile(ctx.sK[None, None, stage], (keys, plan.chunk), (t.warp % WARP_GRID[1], 0))
    q_regs = lanes.make_fragment_A(lanes.partition_A(own_q))
    k_regs = lanes.make_fragment_B(lanes.partition_B(own_k))
    q_source, k_source = q_lanes.partition_S(own_q), k_lanes.partition_S(own_k)
    q_target, k_target = q_lanes.retile(q_regs), k_lanes.retile(k_regs)
    for k in cutlass.range_constexpr(plan.chunk // 16):
        cute.copy(copy_q, q_source[None, None, k], q_target[None, None, k])
        cute.copy(copy_k, k_source[None, None, k], k_target[None, None, k])
        for m in cutlass.range_constexpr(len(t.S)):
            one = cute.local_tile(q_regs[None, None, k], (cute.size(q_regs, mode=[0]), 1), (0, m))
            cute.gemm(mma, t.S[m], one, k_regs[None, None, k], t.S[m])


@cute.jit
def _multiply_float32(ctx: Context, t: Thread, stage: Int32) -> None:
    """Add the products of a stage's chunk to S, of float32 numbers."""
    queries, keys = WARP_TILE
    own_q = warp_tf32.Rows(ctx.sQ[None, None, stage], t.warp // WARP_GRID[1] * queries)
    own_k = warp_tf32.Rows(ctx.sK[None, None, stage], t.warp % WARP_GRID[1] * keys)
    warp_tf32.add_scores(t.S, own_q, own_k, t.lane, ctx.plan.tf32_method)


@cute.jit
def _mask(ctx: Context, t: Thread, fragment: Fragment, m: cutlass.Constexpr, head: Int32) -> None:
    """Scale, cap and mask scores."""
    plan, tile = ctx.plan, ctx.tile
    scores.scale_and_cap(t.S[m], ctx.params, plan.features)
    if cutlass.const_expr(plan.features.mask):
        own = attn_mask.rows_of(ctx.mask, tile.batch, (head, head), fragment.rows, t.lane % 4)
        n = cutlass.min(t.key_block, ctx.mask.blocks.shape[3] - 1)  # a warp may have no key at all
        attn_mask.apply(ctx.mask, own, attn_mask.words_of(own, n), n, fragment)
    if cutlass.const_expr(plan.band.masks):
        bands.mask(tile.band, plan.band, fragment)


@cute.jit
def _lse_of(ctx: Context, t: Thread, lse: cute.Tensor, head: Int32) -> tuple:
    """The numbers of the thread's rows, a pair for each MMA; rows beyond the end read the last one."""
    of_head = lse[ctx.tile.batch, head, None]
    last = of_head.shape[0] - 1
    return tuple(tuple(of_head[cutlass.min(row, last)] for row in rows) for rows in t.rows)


@cute.jit
def _weights(ctx: Context, fragment: Fragment, lse: tuple, low: tuple | None) -> None:
    """Turn scores into weights, in place; a row that sees nothing, whose lse is -inf, has weights 0."""
    features = ctx.plan.features
    scale = scores.softmax_scale(ctx.params, features)
    for r in cutlass.range_constexpr(len(fragment.rows)):
        reference = cutlass.select_(lse[r] == -Float32.inf, Float32.inf, lse[r])
        for c in cutlass.range_constexpr(len(fragment.offsets)):
            x = fragment.values[r, c]
            if cutlass.const_expr(features.float_mask):
                x = (x - reference) * scale - low[r] * LOG2E
            else:
                x = x * scale - reference * LOG2E
            fragment.values[r, c] = cute.math.exp2(x, fastmath=True)


def _philox(ctx: Context) -> dropout.Dropout:
    return dropout.load(ctx.rng_state, ctx.params.drop_byte, ctx.params.drop_fraction)


@cute.jit
def _generate_keep_bits(ctx: Context, t: Thread, philox: dropout.Dropout | None, head: Int32) -> None:
    """Generate the warp's keep bits of a head, strip by strip: eight lanes have one."""
    own = _philox(ctx) if cutlass.const_expr(philox is None) else philox
    strips = dropout.strips(WARP_TILE[1])
    slot = t.lane // dropout.STRIP_LANES
    m, strip = slot // strips, Uint32(slot % strips)
    row = t.rows[0][0] - t.lane // 4 + m * warp_mma.ROWS
    rows = dropout.QueryRows.at(own, row, ctx.tile.batch * ctx.maps.mQ.shape[2] + head, t.lane)
    cute.arch.sync_warp()
    rows.generate(t.key_block * WARP_TILE[1], strip, ctx.sKeepBits[None, None, m, t.warp])
    cute.arch.sync_warp()


@cute.jit
def _store(ctx: Context, fragment: Fragment, target: cute.Tensor, factor: Float32) -> None:
    """Round `factor` times the weights, and store them to target (Sq, Sk): in pairs of keys if Sk is even."""
    Sq, Sk = target.shape
    columns = len(fragment.offsets)
    for r in cutlass.range_constexpr(len(fragment.rows)):
        row = fragment.rows[r]
        if row < Sq:
            wide, rounded = (
                cute.make_rmem_tensor(columns, Float32),
                cute.make_rmem_tensor(columns, ctx.plan.dtype),
            )
            for c in cutlass.range_constexpr(columns):
                wide[c] = fragment.values[r, c] * factor
            round_to(wide, rounded)
            start = target[row, None].iterator + fragment.key
            if Sk % 2 == 0:
                for c in cutlass.range_constexpr(0, columns, 2):
                    if fragment.key + fragment.offsets[c] < Sk:
                        pair = cute.make_tensor(rounded.iterator + c, cute.make_layout(2))
                        cute.autovec_copy(pair, attn_mask.vector_at(start + fragment.offsets[c], 2))
            else:
                for c in cutlass.range_constexpr(columns):
                    if fragment.key + fragment.offsets[c] < Sk:
                        target[row, fragment.key + fragment.offsets[c]] = rounded[c]
