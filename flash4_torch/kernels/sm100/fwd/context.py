"""What the roles share: shared memory, rings, and what the launch was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute

from ...common import attn_mask
from ...common.cta_pair import CtaPair
from ...common.fwd.launch import Maps
from ...common.launch_params import LaunchParams
from ...common.ring import Ring
from .plan import Plan


class Layouts(NamedTuple):
    """Of shared memory; K and V of one stage."""

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
    layouts: Layouts
    sQ: cute.Tensor
    """(128, D, q_tiles)"""
    sKV: cute.Pointer
    """`kv_stages` times K or V, as `layouts` say."""
    sO: cute.Tensor
    """(128 * Dv, q_tiles), elements: the correction warps' rows of O, 32 after 32, as `layouts.o` says."""
    sScale: cute.Tensor
    """(128, q_tiles) float32: what O is multiplied by."""
    sInverse: cute.Tensor
    """(128, q_tiles) float32: what it is normalised by."""
    work_tile: cute.Pointer
    """`WORK_TILE_WORDS` words for each stage of `tile`."""
    tmem_holder: cute.Pointer
    tile: Ring
    load_q: Ring
    load_kv: Ring
    sequence_end: Ring
    """One stage: values that the loading warp waits for itself, as other sequences' follow them."""
    s_p: Ring
    late: Ring
    o: Ring
    inverse: Ring
    cta_pair: CtaPair | None
    out: cute.Tensor
    lse: cute.Tensor
    lse_low: cute.Tensor | None
    tile_counter: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    mask: attn_mask.Mask | None
    rng_state: cute.Tensor | None
