"""What all parts of the kernel share: shared memory, and the arguments of the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...common import attn_mask
from ...common.cta_pair import CtaPair
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from ...common.warp_mma import Share
from .plan import Plan


class Maps(NamedTuple):
    """Tensors, all (S, D, H, B)."""

    mQ: cute.Tensor
    mdO: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor


class Layouts(NamedTuple):
    """Layouts in shared memory."""

    q: Any
    do: Any
    k: Any
    v: Any
    weights: Any
    """P and dS."""


@dataclass(frozen=True)
class Context:
    """What the parts may use."""

    plan: Plan
    params: LaunchParams
    maps: Maps
    warp: Int32
    lane: Int32
    sQ: cute.Tensor
    """(queries, D, stages); of float32 numbers it has halves, twice as many columns, as have the others."""
    sdO: cute.Tensor
    """(queries, Dv, stages)"""
    sK: cute.Tensor
    """(keys, D)"""
    sV: cute.Tensor
    """(keys, Dv)"""
    sdS: cute.Tensor
    """(keys, queries); of float32 numbers (queries, keys), and keys lie as `warp_tf32.place_of` says."""
    sP: cute.Tensor | None
    """The same of P, where several warps share keys."""
    sStats: cute.Tensor
    """(queries, row_stats, stages): of each row what the preprocess kernel found."""
    work_idx: cute.Pointer
    """The work index that one thread has drawn, in order."""
    empty: cute.Pointer | None
    """An mbarrier: see the module."""
    sMask: cute.Tensor | None
    """(queries, keys, stages): a floating mask as it lies; see `mask_tile`."""
    sKeepBits: cute.Tensor | None
    """(32, words, warps): see `dropout.take`. The strips of all MMAs of a warp lie side by side. None if
    parts of queries have theirs where dS will be."""
    stats: cute.Tensor
    dq_acc: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    tile_counter: cute.Tensor
    dq_semaphore: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    mask: attn_mask.Mask | None
    """attn_mask, or the blocks that a block mask leaves visible. Transposed: rows are keys."""
    mods: ModArgs | None
    dmask: cute.Tensor | None
    rng_state: cute.Tensor | None
    cta_pair: CtaPair | None = None

    @property
    def key_warp(self) -> Int32:
        """Number of the 16 keys that the warp has."""
        return self.warp // self.plan.column_warps

    @property
    def column_warp(self) -> Int32:
        """Number of the warp among those that share its keys."""
        return self.warp % self.plan.column_warps

    @property
    def column_share(self) -> Share:
        """The warp's columns of dK and dV, where they are of 16 bits."""
        return Share(self.column_warp, self.plan.column_warps)
