"""Arriving at the barriers that the products wait for."""

from __future__ import annotations

import cutlass.cute as cute

from .. import signal, tmem
from .context import Context


def arrive(ctx: Context, barrier: cute.Pointer) -> None:
    """One arrival of this warp, after what all of its lanes did to tensor memory; of a pair in CTA 0."""
    tmem.fence_before()
    signal.arrive(barrier, ctx.plan.cluster_size)
