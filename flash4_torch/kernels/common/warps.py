"""Groups of threads, and the registers that they may have."""

from __future__ import annotations

WARP = 32
GROUP = 128
"""Threads of a warpgroup."""
WARPS = GROUP // WARP


def registers_suffice(threads: int, wanted: int) -> bool:
    """Whether warpgroups may have `wanted` registers a thread, summed over the warpgroups.

    There are 65536, divided among the warps of each quarter of an SM, and floored to 8 a thread at launch; a
    kernel that asks for more than were given out waits forever.
    """
    at_launch, groups = min(65536 // threads // 8 * 8, 255), threads // GROUP
    return wanted <= at_launch * groups + groups
