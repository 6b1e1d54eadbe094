"""The decode kernel: shared memory, and which rows and keys a CTA has.

Q, K, V -> load -> mainloop -> epilogue -> out, lse
                                        -> shared memory -> merge (in the cluster) -> out, lse
        -> partial_out, partial_lse -> merge (in the last cluster) -> out, lse
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ..common import ring, smem_layouts
from ..common.band import make_band, visible_span
from ..common.warps import WARP
from . import fp8, groups, roles, splits, wide
from . import mainloop as narrow
from .context import Context, Tensors, Tile
from .epilogue import epilogue
from .mainloop import begin_split
from .merge import merge
from .params import DecodeParams, Divisors
from .plan import PARTS, VECTOR

NO_BOUND = 1 << 30
"""More keys than a sequence has."""


@cute.kernel
def decode_kernel(
    tensors: Tensors, layouts: tuple, params: DecodeParams, divisors: Divisors, plan: cutlass.Constexpr
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    tile = _tile(tensors, params, divisors, plan)
    if tile.has_work | tile.merges:
        memory = SmemAllocator()
        sQ = smem_layouts.allocate(memory, plan.mma_dtype, layouts[0])
        if cutlass.const_expr(not plan.has_load_warps):
            sQ = sQ[None, None, 0]
        sK = smem_layouts.allocate(memory, plan.mma_dtype, layouts[1])
        sV = smem_layouts.allocate(memory, plan.mma_dtype, layouts[2])
        sP, sMax, sSum, sO, sLse, sGroup, sCount, sFactor = (None,) * 8
        load_k, load_v = None, None
        if cutlass.const_expr(plan.has_load_warps):
            load_k, load_v = (ring.allocate(memory, plan.stages) for _ in range(2))
        if cutlass.const_expr(plan.key_warps > 1):
            sP = smem_layouts.allocate(memory, plan.mma_dtype, layouts[3])[None, None, 0]
            sMax = memory.allocate_tensor(Float32, cute.make_layout((plan.rows, plan.key_warps)), 16)
            sSum = memory.allocate_tensor(Float32, cute.make_layout((4, plan.rows, PARTS)), 16)
        if cutlass.const_expr(plan.kept > 0):
            # K and V have been read when O is stored in their place.
            place = cute.make_ptr(Float32, sK.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
            vectors = plan.vectors * plan.kept_in_stages
            sO = cute.make_tensor(place, cute.make_layout((VECTOR, plan.threads, vectors)))
            sLse = memory.allocate_tensor(Float32, cute.make_layout(plan.rows * plan.kept), 16)
        if cutlass.const_expr(plan.group_vectors > 0):
            sGroup = memory.allocate_tensor(
                Float32, cute.make_layout((VECTOR, plan.threads, plan.group_vectors)), 16
            )
        if cutlass.const_expr(plan.form.parts):
            sCount = memory.allocate_tensor(Uint32, cute.make_layout(1), 16)
        if cutlass.const_expr(plan.scales_q):
            sFactor = memory.allocate_tensor(Float32, cute.make_layout(plan.rows), 16)
        ctx = Context(
            plan=plan,
            params=params,
            divisors=divisors,
            tensors=tensors,
            tile=tile,
            warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()),
            lane=thread % WARP,
            sQ=sQ,
            sK=sK,
            sV=sV,
            sFactor=sFactor,
            sP=sP,
            sMax=sMax,
            sSum=sSum,
            sO=sO,
            sLse=sLse,
            sGroup=sGroup,
            sCount=sCount,
            load_k=load_k,
            load_v=load_v,
        )
        if cutlass.const_expr(plan.has_load_warps):
            roles.run(ctx)
        else:
            _run(ctx)


@cute.jit
def _run(ctx: Context) -> None:
    """The whole of a CTA's work, of which all warps do the same."""
    plan, tile = ctx.plan, ctx.tile
    t = (wide if plan.form.wgmma else narrow).make_thread(ctx)
    if tile.has_work:
        if cutlass.const_expr(plan.form.groups):
            groups.run(ctx, t, (wide if plan.form.wgmma else narrow).mainloop)
        else:
            begin_split(t)
            (wide if plan.form.wgmma else narrow).mainloop(ctx, t, tile.blocks)
            epilogue(ctx, t)
    if cutlass.const_expr(plan.shares_keys):
        if tile.merges:
            merge(ctx, t.rows)
    if cutlass.const_expr(plan.merges_together and plan.form.parts):
        if tile.merges:
            groups.merge_together(ctx, t.rows)


