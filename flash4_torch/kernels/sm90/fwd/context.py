"""What all roles share: shared memory, rings, and the arguments of the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute

from ...common import attn_mask
from ...common.cta_pair import CtaPair
from ...common.fwd.launch import Maps, Pages
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from ...common.ring import Ring
from .plan import Plan


class Layouts(NamedTuple):
    """Layouts in shared memory."""

    q: Any
    k: Any
    v: Any
    o: Any


@dataclass(frozen=True)
class Context:
    """What every role may use."""

    plan: Plan
    params: LaunchParams
    maps: Maps
    sQ: cute.Tensor
    """(64, D, q_stages * warpgroups)"""
    sK: cute.Tensor
    """(keys, D, kv_stages)"""
    sV: cute.Tensor
    """(Dv, keys, kv_stages)"""
    sRamp: cute.Tensor | None
    """(keys, 16): see `ramp`; None unless tensor cores add one."""
    sO: cute.Tensor | None
    """(64 * Dv, warpgroups): each warpgroup's rows of O in `output_layout`; None if they overwrite Q."""
    output_layout: cute.ComposedLayout
    """(16, Dv, warps of a warpgroup)"""
    load_q: Ring
    load_k: Ring
    load_v: Ring
    sequence_end: Ring
    """One stage: V at a packed sequence's end, which the warp that loads V waits for itself, as another
    sequence's V follows."""
    work_tile: cute.Pointer
    """`work_tile_words` for each stage of Q."""
    keep_bits: Ring | None
    sKeepBits: cute.Tensor | None
    """(32, words, consumer warps, kv_stages): see `dropout.take`."""
    cta_pair: CtaPair | None
    """What the CTAs of a cluster share besides K and V."""
    out: cute.Tensor
    lse: cute.Tensor
    lse_low: cute.Tensor | None
    tile_counter: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    pages: Pages | None
    """Instead of `cu_seqlens_k`, if keys are in pages."""
    mask: attn_mask.Mask | None
    """An attn_mask, or the tables of a block mask."""
    mods: ModArgs | None
    rng_state: cute.Tensor | None
    sinks: cute.Tensor | None
    """(Hq,)"""
