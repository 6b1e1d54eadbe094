"""Packed sequences: which of them a place belongs to."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class TokenPlaces(NamedTuple):
    """Sequences begin at their first tokens."""

    def first(self, start: Int32, b: Int32) -> Int32:
        return start


@cute.jit
def sequence_of(place: Int32, cu_seqlens: cute.Tensor, places: cutlass.Constexpr) -> Int32:
    """The last sequence that begins at that place or before, or sequence 0; places.first(cu_seqlens[b], b) is
    where b begins.

    Every round tests 32 candidates, one a lane of the warp. The result is one of the sequences, whatever
    cu_seqlens holds.
    """
    lane = cute.arch.lane_idx()
    low, high = Int32(0), cu_seqlens.shape[0] - 1
    while high - low > 1:
        step = (high - low + 31) // 32
        b = low + lane * step
        begun = (b < high) & (places.first(cu_seqlens[cutlass.min(b, high - 1)], b) <= place)
        skipped = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(begun)), 1) * step
        high = cutlass.min(high, low + skipped)
        low = low + skipped - step
    return low
