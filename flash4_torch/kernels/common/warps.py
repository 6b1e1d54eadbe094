"""How threads are grouped."""

from __future__ import annotations

WARP = 32
GROUP = 128
"""Threads of a warpgroup."""
WARPS = GROUP // WARP


def registers_suffice(threads: int, wanted: int) -> bool:
    """Whether warpgroups may have `wanted` registers a thread, all of them together.

    There are 65536, over the warps of each quarter, floored to 8 a thread at launch; a kernel that asks for
    more than were given out waits for ever.
    """
    at_launch, groups = min(65536 // threads // 8 * 8, 255), threads // GROUP
    return wanted <= at_launch * groups + groups
