"""The forward kernel: shared memory, barriers, and who takes which role.

         tickets (global)
            |
Q, K, V -> load ==load_q==> mainloop (warpgroup 1, 2, ..) -> epilogue -> O, lse
                ==load_k==>
                ==load_v==>
           draw ==kept====>         and draw reads from load_q which tile it is
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...common import attn_mask, dropout, ring
from ...common.args import Rule
from ...common.forward_tile import MESSAGE
from ...common.pair import Pair, finish_together, make_pair, peer_of, start_together
from ...common.query_launch import Maps
from ...common.ring import Ring
from ...common.warps import GROUP, WARP, WARPS
from ..warps import ROWS
from .draw import draw
from .load import load
from .mainloop import consume
from .plan import Plan


class Layouts(NamedTuple):
    """Of shared memory."""

    q: Any
    k: Any
    v: Any
    o: Any


@dataclass(frozen=True)
class Kernel:
    """What every role may use."""

    plan: Plan
    rule: Rule
    maps: Maps
    sQ: cute.Tensor
    """(64, D, q_stages * warpgroups)"""
    sK: cute.Tensor
    """(keys, D, kv_stages)"""
    sV: cute.Tensor
    """(Dv, keys, kv_stages)"""
    sO: cute.Tensor | None
    """(64 * Dv, warpgroups): where they leave their rows of O, as `output_layout` says, if not over Q."""
    output_layout: cute.ComposedLayout
    """(16, Dv, warps of a warpgroup)"""
    load_q: Ring
    load_k: Ring
    load_v: Ring
    sequence_end: Ring
    """One stage: values that the loading warp waits for itself, as other sequences' follow them."""
    message: cute.Pointer
    """`MESSAGE` words for each stage of Q."""
    kept: Ring | None
    sKept: cute.Tensor | None
    """(32, words, consumer warps, kv_stages): see `dropout.take`."""
    pair: Pair | None
    """What the CTAs of a cluster share besides K and V."""
    out: cute.Tensor
    lse: cute.Tensor
    lse_low: cute.Tensor | None
    tickets: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    mask: attn_mask.Mask | None
    rng_state: cute.Tensor | None


@cute.kernel
def forward_kernel(
    maps: Maps,
    layouts: Layouts,
    out: cute.Tensor,
    lse: cute.Tensor,
    lse_low: cute.Tensor | None,
    tickets: cute.Tensor,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask_args: attn_mask.MaskArgs | None,
    rng_state: cute.Tensor | None,
    rule: Rule,
    plan: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = cute.arch.make_warp_uniform(thread // GROUP)

    mask = None
    if cutlass.const_expr(mask_args is not None):
        mask = attn_mask.make_mask(mask_args, plan.mask)
    memory = SmemAllocator()
    peer = peer_of(plan.ctas)
    sO = None
    if cutlass.const_expr(not plan.config.o_over_q):
        rows = cute.make_layout((ROWS * plan.Dv, plan.warpgroups))
        sO = memory.allocate_tensor(plan.dtype, rows, byte_alignment=1024)
    kept, sKept = None, None
    if cutlass.const_expr(plan.features.dropout):
        kept = _ring(memory, plan.config.kv_stages)
        lanes = (WARP, dropout.words(plan.keys), plan.consumer_warps, plan.config.kv_stages)
        sKept = memory.allocate_tensor(Uint32, cute.make_layout(lanes), 16)
    k = Kernel(
        plan=plan,
        rule=rule,
        maps=maps,
        sQ=_allocate(memory, plan, layouts.q),
        sK=_allocate(memory, plan, layouts.k),
        sV=_allocate(memory, plan, layouts.v),
        sO=sO,
        output_layout=layouts.o,
        load_q=_ring(memory, plan.config.q_stages),
        load_k=_ring(memory, plan.config.kv_stages, peer),
        load_v=_ring(memory, plan.config.kv_stages, peer),
        sequence_end=_ring(memory, 1),
        message=memory.allocate_array(Int32, MESSAGE * plan.config.q_stages),
        kept=kept,
        sKept=sKept,
        pair=make_pair(memory, peer),
        out=out,
        lse=lse,
        lse_low=lse_low,
        tickets=tickets,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        mask=mask,
        rng_state=rng_state,
    )
    if warp == 0:
        ring.initialise(k.load_q, plan.q_readers)
        for edge in (k.load_k, k.load_v, k.sequence_end):
            ring.initialise(edge, plan.consumer_warps)
        if cutlass.const_expr(plan.features.dropout):
            ring.initialise(k.kept, plan.consumer_warps, writers=plan.drawers)
        if cutlass.const_expr(plan.ctas > 1):
            ring.initialise(k.pair.handed, 1)
        cute.arch.mbarrier_init_fence()
        for atom in (maps.load_q, maps.load_k, maps.load_v, maps.store_o):
            cpasync.prefetch_descriptor(atom)
    start_together(plan.ctas)

    if group == 0:
        cute.arch.setmaxregister_decrease(plan.registers.producer)
        if warp == 0:
            load(k)
        elif cutlass.const_expr(plan.features.dropout and not plan.features.drawing_warpgroup):
            draw(k, warp - 1)
    elif cutlass.const_expr(plan.features.drawing_warpgroup):
        if group > plan.warpgroups:
            cute.arch.setmaxregister_decrease(plan.registers.drawer)
            draw(k, warp % WARPS)
        else:
            _consume(k, group - 1)
    else:
        _consume(k, group - 1)
    finish_together(plan.ctas)


@cute.jit
def _consume(k: Kernel, warpgroup: Int32) -> None:
    cute.arch.setmaxregister_increase(k.plan.registers.consumer)
    consume(k, warpgroup)


def _allocate(memory: SmemAllocator, plan: Plan, layout: cute.ComposedLayout) -> cute.Tensor:
    return memory.allocate_tensor(plan.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def _ring(memory: SmemAllocator, stages: int, peer: Int32 | None = None) -> Ring:
    return Ring(memory.allocate_array(Int64, stages), memory.allocate_array(Int64, stages), stages, peer)
