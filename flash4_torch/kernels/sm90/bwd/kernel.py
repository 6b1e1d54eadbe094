"""The backward kernel: shared memory, barriers, and which warps take which role.

              tile_counter (global)
                   |
K, V            -> load ==load_k===> mainloop (warpgroup 1, 2, ..) -> epilogue -> dK, dV
Q, dO, lse, delta       ==load_v===>    |  ^
                        ==load_q===>    |  share_ds: dS of all warpgroups' keys
                        ==load_do==>    v
                                  store warps -> dQ, summed up in global memory; `dkv_via_dq_smem`: dK, dV
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...common import attn_mask, dependent_launch, dropout, ring, smem_layouts
from ...common.bwd.row_stats import RowInputs
from ...common.bwd.tiles import WORK_TILE_WORDS
from ...common.cta_pair import cluster_sync_exit, cluster_sync_init, make_cta_pair, peer_of
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs, with_mask
from ...common.warps import GROUP, WARP, WARPS
from .context import Context, Layouts, Maps, Turned
from .load import load
from .mainloop import mainloop
from .rng import dropout_bits
from .role_split import ds_warpgroup, p_warpgroup
from .store_commands import WORDS
from .store_warp import store_loop


@cute.kernel
def backward_kernel(
    maps: Maps,
    layouts: Layouts,
    turned: Turned,
    stats: cute.Tensor,
    row_inputs: RowInputs | None,
    dq_acc: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    tile_counter: cute.Tensor | None,
    dq_semaphore: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask_args: attn_mask.MaskArgs | ModArgs | None,
    dmask: cute.Tensor | None,
    rng_state: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = cute.arch.make_warp_uniform(thread // GROUP)

    config = plan.config
    memory = SmemAllocator()
    peer = peer_of(plan.cluster_size)
    sQ, sdO, sK, sV, sdS = (smem_layouts.allocate(memory, plan.dtype, layout) for layout in layouts[:5])
    piece = cute.make_layout((plan.blocks.registers * GROUP, plan.dq_slots))
    sdQ = memory.allocate_tensor(Float32, piece, byte_alignment=1024)
    sDtanh, sScores, sPeerdS, sPeerK, sPeerKt = None, None, None, None, None
    if cutlass.const_expr(plan.shares_dtanh):
        sDtanh = smem_layouts.allocate(memory, plan.dtype, layouts.ds)
    if cutlass.const_expr(plan.shares_scores):
        fours = plan.keys * plan.queries // (4 * GROUP)
        of_lanes = cute.make_layout((4, fours, GROUP), stride=(1, 4 * GROUP, 4))
        sScores = memory.allocate_tensor(Float32, of_lanes, byte_alignment=1024)
    if cutlass.const_expr(plan.cluster_size > 1):
        sPeerdS, sPeerK = (
            smem_layouts.allocate(memory, plan.dtype, layout) for layout in (layouts.ds, layouts.peer_k)
        )
        sPeerKt = _turned(sPeerK, turned.peer_k)
    # Buffers aligned to 1024 bytes come first, so that alignment wastes nothing between them.
    weights = ring.allocate(memory, config.ds_stages) if config.role_split else None
    exchange = ring.allocate(memory, config.ds_stages) if plan.cluster_size > 1 else None
    keep_bits, sKeepBits = None, None
    if cutlass.const_expr(plan.features.dropout):
        keep_bits = ring.allocate(memory, config.q_stages)
        lanes = (WARP, dropout.words(plan.queries), plan.strips, config.q_stages)
        sKeepBits = memory.allocate_tensor(Uint32, cute.make_layout(lanes), 16)
    rows_of_q, sLse, sLseLow = cute.make_layout((plan.queries, config.q_stages)), None, None
    if cutlass.const_expr(plan.features.large_scores):
        sLse, sLseLow = (memory.allocate_tensor(Float32, rows_of_q, 16) for _ in range(2))
    block_entries = None
    if cutlass.const_expr(plan.features.lists_blocks):
        block_entries = memory.allocate_array(Int32, config.q_stages)
    ctx = Context(
        plan=plan,
        params=params,
        maps=maps,
        sQ=sQ,
        sQt=_turned(sQ, turned.q),
        sdO=sdO,
        sdOt=_turned(sdO, turned.do),
        sK=sK,
        sKt=_turned(sK, turned.k),
        sV=sV,
        sdS=sdS,
        sPeerdS=sPeerdS,
        sDtanh=sDtanh,
        sScores=sScores,
        sPeerK=sPeerK,
        sPeerKt=sPeerKt,
        sLseLog2=memory.allocate_tensor(Float32, rows_of_q, 16),
        sLse=sLse,
        sLseLow=sLseLow,
        sDelta=memory.allocate_tensor(Float32, cute.make_layout((plan.queries, config.do_stages)), 16),
        load_q=ring.allocate(memory, config.q_stages, peer),
        load_do=ring.allocate(memory, config.do_stages, peer),
        load_k=ring.allocate(memory, config.kv_stages),
        load_v=ring.allocate(memory, config.kv_stages),
        share_ds=ring.allocate(memory, config.ds_stages, peer),
        weights=weights,
        exchange=exchange,
        cta_pair=make_cta_pair(memory, peer),
        write_stats=ring.allocate(memory, 1) if config.preprocesses else None,
        sequence_end=ring.allocate(memory, 1),
        work_tile=memory.allocate_array(Int32, WORK_TILE_WORDS * config.kv_stages),
        block_entries=block_entries,
        sdQ=sdQ,
        commands=memory.allocate_array(Int64, WORDS * plan.dq_slots),
        keep_bits=keep_bits,
        sKeepBits=sKeepBits,
        stats=stats,
        row_inputs=row_inputs,
        dq_acc=dq_acc,
        dk=dk,
        dv=dv,
        tile_counter=tile_counter,
        dq_semaphore=dq_semaphore,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        mask=None,
        mods=None,
        dmask=dmask,
        rng_state=rng_state,
    )
    if warp == 0:
        for edge in (ctx.load_q, ctx.load_do, ctx.load_k, ctx.load_v, ctx.sequence_end):
            readers = plan.consumer_warps + plan.rng_warps * (edge is ctx.load_k)
            ring.initialise(edge, readers)
        ring.initialise(ctx.share_ds, plan.consumer_warps, writers=WARPS)
        for edge in (ctx.weights, ctx.exchange):
            if cutlass.const_expr(edge is not None):
                ring.initialise(edge, 1, writers=WARPS)
        if cutlass.const_expr(plan.cluster_size > 1):
            ring.initialise(ctx.cta_pair.work_ring, 1)
        if cutlass.const_expr(config.preprocesses):
            ring.initialise(ctx.write_stats, 1, writers=plan.consumer_warps)
        if cutlass.const_expr(plan.features.dropout):
            ring.initialise(ctx.keep_bits, plan.consumer_warps, writers=plan.rng_warps)
        cute.arch.mbarrier_init_fence()
        for atom in maps[:14:2]:
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)
    dependent_launch.wait_for_previous_kernel()
    cluster_sync_init(plan.cluster_size)

    if group == 0:
        cute.arch.setmaxregister_decrease(plan.registers.producer)
        if warp == 0:
            load(with_mask(ctx, mask_args))
        elif warp <= plan.store_warps:
            store_loop(ctx, warp - 1)
        elif cutlass.const_expr(plan.features.dropout):
            dropout_bits(with_mask(ctx, mask_args), warp - 1 - plan.store_warps)
    else:
        cute.arch.setmaxregister_increase(plan.registers.consumer)
        if cutlass.const_expr(config.role_split):
            if group == 1:
                p_warpgroup(with_mask(ctx, mask_args))
            else:
                ds_warpgroup(with_mask(ctx, mask_args))
        else:
            mainloop(with_mask(ctx, mask_args), group - 1)
    cluster_sync_exit(plan.cluster_size)


def _turned(x: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
    return cute.make_tensor(x.iterator, layout.outer)
