"""The forward kernel: SMEM, barriers, and the warps' roles; `plan` explains each edge.

         tile_counter (global)
            |
           load ==tile=====> everybody
Q, K, V -> load ==load_q===> mma ==s_p==> softmax ==scale==> correction ==s_p==> mma
                ==load_kv=>      <==s_p==         ==inverse=>
                                 <=late==         -> lse     -> epilogue -> O
                             mma ==o===========================> correction
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...common import attn_mask, dependent_launch, ring
from ...common.cta_pair import make_cta_pair, peer_of
from ...common.fwd.launch import Maps, Pages
from ...common.fwd.tiles import work_tile_words
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs, with_mask
from ...common.ring import Ring
from ...common.warps import WARPS
from .. import tmem
from .context import Context, Layouts
from .correction import correction
from .load import load
from .mma import mma
from .plan import CORRECTION_WARP, LOAD_WARP, MMA_WARP, ROWS, TILE_STAGES
from .softmax import softmax


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
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    sQ = memory.allocate_tensor(plan.dtype, layouts.q.outer, byte_alignment=1024, swizzle=layouts.q.inner)
    kv = cute.make_layout(plan.kv_elements * plan.config.kv_stages)
    sKV = memory.allocate_tensor(plan.dtype, kv, byte_alignment=1024)
    rows = cute.make_layout((ROWS * plan.Dv, plan.q_tiles))
    if cutlass.const_expr(plan.config.o_over_q):
        over = cute.make_layout((ROWS * plan.Dv, plan.q_tiles), stride=(1, ROWS * plan.D))
        sO = cute.make_tensor(cute.recast_ptr(sQ.iterator, cute.make_swizzle(0, 4, 3)), over)
    else:
        sO = memory.allocate_tensor(plan.dtype, rows, byte_alignment=1024)
    numbers = cute.make_layout((ROWS, plan.q_tiles))
    sRunning = None
    if cutlass.const_expr(plan.features.running == "add"):
        sRunning = memory.allocate_tensor(Float32, numbers, byte_alignment=16)
    ctx = Context(
        plan=plan,
        params=params,
        maps=maps,
        layouts=layouts,
        sQ=sQ,
        sKV=sKV.iterator,
        sO=sO,
        sScale=memory.allocate_tensor(Float32, numbers, byte_alignment=16),
        sInverse=memory.allocate_tensor(Float32, numbers, byte_alignment=16),
        sRunning=sRunning,
        work_tile=memory.allocate_array(Int32, work_tile_words(plan) * TILE_STAGES),
        tmem_holder=memory.allocate_array(Int32),
        tile=ring.allocate(memory, TILE_STAGES),
        load_q=ring.allocate(memory, plan.q_tiles),
        load_kv=ring.allocate(memory, plan.config.kv_stages),
        sequence_end=ring.allocate(memory, 1),
        s_p=ring.allocate(memory, plan.q_tiles),
        late=ring.allocate(memory, plan.q_tiles),
        o=ring.allocate(memory, plan.q_tiles),
        inverse=ring.allocate(memory, plan.q_tiles),
        cta_pair=make_cta_pair(memory, peer_of(plan.cluster_size)),
        out=out,
        lse=lse,
        lse_low=lse_low,
        tile_counter=tile_counter,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=None if plan.paged else sequences_k,
        pages=sequences_k if plan.paged else None,
        mask=None,
        mods=None,
        rng_state=rng_state,
        sinks=sinks,
    )
    if warp == LOAD_WARP:
        _initialise(ctx)
        cute.arch.mbarrier_init_fence()
        for atom in (maps.load_q, maps.load_k, maps.load_v, maps.store_o):
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)
    if warp == MMA_WARP:
        tmem.allocate(ctx.tmem_holder, plan.cluster_size)
    if cutlass.const_expr(dependent_launch.is_possible_after_tables(plan.features)):
        dependent_launch.wait_for_previous_kernel()
    tmem.fence_before()
    _meet(plan.cluster_size)
    tmem.fence_after()

    if warp >= MMA_WARP:
        cute.arch.setmaxregister_decrease(plan.registers.other)
        if warp == MMA_WARP:
            if _issues(ctx) == 1:
                mma(with_mask(ctx, mask_args))
        elif warp == LOAD_WARP:
            load(with_mask(ctx, mask_args))
    elif warp >= CORRECTION_WARP:
        cute.arch.setmaxregister_decrease(plan.registers.correction)
        correction(with_mask(ctx, mask_args))
    elif warp < plan.q_tiles * WARPS:
        cute.arch.setmaxregister_increase(plan.registers.softmax)
        softmax(with_mask(ctx, mask_args), warp // WARPS if plan.q_tiles == 2 else Int32(0))
    else:
        cute.arch.setmaxregister_decrease(plan.registers.idle)

    tmem.fence_before()
    _meet(plan.cluster_size)
    tmem.fence_after()
    if warp == MMA_WARP:
        tmem.free(plan.cluster_size)


@cute.jit
def _initialise(ctx: Context) -> None:
    plan = ctx.plan
    # The grid has one row, which ptxas does not know: else it would keep the addresses for all roles from
    # here on, and spill them (ptxas.md, P16).
    _, zero, _ = cute.arch.block_idx()

    def initialise(edge: Ring, readers: Int32 | int, writers: int = 1) -> None:
        ring.initialise(edge._replace(full=edge.full + zero, empty=edge.empty + zero), readers, writers)

    initialise(ctx.tile, plan.tile_readers + _issues(ctx))
    initialise(ctx.load_q, WARPS if plan.config.o_over_q else 1)
    for edge in (ctx.load_kv, ctx.sequence_end, ctx.o):
        initialise(edge, 1)
    initialise(ctx.s_p, 2 * WARPS * plan.cluster_size)
    initialise(ctx.late, 1, WARPS * plan.cluster_size)
    initialise(ctx.inverse, WARPS, WARPS)
    if cutlass.const_expr(plan.cluster_size > 1):
        initialise(ctx.cta_pair.work_ring, 1)


@cute.jit
def _meet(cluster_size: cutlass.Constexpr) -> None:
    """Synchronise all threads, in a CTA pair those of both CTAs.

    Neither CTA may use what the other does not have yet, or no longer has.
    """
    if cutlass.const_expr(cluster_size == 1):
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def _issues(ctx: Context) -> Int32 | int:
    """1 in a CTA that issues MMAs, else 0: one warp, in CTA 0, issues those of a CTA pair."""
    return 1 if ctx.plan.cluster_size == 1 else Int32(1) - ctx.cta_pair.rank
