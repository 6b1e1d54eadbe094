"""Arriving at the barriers that the products wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute

from .. import signal, tmem

if TYPE_CHECKING:
    from .kernel import Kernel


def arrive(k: Kernel, barrier: cute.Pointer) -> None:
    """One arrival of this warp, after what all of its lanes did to tensor memory; of a pair in CTA 0."""
    tmem.fence_before()
    signal.arrive(barrier, k.plan.ctas)
