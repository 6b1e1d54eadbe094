"""The part of a backward kernel's context that code for every architecture reads."""

from __future__ import annotations

from typing import Protocol

import cutlass.cute as cute

from ..attn_mask import Mask
from ..ring import Ring
from ..tile_scheduler import SchedulerContext
from .plan import BackwardPlan


class BackwardMaps(Protocol):
    """Tensors as TMA takes them, (S, D, H, B)."""

    mQ: cute.Tensor
    mK: cute.Tensor


class BackwardContext(SchedulerContext, Protocol):
    """The fields of a backward kernel's context that code for every architecture reads."""

    plan: BackwardPlan
    maps: BackwardMaps
    work_tile: cute.Pointer
    """`WORK_TILE_WORDS` words for each stage of K."""
    load_k: Ring
    sequence_end: Ring
    stats: cute.Tensor
    dq_semaphore: cute.Tensor | None
    dmask: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    mask: Mask | None
