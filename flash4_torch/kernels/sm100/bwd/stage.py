"""A thread's row of a matrix in SMEM, in the layouts of `smem_layouts`."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...common.smem_layouts import chunk_of

VECTOR = 16
"""Bytes of a store, a vector; a swizzle moves whole vectors."""
BYTES = 2
"""Bytes of an element."""


class Row(NamedTuple):
    start: Int32
    """Address of its first vector, swizzled."""
    rows: int
    chunk: int
    """Columns that lie together; chunks follow one another, each with all rows."""
    remote: bool = False
    """Whether the address is one of the cluster's (shared::cluster)."""


@cute.jit
def write(row: Row, column: cutlass.Constexpr, numbers: cute.Tensor) -> None:
    """Write 16-bit registers, a multiple of 8 of them, from a column on that is a multiple of 8, too.

    Only stores to the peer CTA are inline assembly: elsewhere it would spill (ptxas.md, P24).
    """
    each = VECTOR // BYTES
    words = cute.recast_tensor(numbers, Uint32)
    for i in cutlass.range_constexpr(0, cute.size(numbers), each):
        chunk, inside = divmod(column + i, row.chunk)
        # The start's lowest bits are 0 except for the swizzle's.
        place = (row.start ^ inside * BYTES) + chunk * row.rows * row.chunk * BYTES
        if cutlass.const_expr(row.remote):
            cute.arch.inline_ptx(
                "st.shared::cluster.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[place, *(words[i // 2 + j] for j in range(4))],
            )
        else:
            target = cute.make_ptr(Uint32, place, cute.AddressSpace.smem, assumed_align=VECTOR)
            own = cute.make_tensor(words.iterator + i // 2, cute.make_layout(4))
            cute.autovec_copy(own, cute.make_tensor(target, cute.make_layout(4)))


def row_of(stage: cute.Tensor, row: Int32) -> Row:
    """The row of a stage (rows, columns), whose start is a multiple of 1024 bytes."""
    rows, columns = (cute.size(stage, mode=[i]) for i in range(2))
    chunk = chunk_of(columns)
    offset = row * (chunk * BYTES)
    # Successive 128 bytes, one row or several shorter ones, have their vectors in different orders: eight
    # orders for rows of 128 bytes.
    swizzle = offset >> 3 & chunk * BYTES - VECTOR
    return Row(Int32(stage.iterator.toint()) + (offset | swizzle), rows, chunk)


def from_column(row: Row, column: Int32) -> Row:
    """The row from a column on, a multiple of 32.

    What is written there either begins a chunk, which has at most 64 columns, or ends within the same one.
    """
    chunk, inside = column // row.chunk, column % row.chunk
    start = (row.start ^ inside * BYTES) + chunk * (row.rows * row.chunk * BYTES)
    return row._replace(start=start)


def in_cta(row: Row, rank: Int32) -> Row:
    """The same row in another CTA of the cluster."""
    start = cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[row.start, rank],
    )
    return row._replace(start=start, remote=True)
