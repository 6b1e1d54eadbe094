"""The backward kernel: SMEM, barriers, and the warps' roles.

                tile_counter (global)
                   |
K, V            -> load ==load_k====> mma --mma_s, mma_dp--------> compute --> epilogue -> dK, dV
                        ==load_v====>     <-compute_p, compute_ds-         <--mma_dv, mma_dk
Q, lse, delta,          ==load_q====>     --mma_dq-----> reduce -> dQ, summed up in global memory
dO                      ==load_do===>     <-reduce_dq---

Double lines are rings of stages. The others are single barriers that complete a phase once a block, or once a
tile, so that everybody knows their phase from counting blocks. Where nothing signals that a place is free
again, an edge further on implies it:

    load_k, load_v   by the compute warps that have stored dK, dV through them; the work tile by all readers
    load_q           by the MMAs of dK, which wait for dS and thereby for whoever reads lse and delta
    load_do          by the MMAs of dV and dP
    S                by P, which its readers write: S of the next block is issued after dV of this one
    P                by S of the next block
    dP, dS, dQ       dS by the MMAs of dK and dQ; dQ by `reduce_dq`, before what lies there next is issued
    dS in SMEM       by `mma_dq`; where dQ lies over dP, by the next `mma_dp`, which is issued after it
    dV, dK           by `epilogue_dv`, `epilogue_dk`, before the first block of the next tile

In a CTA pair, K, V, Q and dO arrive at the barriers of CTA 0, and so do compute, reduce and epilogue; MMAs
arrive in both CTAs. The work tile, lse and delta are each CTA's own, and so are the edges that signal empty:
a stage that the peer fills anew has been read by an MMA of both. What is written into the peer as its dS is
free when dS here is: the MMAs of dQ read both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...common import attn_mask, dependent_launch, ring, smem_layouts
from ...common.bwd.tiles import WORK_TILE_WORDS
from ...common.cta_pair import CtaPair, cluster_sync_exit, cluster_sync_init, make_cta_pair, peer_of
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs, with_mask
from ...common.ring import Ring
from ...common.warps import WARP, WARPS
from .. import tmem
from .compute import compute
from .context import Context, HalfBlocks, Layouts, Maps, Signals
from .load import load
from .load_2cta import load_2cta
from .mma import mma
from .mma_2cta import mma_2cta
from .plan import COMPUTE_WARPS, LOAD_WARP, MMA_WARP, PIECE, REDUCE_WARPS, Plan
from .reduce import reduce


@cute.kernel
def backward_kernel(
    maps: Maps,
    layouts: Layouts,
    stats: cute.Tensor,
    dq_acc: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    tile_counter: cute.Tensor,
    dq_semaphore: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask_args: attn_mask.MaskArgs | ModArgs | None,
    dmask: cute.Tensor | None,
    rng_state: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
) -> None:
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    config = plan.config
    memory = SmemAllocator()
    peer = peer_of(plan.cluster_size)
    sK, sV, sdS = (
        smem_layouts.allocate(memory, plan.dtype, layout) for layout in (layouts.k, layouts.v, layouts.ds)
    )
    sQ, sdO, sKt, sP, sOwndS, half_blocks = None, None, None, None, None, None
    if cutlass.const_expr(plan.cluster_size == 1):
        sQ, sdO = (smem_layouts.allocate(memory, plan.dtype, layout) for layout in (layouts.q, layouts.do))
    else:
        sKt = smem_layouts.allocate(memory, plan.dtype, layouts.k_columns)
        stages = cute.make_layout(
            (plan.queries // plan.cluster_size * max(plan.D, plan.Dv), config.half_block_stages)
        )
        half_blocks = memory.allocate_tensor(plan.dtype, stages, byte_alignment=1024)
    if cutlass.const_expr(plan.wide):
        sP, sOwndS = (smem_layouts.allocate(memory, plan.dtype, layouts.weights) for _ in range(2))
    piece = cute.make_layout((WARP * min(plan.D, PIECE), config.dq_slots, REDUCE_WARPS))
    sdQ = memory.allocate_tensor(Float32, piece, byte_alignment=1024)
    rows = cute.make_layout((plan.queries, config.q_stages))
    sLseLog2, sDelta = (memory.allocate_tensor(Float32, rows, 16) for _ in range(2))
    load_q, load_do = ring.allocate(memory, config.q_stages), ring.allocate(memory, config.do_stages)
    load_k, load_v = ring.allocate(memory, config.kv_stages), ring.allocate(memory, config.kv_stages)
    sequence_end = ring.allocate(memory, 1)
    if cutlass.const_expr(plan.cluster_size > 1):
        half_blocks = HalfBlocks(
            ring.allocate(memory, config.half_block_stages),
            half_blocks,
            *(layouts.q, layouts.do, layouts.q_columns, layouts.do_columns),
        )
    cta_pair = make_cta_pair(memory, peer)
    signals = Signals(*(memory.allocate_array(Int64) for _ in Signals._fields))
    work_tile = memory.allocate_array(Int32, WORK_TILE_WORDS * config.kv_stages)
    holder = memory.allocate_array(Int32, 1)

    if warp == 0:
        zero = Int32(0)
        if cutlass.const_expr(plan.scarce):
            # The grid has one row, which ptxas does not know: else it would keep the addresses for all roles
            # from here on, and spill them (ptxas.md, P16).
            _, zero, _ = cute.arch.block_idx()
        _initialise_ring(load_q, zero, 1)
        _initialise_ring(load_do, zero, 1)
        _initialise_ring(load_k, zero, COMPUTE_WARPS + REDUCE_WARPS + _mma_reads(plan, cta_pair))
        _initialise_ring(load_v, zero, WARPS, plan.loaders)
        _initialise_ring(sequence_end, zero, 1)
        _initialise(signals, plan, zero)
        if cutlass.const_expr(plan.cluster_size > 1):
            _initialise_ring(half_blocks.ring, zero, 1, plan.loaders)
            _initialise_ring(cta_pair.work_ring, zero, 1)
        cute.arch.mbarrier_init_fence()
        for atom in (*maps[:12:2], *(atom for atom in maps[12:] if atom is not None)):
            cpasync.prefetch_descriptor(atom)
    if warp == MMA_WARP:
        tmem.allocate(holder, plan.cluster_size)
    dependent_launch.wait_for_previous_kernel()
    cute.arch.sync_threads()
    cluster_sync_init(plan.cluster_size)
    tmem.fence_after()

    ctx = Context(
        plan=plan,
        params=params,
        maps=maps,
        sQ=sQ,
        sdO=sdO,
        sK=sK,
        sV=sV,
        sdS=sdS[None, None, 0],
        sP=None if sP is None else sP[None, None, 0],
        sOwndS=None if sOwndS is None else sOwndS[None, None, 0],
        sKt=None if sKt is None else sKt[None, None, 0],
        half_blocks=half_blocks,
        sLseLog2=sLseLog2,
        sDelta=sDelta,
        load_q=load_q,
        load_do=load_do,
        load_k=load_k,
        load_v=load_v,
        sequence_end=sequence_end,
        signals=signals,
        cta_pair=cta_pair,
        work_tile=work_tile,
        sdQ=sdQ,
        stats=stats,
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
    if warp < REDUCE_WARPS:
        cute.arch.setmaxregister_decrease(plan.registers.reduce)
        reduce(with_mask(ctx, mask_args), warp)
    elif warp < REDUCE_WARPS + COMPUTE_WARPS:
        cute.arch.setmaxregister_increase(plan.registers.compute)
        compute(with_mask(ctx, mask_args), warp - REDUCE_WARPS)
    else:
        cute.arch.setmaxregister_decrease(plan.registers.other)
        if warp == MMA_WARP:
            if cutlass.const_expr(plan.cluster_size == 1):
                mma(with_mask(ctx, mask_args))
            else:
                mma_2cta(with_mask(ctx, mask_args))
        elif warp == LOAD_WARP:
            if cutlass.const_expr(plan.cluster_size == 1):
                load(with_mask(ctx, mask_args))
            else:
                load_2cta(with_mask(ctx, mask_args))

    tmem.fence_before()
    cute.arch.sync_threads()
    cluster_sync_exit(plan.cluster_size)
    tmem.fence_after()
    if warp == MMA_WARP:
        tmem.free(plan.cluster_size)


def _mma_reads(plan: Plan, cta_pair: CtaPair | None) -> Int32 | int:
    """1 in a CTA whose MMA warp reads tiles, else 0: one warp, in CTA 0, issues the MMAs of a CTA pair."""
    return 1 if plan.cluster_size == 1 else Int32(1) - cta_pair.rank


def _initialise_ring(edge: Ring, zero: Int32, readers: Int32 | int, writers: int = 1) -> None:
    ring.initialise(edge._replace(full=edge.full + zero, empty=edge.empty + zero), readers, writers)


def _initialise(signals: Signals, plan: Plan, zero: Int32) -> None:
    """Initialise the signals; those that MMAs wait for count the warps of both CTAs, in CTA 0."""
    compute, reduce, storing = (plan.cluster_size * n for n in (COMPUTE_WARPS, REDUCE_WARPS, WARPS))
    arrivals = Signals(1, compute, 1, compute, 1, reduce, 1, 1, storing, storing, plan.key_loads)
    with cute.arch.elect_one():
        for signal, count in zip(signals, arrivals, strict=True):
            cute.arch.mbarrier_init(signal + zero, count)
