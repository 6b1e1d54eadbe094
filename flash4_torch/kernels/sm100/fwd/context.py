"""Context of the roles: SMEM, rings, and the launch's arguments."""

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
    """SMEM layouts; those of K and V have one stage."""

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
    """`kv_stages` times K or V, laid out as `layouts` says."""
    sO: cute.Tensor
    """(128 * Dv, q_tiles), elements: rows of O, 32 for each correction warp, laid out as `layouts.o` says."""
    sScale: cute.Tensor
    """(128, q_tiles) float32: factors that rescale O."""
    sInverse: cute.Tensor
    """(128, q_tiles) float32: factors that normalise O."""
    sRunning: cute.Tensor | None
    """(128, q_tiles) float32: factors for the running rows of O."""
    work_tile: cute.Pointer
    """`work_tile_words` for each stage of `tile`."""
    tmem_holder: cute.Pointer
    tile: Ring
    load_q: Ring
    load_kv: Ring
    sequence_end: Ring
    """One stage: values that the load warp itself waits for, as other sequences' values follow them."""
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
    pages: Pages | None
    """Instead of `cu_seqlens_k`, if keys are in pages."""
    mask: attn_mask.Mask | None
    """An attn_mask, or the tables of a block mask."""
    mods: ModArgs | None
    rng_state: cute.Tensor | None
    sinks: cute.Tensor | None
    """(Hq,)"""
