"""The forward kernel: shared memory, and the tile of a CTA.

Q, K, V -> load (cp.async) -> mainloop -> epilogue -> O, lse
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from ...common import attn_mask, dependent_launch, dropout, ring, smem_layouts
from ...common.fwd import tiles
from ...common.fwd.launch import Maps
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs, visited
from ...common.warps import WARP
from .context import Context, Layouts
from .epilogue import epilogue
from .mainloop import mainloop, make_thread


@cute.kernel
def forward_kernel(
    maps: Maps,
    layouts: Layouts,
    out: cute.Tensor,
    lse: cute.Tensor,
    lse_low: cute.Tensor | None,
    tile_counter: cute.Tensor,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask_args: attn_mask.MaskArgs | ModArgs | None,
    rng_state: cute.Tensor | None,
    sinks: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
) -> None:
    mask, mods = None, None
    if cutlass.const_expr(any(plan.features.mods)):
        mods, mask = mask_args, visited(mask_args, plan.mask)
    elif cutlass.const_expr(mask_args is not None):
        mask = attn_mask.make_mask(mask_args, plan.mask)
    memory = SmemAllocator()
    wider = layouts.q if plan.is_float32 or plan.D >= plan.Dv else layouts.o
    memory_of_q = smem_layouts.allocate(memory, plan.staged_dtype, wider)
    sQ, sO = (
        None
        if layout is None
        else cute.make_tensor(cute.recast_ptr(memory_of_q.iterator, layout.inner), layout.outer)
        for layout in (layouts.q, layouts.o)
    )
    sK = smem_layouts.allocate(memory, plan.staged_dtype, layouts.k)
    sV = smem_layouts.allocate(memory, plan.staged_dtype, layouts.v)
    sP, sExchange = None, None
    if cutlass.const_expr(plan.shares_rows):
        sP = smem_layouts.allocate(memory, plan.staged_dtype, layouts.weights)[None, None, 0]
        sExchange = memory.allocate_tensor(Float32, cute.make_layout((plan.rows, plan.column_warps)), 16)
    sKeepBits = None
    if cutlass.const_expr(plan.features.dropout):
        words = (WARP, dropout.words(plan.own_keys), plan.row_mmas, plan.warps)
        sKeepBits = memory.allocate_tensor(Uint32, cute.make_layout(words), 16)
    ctx = Context(
        plan=plan,
        params=params,
        maps=maps,
        warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()),
        lane=cute.arch.lane_idx(),
        sQ=sQ[None, None, 0],
        sO=sO,
        sK=sK,
        sV=sV,
        sP=sP,
        sExchange=sExchange,
        work_tile=memory.allocate_array(Int32, tiles.work_tile_words(plan)),
        sKeepBits=sKeepBits,
        out=out,
        lse=lse,
        lse_low=lse_low,
        tile_counter=tile_counter,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        mask=mask,
        mods=mods,
        rng_state=rng_state,
        sinks=sinks,
    )
    if cutlass.const_expr(dependent_launch.is_possible_after_tables(plan.features)):
        dependent_launch.wait_for_previous_kernel()
    number, _, _ = cute.arch.block_idx()
    tile = tiles.decode(ctx, tiles.shape(ctx), Uint32(number), ring.start())
    if tiles.first_query(ctx, tile) < tile.Sq:
        if (ctx.warp == 0) & (ctx.lane == 0):
            tiles.write(ctx, ring.start(), tile)
        t = make_thread(ctx)
        mainloop(ctx, t, tile)
        epilogue(_counted_anew(ctx), t, tiles.read_again(ctx, ring.start()))


def _counted_anew(ctx: Context) -> Context:
    """The context for the epilogue: with two MMAs of rows to a warp nothing that the prologue, too, finds
    from the lane takes registers in between.
    """
    if ctx.plan.row_mmas == 1 or ctx.plan.is_float32:
        return ctx
    lane = cute.arch.lane_idx()
    # The shuffle changes nothing, but ptxas does not know that.
    lane = cute.arch.shuffle_sync(lane, lane)
    return replace(ctx, lane=lane, warp=cute.arch.make_warp_uniform(cute.arch.warp_idx()))
