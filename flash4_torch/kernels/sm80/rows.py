"""Copies of blocks of rows to shared memory by cp.async; every warp has some of the rows."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common.run_copies import Source, Wanted, copy_block, lane_of, own_row

BYTES = 16
"""Bytes of a vector."""


class Sequence(NamedTuple):
    """A head's rows of one sequence."""

    rows: cute.Tensor
    """(S, D, H, B)"""
    offset: Int32
    """The row at which the sequence begins; 0 if not varlen."""
    length: Int32
    head: Int32
    batch: Int32
    reads_stride_anew: bool = False
    """Whether each block's addresses begin with the stride itself: multiples that outlive a block take
    registers."""


class Visit(NamedTuple):
    """A block is copied if it is the i-th one of more than i."""

    i: Int32
    count: Int32


def load_block(
    of: Sequence, n: Int32, stage: cute.Tensor, columns: int, warp: Int32, warps: int, visit: Visit
) -> None:
    """Start to copy block n, as many rows as the stage has; rows after the last one become 0.

    columns: those that the rows have; further ones of the stage become 0.
    """
    load_part(of, n, stage, 0, columns, warp, warps, visit)


def load_parts(
    of: Sequence,
    n: Int32,
    stage: cute.Tensor,
    columns: int,
    parts: int,
    warp: Int32,
    warps: int,
    visit: Visit,
) -> None:
    """Do as `load_block` does, to a stage of equal parts of columns, each in a layout of its own."""
    rows, each = cute.size(stage, mode=[0]), cute.size(stage, mode=[1]) // parts
    for p in range(parts):
        part = cute.local_tile(stage, (rows, each), (0, p))
        load_part(of, n, part, p * each, min(max(columns - p * each, 0), each), warp, warps, visit)


def load_part(
    of: Sequence,
    n: Int32,
    stage: cute.Tensor,
    first_column: int,
    columns: int,
    warp: Int32,
    warps: int,
    visit: Visit,
) -> None:
    source, rows = of.rows, cute.size(stage, mode=[0])
    pitch = stride_bytes(source, 0)
    if of.reads_stride_anew:
        move = "mov.b64 {$w0}, {$r0};"
        pitch = cute.arch.inline_ptx(move, write_only_types=[Int64], read_only_args=[pitch])
    own = own_row(stage, warp)
    # What does not change from block to block comes first in the sum.
    start = address(source, (of.offset, 0, of.head, of.batch))
    start += Int64(own) * pitch + Int64(lane_of(stage).vector * BYTES)
    if first_column:
        start += Int64(first_column * source.element_type.width // 8)
    first = n * rows
    start += Int64(first) * pitch
    wanted = Wanted(Int32(0), cutlass.max(of.length - first, 0), *visit)
    copy_block(stage, warp, warps, Source(start, pitch), wanted, columns)


def swapped(x: cute.Tensor) -> cute.Tensor:
    """The tensor with its first two modes exchanged."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0, *range(2, cute.rank(x))]))


def address(x: cute.Tensor, index: tuple) -> Int64:
    """The address of an element."""
    return Int64(x[(*index[:-1], None)].iterator.toint()) + Int64(index[-1]) * stride_bytes(x, 3)


def stride_bytes(x: cute.Tensor, *modes) -> Int64:
    """The stride of a mode in bytes."""
    stride = x.stride
    for mode in modes:
        for i in mode if isinstance(mode, tuple) else (mode,):
            stride = stride[i]
    return Int64(stride) * (x.element_type.width // 8)
