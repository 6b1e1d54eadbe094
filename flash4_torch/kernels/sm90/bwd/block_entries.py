"""Entries of a mask's list of blocks, one for each stage of Q, which the load warp hands to the consumers.

The load warp reads the list a block or two ahead. Consumers that read it themselves would wait for global
memory at the beginning of each block.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.ring import Cursor
from .context import Context


@cute.jit
def write(ctx: Context, at: Cursor, n: Int32, partial: Boolean) -> None:
    """Write a stage's block, by one lane; the arrival at the stage's barrier makes it visible."""
    cute.arch.store(ctx.block_entries + at.stage, n * 2 + Int32(partial))


@cute.jit
def read(ctx: Context, at: Cursor) -> tuple[Int32, Boolean]:
    """The number of the block in a stage of Q that is full, and whether the mask changes it."""
    entry = cute.arch.load(ctx.block_entries + at.stage, Int32)
    return entry >> 1, (entry & 1) != 0
