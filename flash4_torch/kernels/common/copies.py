"""Loading by the copy engine, and the end of a packed sequence."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from .warps import WARP

_EVICT_FIRST = 0x12F0000000000000
"""The cache policy that CUTLASS calls so (`TMA::CacheHintSm90`)."""


def passing_by() -> dict[str, Int64]:
    """Of a copy whose bytes are not needed again soon: they are the first to leave the L2 cache."""
    return {"cache_policy": Int64(_EVICT_FIRST)}


@cute.jit
def zero_keys(values: cute.Tensor, first: Int32) -> None:
    """Zero the keys from `first` on of a stage (Dv, keys), 16 bytes a lane."""
    Dv, keys = values.shape
    chunks = cute.size(Dv) // 8
    zeros = cute.make_rmem_tensor((8, 1), values.element_type)
    zeros.fill(0.0)
    first = cutlass.max(first, 0)
    for e in cutlass.range(cute.arch.lane_idx(), (cute.size(keys) - first) * chunks, WARP, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(values, (8, 1), (e % chunks, first + e // chunks)))


@cute.jit
def copy(atom, source: cute.Tensor, target: cute.Tensor, full: cute.Pointer, **more) -> None:
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
    )
    cute.copy(atom, g, s, tma_bar_ptr=full, **more)


def stage_bytes(staged: cute.Tensor) -> int:
    return cute.size_in_bytes(staged.element_type, cute.select(staged.layout, mode=[0, 1]))
