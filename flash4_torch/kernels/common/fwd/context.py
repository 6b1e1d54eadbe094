"""The part of a forward kernel's context that code for every architecture reads."""

from __future__ import annotations

from typing import Protocol

import cutlass.cute as cute

from ..attn_mask import Mask
from ..tile_scheduler import SchedulerContext
from .launch import Maps, Pages
from .plan import ForwardPlan


class ForwardContext(SchedulerContext, Protocol):
    """The fields of a forward kernel's context that code for every architecture reads."""

    plan: ForwardPlan
    maps: Maps
    work_tile: cute.Pointer
    """`work_tile_words` for each stage of the ring that announces tiles."""
    out: cute.Tensor
    lse: cute.Tensor
    lse_low: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    pages: Pages | None
    """Instead of `cu_seqlens_k`, if keys are in pages."""
    mask: Mask | None
    """An attn_mask, or a block mask; its tables say which blocks tiles visit."""
    sinks: cute.Tensor | None
