"""Context of the roles: SMEM, rings, and the launch's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute

from ...common import attn_mask
from ...common.cta_pair import CtaPair
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from ...common.ring import Ring
from .plan import Plan


class Maps(NamedTuple):
    """TMA copy atoms, and the tensors that they copy from or to, all (S, D, H, B)."""

    load_q: Any
    """CTA pair: half of a block's rows."""
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
    load_q_columns: Any
    """CTA pair: half of a block's columns, likewise below."""
    load_do_columns: Any
    load_k_columns: Any
    """CTA pair: half of the columns of both tiles' keys."""
    end_q: Any
    """Packed sequences in CTA pairs: the same loads, which arrive in the CTA that issues them."""
    end_do: Any
    end_k: Any
    end_v: Any
    end_q_columns: Any
    end_do_columns: Any
    end_k_columns: Any


class Layouts(NamedTuple):
    """SMEM layouts."""

    q: Any
    do: Any
    k: Any
    v: Any
    ds: Any
    q_columns: Any
    do_columns: Any
    k_columns: Any
    weights: Any


class Signals(NamedTuple):
    """Barriers that complete a phase once a block, or, the last five, once a tile; with who arrives."""

    mma_s: cute.Pointer
    """The MMAs."""
    compute_p: cute.Pointer
    """Every compute warp: it has read S and written P."""
    mma_dp: cute.Pointer
    compute_ds: cute.Pointer
    """Every compute warp: it has read dP, lse and delta, and written dS twice."""
    mma_dq: cute.Pointer
    reduce_dq: cute.Pointer
    """Every reduce warp: it has read dQ."""
    mma_dv: cute.Pointer
    """The MMAs of dV, and all others that read V."""
    mma_dk: cute.Pointer
    """All MMAs of the tile."""
    epilogue_dv: cute.Pointer
    """The four warps that have read dV."""
    epilogue_dk: cute.Pointer
    load_2cta: cute.Pointer
    """CTA pair, in CTA 0: both K, and half of the columns of both; `Plan.key_loads` arrivals."""


class HalfBlocks(NamedTuple):
    """CTA pair: half blocks of Q and dO, each for one MMA, in one ring, in the order of the MMAs."""

    ring: Ring
    """Full in CTA 0 only, for the half blocks of both CTAs."""
    stages: cute.Tensor
    """(elements, stages)"""
    q: Any
    """Layouts of a stage."""
    do: Any
    q_columns: Any
    do_columns: Any


@dataclass(frozen=True)
class Context:
    """What every role may use."""

    plan: Plan
    params: LaunchParams
    maps: Maps
    sQ: cute.Tensor | None
    """(queries, D, q_stages)"""
    sdO: cute.Tensor | None
    """(queries, Dv, do_stages)"""
    half_blocks: HalfBlocks | None
    """CTA pair: in the place of `sQ` and `sdO`."""
    sK: cute.Tensor
    """(keys, D, kv_stages)"""
    sV: cute.Tensor
    """(keys, Dv, kv_stages)"""
    sdS: cute.Tensor
    """(keys, queries), in a CTA pair (both tiles' keys, own queries): operand of dQ."""
    sP: cute.Tensor | None
    """(keys, queries) for wide heads, and so `sOwndS`: operands of dV and dK."""
    sOwndS: cute.Tensor | None
    sKt: cute.Tensor | None
    """CTA pair: (both tiles' keys, D / 2)"""
    sLseLog2: cute.Tensor
    """(queries, q_stages), negated, in base 2; -infinite where a row attends to nothing."""
    sDelta: cute.Tensor
    """(queries, q_stages), negated."""
    load_q: Ring
    load_do: Ring
    load_k: Ring
    load_v: Ring
    sequence_end: Ring
    """One stage: rows that the load warp itself waits for, as other sequences' rows follow them."""
    signals: Signals
    cta_pair: CtaPair | None
    work_tile: cute.Pointer
    """`WORK_TILE_WORDS` words for each stage of K."""
    sdQ: cute.Tensor
    """(floats of a piece, dq_slots, reduce warps), in the order of `dq_blocks`."""
    stats: cute.Tensor
    dq_acc: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    tile_counter: cute.Tensor
    dq_semaphore: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    mask: attn_mask.Mask | None
    """An attn_mask, or the tables of a block mask. Transposed: its rows are keys."""
    mods: ModArgs | None
    dmask: cute.Tensor | None
    rng_state: cute.Tensor | None
