"""Arriving at the barriers that the products wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm

from .. import tmem

if TYPE_CHECKING:
    from .kernel import Kernel


@cute.jit
def arrive(k: Kernel, signal: cute.Pointer) -> None:
    """One arrival of this warp, after what all of its lanes did; of a pair in CTA 0."""
    tmem.fence_before()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if cutlass.const_expr(k.plan.ctas == 1):
            cute.arch.mbarrier_arrive(signal)
        else:
            cute.arch.mbarrier_arrive(signal, 0, scope=nvvm.MemScopeKind.CLUSTER)
