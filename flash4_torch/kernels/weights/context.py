"""What the roles share, and the tile of a CTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..common import attn_mask
from ..common.band import Band
from ..common.launch_params import LaunchParams
from ..common.ring import Ring
from .plan import WeightsPlan


class Maps(NamedTuple):
    """TMA atoms, None without TMA, and the tensors to copy from: mQ (S, D, Hq, B), mK (S, D, Hk, B)."""

    load_q: Any
    mQ: Any
    load_k: Any
    mK: Any


class Tile(NamedTuple):
    """A CTA's queries and keys, in tiles, and the query heads that it goes through."""

    query_block: Int32
    key_block: Int32
    batch: Int32
    first_head: Int32
    end_head: Int32
    band: Band
    visible: Boolean
    """Whether the band leaves any of the tile's weights; otherwise all of them are 0."""


@dataclass(frozen=True)
class Context:
    """What every role may use."""

    plan: WeightsPlan
    params: LaunchParams
    maps: Maps
    tile: Tile
    sQ: cute.Tensor
    """(queries, chunk, stages), in 16-bit halves of float32 numbers"""
    sK: cute.Tensor
    """(keys, chunk, stages), likewise"""
    load_qk: Ring | None
    """None without TMA."""
    sKeepBits: cute.Tensor | None
    """(32, words, MMAs of a warp, warps): see `dropout.take`."""
    weights: cute.Tensor
    lse: cute.Tensor
    lse_low: cute.Tensor | None
    mask: attn_mask.Mask | None
    rng_state: cute.Tensor | None
