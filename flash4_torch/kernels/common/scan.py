"""Scans over the threads of a CTA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def prefix_count(holds: Boolean, counts: cute.Tensor) -> tuple[Int32, Int32]:
    """How many threads before this one have `holds`, and how many of all.

    counts: (warps of the CTA,) int32 in shared memory, which may be in use by the count before.
    """
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    ballot = cute.arch.vote_ballot_sync(holds)
    cute.arch.sync_threads()
    if lane == 0:
        counts[warp] = cute.arch.popc(ballot)
    cute.arch.sync_threads()
    before, total = cute.arch.popc(ballot & Int32(cute.arch.lanemask_lt())), Int32(0)
    for w in cutlass.range_constexpr(cute.size(counts)):
        total = total + counts[w]
        before = before + (counts[w] if w < warp else 0)
    return before, total
