"""The backward's main kernel: shared memory, and the tile of a CTA.

K, V, then Q, dO block after block -> load (cp.async) -> mainloop -> epilogue -> dK, dV
                                                           `-> dq_sums -> dQ's sums
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from ...common import attn_mask, dependent_launch, smem_layouts, tile_scheduler
from ...common.bwd import tiles
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs, visited
from ...common.warps import WARP
from . import empty, mask_tile
from .context import Context, Layouts, Maps
from .epilogue import epilogue
from .mainloop import mainloop, make_thread


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
    mask, mods = None, None
    if cutlass.const_expr(any(plan.features.mods)):
        mods, mask = mask_args, visited(mask_args, plan.mask)
    elif cutlass.const_expr(mask_args is not None):
        mask = attn_mask.make_mask(mask_args, plan.mask)
    memory = SmemAllocator()
    sQ, sdO, sK, sV, sdS = (smem_layouts.allocate(memory, plan.staged_dtype, layout) for layout in layouts)
    sP, sKeepBits = None, None
    if cutlass.const_expr(plan.shares_weights):
        sP = smem_layouts.allocate(memory, plan.staged_dtype, layouts.weights)[None, None, 0]
    sMask = mask_tile.allocate(memory, plan)
    sStats = memory.allocate_tensor(
        Float32, cute.make_layout((plan.queries, plan.features.row_stats, plan.stages)), 16
    )
    if cutlass.const_expr(plan.features.dropout and not plan.generates_by_parts):
        words = (WARP, plan.keep_words, plan.warps)
        sKeepBits = memory.allocate_tensor(Uint32, cute.make_layout(words), 16)
    ctx = Context(
        empty=empty.allocate(memory, plan),
        plan=plan,
        params=params,
        maps=maps,
        warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()),
        lane=cute.arch.lane_idx(),
        sQ=sQ,
        sdO=sdO,
        sK=sK[None, None, 0],
        sV=sV[None, None, 0],
        sdS=sdS[None, None, 0],
        sP=sP,
        sStats=sStats,
        # Where dS will be: each warp has read it before the barrier that the first dS comes after.
        work_idx=cute.recast_ptr(sdS.iterator, cute.make_swizzle(0, 4, 3), dtype=Int32),
        sMask=sMask,
        sKeepBits=sKeepBits,
        stats=stats,
        dq_acc=dq_acc,
        dk=dk,
        dv=dv,
        tile_counter=tile_counter,
        dq_semaphore=dq_semaphore,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        mask=mask,
        mods=mods,
        dmask=dmask,
        rng_state=rng_state,
    )
    dependent_launch.wait_for_previous_kernel()
    shape = tiles.shape(ctx)
    tile = tiles.decode(ctx, shape, _own_work(ctx, shape.num_work))
    if tile.index * plan.keys < tile.Sk:
        t = make_thread(ctx)
        mainloop(ctx, t, tile)
        epilogue(ctx, t, tile)


@cute.jit
def _own_work(ctx: Context, num_work: Uint32) -> Uint32:
    """The work index of the CTA.

    Where tiles wait for others, it is drawn from a counter: a tile waits only for tiles of CTAs that run.
    """
    work_idx, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(ctx.plan.features.deterministic):
        if ctx.warp == 0:
            drawn = tile_scheduler.prefetch_work(ctx, num_work)
            if ctx.lane == 0:
                cute.arch.store(ctx.work_idx, Int32(drawn))
        cute.arch.sync_threads()
        work_idx = cute.arch.make_warp_uniform(cute.arch.load(ctx.work_idx, Int32))
    return Uint32(work_idx)
