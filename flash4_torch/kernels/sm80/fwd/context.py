"""What all parts of the kernel share: shared memory, and the arguments of the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...common import attn_mask
from ...common.cta_pair import CtaPair
from ...common.fwd.launch import Maps, Pages
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from .plan import Plan


class Layouts(NamedTuple):
    """Layouts in shared memory."""

    q: Any
    k: Any
    v: Any
    o: Any
    weights: Any
    """P, where several warps share rows."""


@dataclass(frozen=True)
class Context:
    """What the parts may use."""

    plan: Plan
    params: LaunchParams
    maps: Maps
    warp: Int32
    lane: Int32
    sQ: cute.Tensor
    """(rows, D); of float32 numbers it has halves, twice as many columns, as have K and V."""
    sO: cute.Tensor | None
    """(warp_rows, Dv, warps), in the memory of Q; none of float32 numbers."""
    sK: cute.Tensor
    """(keys, D, kv_stages)"""
    sV: cute.Tensor
    """(Dv, keys, kv_stages)"""
    sP: cute.Tensor | None
    """(rows, keys), where several warps share rows; of float32 numbers as the others, and keys lie as
    `warp_tf32.place_of` says."""
    sExchange: cute.Tensor | None
    """(rows, column_warps): of each row the maximum of a warp's scores, at last the sum of its weights."""
    work_tile: cute.Pointer
    """`work_tile_words` words: the tile, which the epilogue reads again, lest it take registers meanwhile."""
    sKeepBits: cute.Tensor | None
    """(32, words, row_mmas, warps): see `dropout.take`."""
    out: cute.Tensor
    lse: cute.Tensor
    lse_low: cute.Tensor | None
    tile_counter: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    mask: attn_mask.Mask | None
    """attn_mask, or the blocks that a block mask leaves visible."""
    mods: ModArgs | None
    rng_state: cute.Tensor | None
    sinks: cute.Tensor | None
    """(Hq,)"""
    pages: Pages | None = None
    cta_pair: CtaPair | None = None

    @property
    def row_warp(self) -> Int32:
        """Number of the warp's rows."""
        return self.warp // self.plan.column_warps

    @property
    def column_warp(self) -> Int32:
        """Number of the warp among those that share its rows."""
        return self.warp % self.plan.column_warps
