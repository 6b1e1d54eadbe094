"""TMA copies, copies of 16 bytes by lanes, and zeros after a packed sequence."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from .warps import WARP

_EVICT_FIRST = 0x12F0000000000000
"""The L2 cache policy that CUTLASS calls EVICT_FIRST (`TMA::CacheHintSm90`)."""

AT_ONCE = 4
"""Boxes without a loop: their addresses and coordinates take eight uniform registers each, and this many
leave room for what all roles share (ptxas.md, P13)."""


def evict_first() -> dict[str, Int64]:
    """Arguments of a copy whose bytes are not needed again soon: they are the first to leave the L2 cache."""
    return {"cache_policy": Int64(_EVICT_FIRST)}


@cute.jit
def zero_keys(values: cute.Tensor, first: Int32) -> None:
    """Zero the keys from `first` on in a stage (Dv, keys), 16 bytes a lane."""
    Dv, keys = values.shape
    chunks = cute.size(Dv) // 8
    zeros = cute.make_rmem_tensor((8, 1), values.element_type)
    zeros.fill(0.0)
    first = cutlass.max(first, 0)
    for e in cutlass.range(cute.arch.lane_idx(), (cute.size(keys) - first) * chunks, WARP, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(values, (8, 1), (e % chunks, first + e // chunks)))


@cute.jit
def copy(
    atom,
    source: cute.Tensor,
    target: cute.Tensor,
    full: cute.Pointer,
    at_once: cutlass.Constexpr = AT_ONCE,
    **more,
) -> None:
    """A TMA load that arrives at `full`; more boxes than `at_once` are issued in a loop."""
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), *(cute.group_modes(x, 0, cute.rank(x)) for x in (target, source))
    )
    numbers, boxes = (cute.size(s, mode=[0, i]) for i in range(2))
    if cutlass.const_expr(boxes <= at_once):
        cute.copy(atom, g, s, tma_bar_ptr=full, **more)
    else:
        g, s = (cute.make_tensor(x.iterator, cute.get(x.layout, mode=[0])) for x in (g, s))
        for i in cutlass.range(boxes, unroll=1):
            box = (cute.group_modes(cute.local_tile(x, (numbers, 1), (0, i)), 0, 2) for x in (g, s))
            cute.copy(atom, *box, tma_bar_ptr=full, **more)


VECTOR = 8
"""Elements of 16 bits that a lane copies at a time, 16 bytes."""


@cute.jit
def copy_vector(stage: cute.Tensor, row: Int32, target: cute.Tensor, chunk: Int32) -> None:
    """Copy one vector of a stage's row, the chunk-th, to the same place of a row in global memory."""
    dtype = stage.element_type
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
    registers = cute.make_rmem_tensor(VECTOR, dtype)
    cute.copy(atom, cute.group_modes(cute.local_tile(stage, (1, VECTOR), (row, chunk)), 0, 2), registers)
    cute.copy(atom, registers, cute.local_tile(target, (VECTOR,), (chunk,)))


@cute.jit
def copy_box(atom, source: cute.Tensor, target: cute.Tensor, **more) -> None:
    """Issue one TMA store by one lane, and commit it."""
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(target, 0, 2)
    )
    with cute.arch.elect_one():  # the DSL does that for loads, not for stores
        cute.copy(atom, s, g, **more)
        cute.arch.cp_async_bulk_commit_group()


def stage_bytes(staged: cute.Tensor) -> int:
    return cute.size_in_bytes(staged.element_type, cute.select(staged.layout, mode=[0, 1]))
