"""The backward kernel: shared memory, barriers, and who takes which role.

                tickets (global)
                   |
K, V            -> load ==load_k===> mainloop (warpgroup 1, 2, ..) -> epilogue -> dK, dV
Q, dO, lse, delta       ==load_v===>    |  ^
                        ==load_q===>    |  share_ds: dS of all warpgroups' keys
                        ==load_do==>    v
                                     store_dq -> dQ, summed up in global memory; `gradients_aside`: dK, dV
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...common import attn_mask, dropout, ring
from ...common.args import Rule
from ...common.key_tiles import MESSAGE
from ...common.pair import Pair, finish_together, make_pair, peer_of, start_together
from ...common.ring import Ring
from ...common.warps import GROUP, WARP, WARPS
from .draw import draw
from .load import load
from .mainloop import consume
from .plan import Plan
from .store_dq import WORDS, store
from .wide import make_ds, make_weights


class Maps(NamedTuple):
    """Copy atoms of the copy engine, and the tensors that they copy from or to, all (S, D, H, B)."""

    load_q: Any
    mQ: Any
    load_do: Any
    mdO: Any
    load_k: Any
    mK: Any
    load_v: Any
    mV: Any
    store_dk: Any
    mdK: Any
    store_dv: Any
    mdV: Any
    store_dq: Any
    mdQ: Any
    load_other_k: Any
    """Half of the columns of the other CTA's K."""


class Layouts(NamedTuple):
    """Of shared memory."""

    q: Any
    do: Any
    k: Any
    v: Any
    ds: Any
    other_k: Any


class Turned(NamedTuple):
    """Layouts of the same memory with the columns first."""

    q: Any
    do: Any
    k: Any
    other_k: Any


@dataclass(frozen=True)
class Kernel:
    """What every role may use."""

    plan: Plan
    rule: Rule
    maps: Maps
    sQ: cute.Tensor
    """(queries, D, q_stages)"""
    sQt: cute.Tensor
    """(D, queries, q_stages)"""
    sdO: cute.Tensor
    """(queries, Dv, do_stages)"""
    sdOt: cute.Tensor
    sK: cute.Tensor
    """(keys, D, kv_stages)"""
    sKt: cute.Tensor
    sV: cute.Tensor
    """(keys, Dv, kv_stages)"""
    sdS: cute.Tensor
    """(queries, keys, ds_stages), contiguous along the queries."""
    sOtherdS: cute.Tensor | None
    """The same of the other CTA's keys."""
    sSlopes: cute.Tensor | None
    """The same of softcap's derivatives."""
    sOtherK: cute.Tensor | None
    """(keys, D / 2, kv_stages) of the other CTA's keys: the columns that this one makes dQ of."""
    sOtherKt: cute.Tensor | None
    sLse: cute.Tensor
    """(queries, q_stages), in base 2; infinite where a row sees nothing."""
    sNaturalLse: cute.Tensor | None
    """The same in natural units, for blocks that a floating mask changes."""
    sLseLow: cute.Tensor | None
    """What rounding has taken from `sNaturalLse`, in base 2."""
    sDelta: cute.Tensor
    """(queries, do_stages)"""
    load_q: Ring
    load_do: Ring
    load_k: Ring
    load_v: Ring
    share_ds: Ring
    """Of its barriers only those that say empty are used where a named barrier says full."""
    weights: Ring | None
    """P, in the place of dS: only its barriers that say full are used."""
    exchange: Ring | None
    """The other CTA's dS: only its barriers that say full are used."""
    pair: Pair | None
    """What the CTAs of a cluster share besides."""
    sequence_end: Ring
    """One stage: rows that the loading warp waits for itself, as other sequences' follow them."""
    message: cute.Pointer
    """`MESSAGE` words for each stage of K."""
    sdQ: cute.Tensor
    """(floats of a piece, dq_slots), in the order of `dq_blocks`."""
    errands: cute.Pointer
    """`WORDS` of 64 bits for each slot of dQ: see `store_dq`."""
    kept: Ring | None
    sKept: cute.Tensor | None
    """(32, words, strips of 16 keys, q_stages): see `dropout.take`."""
    stats: cute.Tensor
    dq_acc: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    tickets: cute.Tensor
    turns: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    mask: attn_mask.Mask | None
    """Transposed: its rows are keys."""
    dmask: cute.Tensor | None
    rng_state: cute.Tensor | None
    finishes: bool = False
    """For a tile that rounds dQ, which has code of its own."""


