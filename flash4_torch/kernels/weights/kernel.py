"""The weights kernel: shared memory, barriers, and which warp takes which role.

Q, K -> load ==load_qk==> mainloop (warps 0 to 7) -> weights
Q, K -> mainloop -> weights, without TMA
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...configs.weights import KEYS, QUERIES, WARP_TILE
from ..common import attn_mask, dependent_launch, dropout, ring, smem_layouts, warp_mma
from ..common.band import make_band
from ..common.launch_params import LaunchParams
from ..common.warps import WARP
from .context import Context, Maps, Tile
from .load import load
from .mainloop import mainloop
from .plan import CONSUMER_REGISTERS, PRODUCER_REGISTERS


@cute.kernel
def weights_kernel(
    maps: Maps,
    layouts: tuple,
    weights: cute.Tensor,
    lse: cute.Tensor,
    lse_low: cute.Tensor | None,
    mask_args: attn_mask.MaskArgs | None,
    rng_state: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
) -> None:
    dependent_launch.wait_for_previous_kernel()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    mask = None
    if cutlass.const_expr(mask_args is not None):
        mask = attn_mask.make_mask(mask_args, plan.mask)
    memory = SmemAllocator()
    sKeepBits = None
    if cutlass.const_expr(plan.features.dropout):
        words = (WARP, dropout.words(WARP_TILE[1]), WARP_TILE[0] // warp_mma.ROWS, plan.consumer_warps)
        sKeepBits = memory.allocate_tensor(Uint32, cute.make_layout(words), 16)
    ctx = Context(
        plan=plan,
        params=params,
        maps=maps,
        tile=_tile(maps, params, plan),
        sQ=smem_layouts.allocate(memory, plan.staged_dtype, layouts[0]),
        sK=smem_layouts.allocate(memory, plan.staged_dtype, layouts[1]),
        load_qk=ring.allocate(memory, plan.stages) if plan.tma else None,
        sKeepBits=sKeepBits,
        weights=weights,
        lse=lse,
        lse_low=lse_low,
        mask=mask,
        rng_state=rng_state,
    )
    if cutlass.const_expr(plan.tma):
        if warp == 0:
            ring.initialise(ctx.load_qk, plan.consumer_warps)
            cute.arch.mbarrier_init_fence()
            for atom in (maps.load_q, maps.load_k):
                cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        if warp >= plan.consumer_warps:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if ctx.tile.visible & (warp == plan.consumer_warps):
                load(ctx)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            _consume(ctx, warp)
    else:
        _consume(ctx, warp)


@cute.jit
def _consume(ctx: Context, warp: Int32) -> None:
    """Store the tile's weights."""
    if ctx.tile.visible:
        mainloop(ctx, warp)
    else:
        clear(ctx, warp)


@cute.jit
def _tile(maps: Maps, params: LaunchParams, plan: cutlass.Constexpr) -> Tile:
    """The CTA's tile: key blocks follow one another, then query blocks, batch entries, and heads."""
    key_block, query_block, rest = cute.arch.block_idx()
    Sq, _, Hq, _ = maps.mQ.shape
    Sk = maps.mK.shape[0]
    batch, first_head, end_head = rest, Int32(0), Int32(Hq)
    if cutlass.const_expr(not plan.average):
        batch, first_head = rest // Hq, rest % Hq
        end_head = first_head + 1
    band = make_band(Int32(Sq), Int32(Sk), params.left, params.right)
    first, last = query_block * QUERIES, cutlass.min((query_block + 1) * QUERIES, Sq) - 1
    visible = Boolean(True)
    if cutlass.const_expr(plan.features.right):
        visible = visible & (key_block * KEYS <= last + band.highest)
    if cutlass.const_expr(plan.features.left):
        visible = visible & ((key_block + 1) * KEYS > first + band.lowest)
    return Tile(query_block, key_block, batch, first_head, end_head, band, visible)


@cute.jit
def clear(ctx: Context, warp: Int32) -> None:
    """Store zeros for a tile that the band hides, a row of the tile at a time for each warp."""
    plan, tile = ctx.plan, ctx.tile
    if cutlass.const_expr(plan.average):
        target = ctx.weights[tile.batch, None, None]
    else:
        target = ctx.weights[tile.batch, tile.first_head, None, None]
    Sq, Sk = target.shape
    first, last = tile.query_block * QUERIES, cutlass.min((tile.query_block + 1) * QUERIES, Sq)
    start, end = tile.key_block * KEYS, cutlass.min((tile.key_block + 1) * KEYS, Sk)
    zero, step = plan.dtype(0.0), plan.consumer_warps
    for row in cutlass.range(first + warp, last, step, unroll=1):
        for key in cutlass.range(start + cute.arch.lane_idx(), end, WARP, unroll=1):
            target[row, key] = zero
