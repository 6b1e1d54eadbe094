"""Arrivals at the barriers that MMAs wait for."""

from __future__ import annotations

import cutlass.cute as cute

from .. import signal, tmem
from .context import Context


def arrive(ctx: Context, barrier: cute.Pointer) -> None:
    """One arrival of this warp, after what all its lanes did to TMEM; in a CTA pair, at CTA 0's barrier."""
    tmem.fence_before()
    signal.arrive(barrier, ctx.plan.cluster_size)
