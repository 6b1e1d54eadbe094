"""What the roles share: shared memory, rings, and what the launch was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute

from ...common import attn_mask
from ...common.cta_pair import CtaPair
from ...common.launch_params import LaunchParams
from ...common.ring import Ring
from .plan import Plan


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
    load_peer_k: Any
    """Half of the columns of the other CTA's K."""


class Layouts(NamedTuple):
    """Of shared memory."""

    q: Any
    do: Any
    k: Any
    v: Any
    ds: Any
    peer_k: Any


class Turned(NamedTuple):
    """Layouts of the same memory with the columns first."""

    q: Any
    do: Any
    k: Any
    peer_k: Any


@dataclass(frozen=True)
class Context:
    """What every role may use."""

    plan: Plan
    params: LaunchParams
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
    sPeerdS: cute.Tensor | None
    """The same of the other CTA's keys."""
    sDtanh: cute.Tensor | None
    """The same of softcap's derivatives."""
    sPeerK: cute.Tensor | None
    """(keys, D / 2, kv_stages) of the other CTA's keys: the columns that this one makes dQ of."""
    sPeerKt: cute.Tensor | None
    sLseLog2: cute.Tensor
    """(queries, q_stages), in base 2; infinite where a row sees nothing."""
    sLse: cute.Tensor | None
    """The same in natural units, for blocks that a floating mask changes."""
    sLseLow: cute.Tensor | None
    """What rounding has taken from `sLse`, in base 2."""
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
    cta_pair: CtaPair | None
    """What the CTAs of a cluster share besides."""
    sequence_end: Ring
    """One stage: rows that the loading warp waits for itself, as other sequences' follow them."""
    work_tile: cute.Pointer
    """`WORK_TILE_WORDS` words for each stage of K."""
    sdQ: cute.Tensor
    """(floats of a piece, dq_slots), in the order of `dq_blocks`."""
    commands: cute.Pointer
    """`WORDS` of 64 bits for each slot of dQ: see `store_dq`."""
    keep_bits: Ring | None
    sKeepBits: cute.Tensor | None
    """(32, words, strips of 16 keys, q_stages): see `dropout.take`."""
    stats: cute.Tensor
    dq_acc: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    tile_counter: cute.Tensor
    dq_semaphore: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    mask: attn_mask.Mask | None
    """Transposed: its rows are keys."""
    dmask: cute.Tensor | None
    rng_state: cute.Tensor | None
    finishes: bool = False
    """For a tile that rounds dQ, which has code of its own."""
