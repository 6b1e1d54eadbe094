"""The forward kernel: shared memory, barriers, and which warps take which role.

       tile_counter (global)
            |
Q, K, V -> load ==load_q====> mainloop (warpgroup 1, 2, ..) -> epilogue -> O, lse
                ==load_k====>
                ==load_v====>         from load_values where V's warp is one of its own
            rng ==keep_bits=>         and both of them read the work tile from load_q
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...common import attn_mask, dependent_launch, dropout, ring, smem_layouts
from ...common.cta_pair import cluster_sync_exit, cluster_sync_init, make_cta_pair, peer_of
from ...common.fwd.launch import Maps, Pages
from ...common.fwd.tiles import work_tile_words
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs, visited
from ...common.warps import GROUP, WARP, WARPS
from ..warps import ROWS
from . import ramp
from .context import Context, Layouts
from .load import load, load_values
from .mainloop import mainloop
from .rng import dropout_bits


@cute.kernel
def forward_kernel(
    maps: Maps,
    layouts: Layouts,
    out: cute.Tensor,
    lse: cute.Tensor,
    lse_low: cute.Tensor | None,
    tile_counter: cute.Tensor,
    cu_seqlens_q: cute.Tensor | None,
    sequences_k: cute.Tensor | Pages | None,
    mask_args: attn_mask.MaskArgs | ModArgs | None,
    rng_state: cute.Tensor | None,
    sinks: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = cute.arch.make_warp_uniform(thread // GROUP)

    mask, mods = None, None
    if cutlass.const_expr(any(plan.features.mods)):
        mods, mask = mask_args, visited(mask_args, plan.mask)
    elif cutlass.const_expr(mask_args is not None):
        mask = attn_mask.make_mask(mask_args, plan.mask)
    memory = SmemAllocator()
    peer = peer_of(plan.cluster_size)
    sO = None
    if cutlass.const_expr(not plan.config.o_over_q):
        rows = cute.make_layout((ROWS * plan.Dv, plan.warpgroups))
        sO = memory.allocate_tensor(plan.dtype, rows, byte_alignment=1024)
    sRamp = None
    if cutlass.const_expr(plan.ramp_by_mma):
        sRamp = ramp.allocate(memory, plan.keys)
        ramp.write_places(sRamp, thread)
    keep_bits, sKeepBits = None, None
    if cutlass.const_expr(plan.features.dropout):
        keep_bits = ring.allocate(memory, plan.config.kv_stages)
        lanes = (WARP, dropout.words(plan.keys), plan.consumer_warps, plan.config.kv_stages)
        sKeepBits = memory.allocate_tensor(Uint32, cute.make_layout(lanes), 16)
    ctx = Context(
        plan=plan,
        params=params,
        maps=maps,
        sQ=smem_layouts.allocate(memory, plan.dtype, layouts.q),
        sK=smem_layouts.allocate(memory, plan.dtype, layouts.k),
        sV=smem_layouts.allocate(memory, plan.dtype, layouts.v),
        sRamp=sRamp,
        sO=sO,
        output_layout=layouts.o,
        load_q=ring.allocate(memory, plan.config.q_stages),
        load_k=ring.allocate(memory, plan.config.kv_stages, peer),
        load_v=ring.allocate(memory, plan.config.kv_stages, peer),
        sequence_end=ring.allocate(memory, 1),
        work_tile=memory.allocate_array(Int32, work_tile_words(plan) * plan.config.q_stages),
        keep_bits=keep_bits,
        sKeepBits=sKeepBits,
        cta_pair=make_cta_pair(memory, peer),
        out=out,
        lse=lse,
        lse_low=lse_low,
        tile_counter=tile_counter,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=None if plan.paged else sequences_k,
        pages=sequences_k if plan.paged else None,
        mask=mask,
        mods=mods,
        rng_state=rng_state,
        sinks=sinks,
    )
    if warp == 0:
        ring.initialise(ctx.load_q, plan.q_readers)
        for edge in (ctx.load_k, ctx.load_v, ctx.sequence_end):
            ring.initialise(edge, plan.consumer_warps)
        if cutlass.const_expr(plan.features.dropout):
            ring.initialise(ctx.keep_bits, plan.consumer_warps, writers=plan.rng_warps)
        if cutlass.const_expr(plan.cluster_size > 1):
            ring.initialise(ctx.cta_pair.work_ring, 1)
        cute.arch.mbarrier_init_fence()
        for atom in (maps.load_q, maps.load_k, maps.load_v, maps.store_o):
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)
    if cutlass.const_expr(dependent_launch.is_possible_after_tables(plan.features)):
        dependent_launch.wait_for_previous_kernel()
    cluster_sync_init(plan.cluster_size)

    if group == 0:
        cute.arch.setmaxregister_decrease(plan.registers.producer)
        if warp == 0:
            load(ctx)
        elif cutlass.const_expr(plan.loads_v_apart):
            if warp == 1:
                load_values(ctx)
        elif cutlass.const_expr(plan.features.dropout and not plan.features.rng_warpgroup):
            dropout_bits(ctx, warp - 1)
    elif cutlass.const_expr(plan.features.rng_warpgroup):
        if group > plan.warpgroups:
            cute.arch.setmaxregister_decrease(plan.registers.rng_warp)
            dropout_bits(ctx, warp % WARPS)
        else:
            _mainloop(ctx, group - 1)
    else:
        _mainloop(ctx, group - 1)
    cluster_sync_exit(plan.cluster_size)


@cute.jit
def _mainloop(ctx: Context, warpgroup: Int32) -> None:
    cute.arch.setmaxregister_increase(ctx.plan.registers.consumer)
    mainloop(ctx, warpgroup)
