"""Arrivals at the barriers that MMAs wait for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm


@cute.jit
def arrive(barrier: cute.Pointer, cluster_size: cutlass.Constexpr) -> None:
    """One arrival of this warp, after what all of its lanes did; in a CTA pair, at CTA 0's barrier."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if cutlass.const_expr(cluster_size == 1):
            cute.arch.mbarrier_arrive(barrier)
        else:
            cute.arch.mbarrier_arrive(barrier, 0, scope=nvvm.MemScopeKind.CLUSTER)