@cute.jit
def _tile(tensors: Tensors, params: DecodeParams, divisors: Divisors, plan: cutlass.Constexpr) -> Tile:
    """The CTA's tile: splits follow one another, then tiles of rows, KV heads, and sequences."""
    split, y, batch = cute.arch.block_idx()
    first_token, Sq, Sk, right = _sequence(tensors, params, batch, plan)
    kv_head, index = divmod(y, divisors.tiles)
    k_scale, v_scale = Float32(1.0), Float32(1.0)
    if cutlass.const_expr(plan.is_fp8):
        k_scale, v_scale = tensors.k_scale[batch, kv_head], tensors.v_scale[batch, kv_head]
        if cutlass.const_expr(fp8.unit(plan) != 1.0):
            k_scale, v_scale = k_scale * fp8.unit(plan), v_scale * fp8.unit(plan)
    group = divisors.group
    first_row, num_rows = index * plan.rows, Sq * group.divisor
    last_row = cutlass.max(cutlass.min(first_row + plan.rows, num_rows) - 1, first_row)
    tokens = first_row // group, last_row // group
    band = make_band(Sq, Sk, params.left, right)
    keys = [Int32(0), Sk]
    if cutlass.const_expr(plan.features.left):
        keys[0] = cutlass.max(tokens[0] + band.lowest, 0)
    if cutlass.const_expr(plan.features.right):
        keys[1] = cutlass.min(tokens[1] + band.highest + 1, Sk)
    visible = visible_span(band, plan.band, *tokens)
    has_rows = first_row < num_rows
    if cutlass.const_expr(plan.form.groups):
        number = tensors.partial_lse.shape[0] if cutlass.const_expr(plan.form.parts) else Int32(1)
        shares, blocks = splits.groups(visible, divisors, number), visible
        split = split // plan.group_ctas
        each = cute.ceil_div(shares.last - shares.first, cute.arch.grid_dim()[0] // plan.group_ctas)
        has_work = has_rows & (shares.first + split * each < shares.last)
    else:
        # Where one split has all blocks, this hides from ptxas how they follow from the rows (ptxas.md, P16).
        shares, blocks = splits.even(visible, split, divisors, plan.least_blocks)
        has_work = has_rows & (shares.first <= split) & (split < shares.last)
    merges, cluster = cutlass.Boolean(False), plan.form.cluster
    if cutlass.const_expr(plan.shares_keys):
        first = split // cluster * cluster
        shared = (shares.first < first + cluster) & (first < shares.last)
        merges = has_rows & shared & (shares.last - shares.first > 1)
    if cutlass.const_expr(plan.merges_together and plan.form.parts):
        first = shares.first + split // cluster * cluster * each
        merges = has_rows & (first < shares.last) & (shares.last - shares.first > 1)
    return Tile(
        batch,
        kv_head,
        first_token,
        first_row,
        num_rows,
        tokens,
        band,
        tuple(keys),
        blocks,
        split,
        shares,
        has_work,
        merges,
        k_scale,
        v_scale,
    )


class _Sequence(NamedTuple):
    """A sequence's numbers, which are safe whatever the tensors hold."""

    first_token: Int32
    Sq: Int32
    Sk: Int32
    right: Int32
    """The bound on the right, `NO_BOUND` where a flag lifts it."""


@cute.jit
def _sequence(tensors: Tensors, params: DecodeParams, batch: Int32, plan: cutlass.Constexpr) -> _Sequence:
    form, T = plan.form, Int32(tensors.q.shape[0])
    # None of these loads waits for another one.
    first, end = batch * params.max_seqlen_q, (batch + 1) * params.max_seqlen_q
    if cutlass.const_expr(form.ragged):
        first, end = tensors.cu_seqlens_q[batch], tensors.cu_seqlens_q[batch + 1]
    used, is_causal = Int32(NO_BOUND), Int32(1)
    if cutlass.const_expr(form.lengths):
        used = tensors.seqused_k[batch]
    if cutlass.const_expr(form.causal_flags):
        is_causal = tensors.causal[batch]
    room = Int64(tensors.k.shape[1])
    if cutlass.const_expr(form.paged):
        room = room * Int64(tensors.block_table.shape[1])
    if tensors.k.shape[0] == 0:
        room = Int64(0)
    Sk = Int32(cutlass.min(Int64(cutlass.max(used, 0)), room))
    if cutlass.const_expr(form.ragged):
        first = cutlass.min(cutlass.max(first, 0), T)
        end = cutlass.min(cutlass.max(end, first), T)
        end = end if end - first <= params.max_seqlen_q else first
    right = params.right
    if cutlass.const_expr(form.causal_flags):
        right = params.right if is_causal != 0 else Int32(NO_BOUND)
    return _Sequence(first, end - first, Sk, right)