@cute.kernel
def backward_kernel(
    maps: Maps,
    layouts: Layouts,
    turned: Turned,
    stats: cute.Tensor,
    dq_acc: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    tickets: cute.Tensor,
    turns: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask_args: attn_mask.MaskArgs | None,
    dmask: cute.Tensor | None,
    rng_state: cute.Tensor | None,
    rule: Rule,
    plan: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = cute.arch.make_warp_uniform(thread // GROUP)

    config = plan.config
    memory = SmemAllocator()
    peer = peer_of(plan.ctas)
    sQ, sdO, sK, sV, sdS = (_allocate(memory, plan, layout) for layout in layouts[:5])
    piece = cute.make_layout((plan.blocks.registers * GROUP, plan.dq_slots))
    sdQ = memory.allocate_tensor(Float32, piece, byte_alignment=1024)
    sSlopes, sOtherdS, sOtherK, sOtherKt = None, None, None, None
    if cutlass.const_expr(plan.hands_slopes_over):
        sSlopes = _allocate(memory, plan, layouts.ds)
    if cutlass.const_expr(plan.ctas > 1):
        sOtherdS, sOtherK = (_allocate(memory, plan, layout) for layout in (layouts.ds, layouts.other_k))
        sOtherKt = _turned(sOtherK, turned.other_k)
    # What is aligned to 1024 bytes comes before: nothing is lost between.
    weights = _ring(memory, config.ds_stages) if config.split else None
    exchange = _ring(memory, config.ds_stages) if plan.ctas > 1 else None
    kept, sKept = None, None
    if cutlass.const_expr(plan.features.dropout):
        kept = _ring(memory, config.q_stages)
        lanes = (WARP, dropout.words(plan.queries), plan.strips, config.q_stages)
        sKept = memory.allocate_tensor(Uint32, cute.make_layout(lanes), 16)
    rows_of_q, sNaturalLse, sLseLow = cute.make_layout((plan.queries, config.q_stages)), None, None
    if cutlass.const_expr(plan.features.float_mask):
        sNaturalLse, sLseLow = (memory.allocate_tensor(Float32, rows_of_q, 16) for _ in range(2))
    k = Kernel(
        plan=plan,
        rule=rule,
        maps=maps,
        sQ=sQ,
        sQt=_turned(sQ, turned.q),
        sdO=sdO,
        sdOt=_turned(sdO, turned.do),
        sK=sK,
        sKt=_turned(sK, turned.k),
        sV=sV,
        sdS=sdS,
        sOtherdS=sOtherdS,
        sSlopes=sSlopes,
        sOtherK=sOtherK,
        sOtherKt=sOtherKt,
        sLse=memory.allocate_tensor(Float32, rows_of_q, 16),
        sNaturalLse=sNaturalLse,
        sLseLow=sLseLow,
        sDelta=memory.allocate_tensor(Float32, cute.make_layout((plan.queries, config.do_stages)), 16),
        load_q=_ring(memory, config.q_stages, peer),
        load_do=_ring(memory, config.do_stages, peer),
        load_k=_ring(memory, config.kv_stages),
        load_v=_ring(memory, config.kv_stages),
        share_ds=_ring(memory, config.ds_stages, peer),
        weights=weights,
        exchange=exchange,
        pair=make_pair(memory, peer),
        sequence_end=_ring(memory, 1),
        message=memory.allocate_array(Int32, MESSAGE * config.kv_stages),
        sdQ=sdQ,
        errands=memory.allocate_array(Int64, WORDS * plan.dq_slots),
        kept=kept,
        sKept=sKept,
        stats=stats,
        dq_acc=dq_acc,
        dk=dk,
        dv=dv,
        tickets=tickets,
        turns=turns,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        mask=None,
        dmask=dmask,
        rng_state=rng_state,
    )
    if warp == 0:
        for edge in (k.load_q, k.load_do, k.load_k, k.load_v, k.sequence_end):
            readers = plan.consumer_warps + plan.drawers * (edge is k.load_k)
            ring.initialise(edge, readers)
        ring.initialise(k.share_ds, plan.consumer_warps, writers=WARPS)
        for edge in (k.weights, k.exchange):
            if cutlass.const_expr(edge is not None):
                ring.initialise(edge, 1, writers=WARPS)
        if cutlass.const_expr(plan.ctas > 1):
            ring.initialise(k.pair.handed, 1)
        if cutlass.const_expr(plan.features.dropout):
            ring.initialise(k.kept, plan.consumer_warps, writers=plan.drawers)
        cute.arch.mbarrier_init_fence()
        for atom in maps[:14:2]:
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)
    start_together(plan.ctas)

    if group == 0:
        cute.arch.setmaxregister_decrease(plan.registers.producer)
        if warp == 0:
            load(_masked(k, mask_args))
        elif warp <= plan.storers:
            store(k, warp - 1)
        elif cutlass.const_expr(plan.features.dropout):
            draw(_masked(k, mask_args), warp - 1 - plan.storers)
    else:
        cute.arch.setmaxregister_increase(plan.registers.consumer)
        if cutlass.const_expr(config.split):
            if group == 1:
                make_weights(_masked(k, mask_args))
            else:
                make_ds(_masked(k, mask_args))
        else:
            consume(_masked(k, mask_args), group - 1)
    finish_together(plan.ctas)


def _masked(k: Kernel, args: attn_mask.MaskArgs | None) -> Kernel:
    """For one role: what all would share, they would keep in registers from the beginning on, or spill."""
    return k if args is None else replace(k, mask=attn_mask.make_mask(args, k.plan.mask))


def _allocate(memory: SmemAllocator, plan: Plan, layout: cute.ComposedLayout) -> cute.Tensor:
    return memory.allocate_tensor(plan.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def _turned(x: cute.Tensor, layout: cute.ComposedLayout) -> cute.Tensor:
    return cute.make_tensor(x.iterator, layout.outer)


def _ring(memory: SmemAllocator, stages: int, peer: Int32 | None = None) -> Ring:
    return Ring(memory.allocate_array(Int64, stages), memory.allocate_array(Int64, stages), stages, peer)
