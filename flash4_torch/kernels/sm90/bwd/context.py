"""What all roles share: shared memory, rings, and the arguments of the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute

from ...common import attn_mask
from ...common.bwd.row_stats import RowInputs
from ...common.cta_pair import CtaPair
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from ...common.ring import Ring
from .plan import Plan


class Maps(NamedTuple):
    """TMA copy atoms, and the tensors that they copy from or to, all (S, D, H, B)."""

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
    """Half of the columns of the peer CTA's K."""


class Layouts(NamedTuple):
    """Layouts in shared memory."""

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
    """The same for the peer CTA's keys."""
    sDtanh: cute.Tensor | None
    """The same for softcap's derivative."""
    sScores: cute.Tensor | None
    """(4, scores of a thread / 4, threads of a warpgroup) float32: scores before score_mod, which a lane of
    the first warpgroup leaves for the same lane of the second."""
    sPeerK: cute.Tensor | None
    """(keys, D / 2, kv_stages) of the peer CTA's keys: the columns for which this CTA computes dQ."""
    sPeerKt: cute.Tensor | None
    sLseLog2: cute.Tensor
    """(queries, q_stages), in base 2; infinite where a row sees nothing."""
    sLse: cute.Tensor | None
    """The same in natural units, for blocks that a floating mask changes."""
    sLseLow: cute.Tensor | None
    """What rounding took from `sLse`, in base 2."""
    sDelta: cute.Tensor
    """(queries, do_stages)"""
    load_q: Ring
    load_do: Ring
    load_k: Ring
    load_v: Ring
    share_ds: Ring
    """Only its empty barriers are used where a named barrier (DS_WRITTEN) signals full."""
    weights: Ring | None
    """P, in the place of dS: only its full barriers are used."""
    exchange: Ring | None
    """The peer CTA's dS: only its full barriers are used."""
    cta_pair: CtaPair | None
    """What else the CTAs of a cluster share."""
    write_stats: Ring | None
    """One stage, filled once: all statistics of the CTA's rows are in global memory."""
    sequence_end: Ring
    """One stage: rows at a packed sequence's end, which the load warp itself waits for, as another sequence's
    follow."""
    work_tile: cute.Pointer
    """`WORK_TILE_WORDS` words for each stage of K."""
    block_entries: cute.Pointer | None
    """A word for each stage of Q, where a mask lists blocks: see block_entries.py."""
    sdQ: cute.Tensor
    """(floats of a piece, dq_slots), in the order of `dq_blocks`."""
    commands: cute.Pointer
    """`WORDS` words of 64 bits for each slot of dQ: see store_commands.py."""
    keep_bits: Ring | None
    sKeepBits: cute.Tensor | None
    """(32, words, strips of 16 keys, q_stages): see `dropout.take`."""
    stats: cute.Tensor
    row_inputs: RowInputs | None
    """What the statistics are computed from, with `preprocesses`."""
    dq_acc: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    tile_counter: cute.Tensor | None
    """None with `preprocesses`: a CTA claims no further work."""
    dq_semaphore: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    mask: attn_mask.Mask | None
    """An attn_mask, or the tables of a block mask. Transposed: its rows are keys."""
    mods: ModArgs | None
    dmask: cute.Tensor | None
    rng_state: cute.Tensor | None
    finishes: bool = False
    """Whether this is the context of a tile that rounds dQ, which has code of its own."""
