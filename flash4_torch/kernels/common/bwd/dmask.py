"""Adding a block's gradient of attn_mask to global memory, number by number."""

from __future__ import annotations

from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..attn_mask import within
from ..fragment import Fragment
from .context import BackwardContext
from .tiles import Tile


class DmaskWork(Protocol):
    """What a thread works on: a tile, and one of its query heads."""

    tile: Tile
    head: Int32


@cute.jit
def add_dmask(ctx: BackwardContext, work: DmaskWork, n: Int32, fragment: Fragment) -> None:
    """Add a fragment whose rows are keys; where the mask broadcasts, all that shares a number is summed."""
    target, tile = ctx.dmask, work.tile
    Bm, Hm, Skm, Sqm = target.shape
    for r in cutlass.range_constexpr(len(fragment.rows)):
        j = fragment.rows[r]
        row = target[within(tile.batch, Bm), within(work.head, Hm), within(j, Skm), None]
        for c in cutlass.range_constexpr(len(fragment.offsets)):
            i = fragment.key + fragment.offsets[c]
            if (i < tile.Sq) & (j < tile.Sk):
                _add(row.iterator + within(i, Sqm) * row.stride[0], fragment.values[r, c])


def _add(place: cute.Pointer, value: Float32) -> None:
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};", read_only_args=[place.toint(), value]
    )
