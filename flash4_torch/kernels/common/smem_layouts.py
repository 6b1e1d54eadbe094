"""Layouts of 16-bit matrices in shared memory, as TMA fills them and tensor cores read them."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator


def row_major_layout(
    dtype: type,
    rows: int,
    columns: int,
    stages: int,
    part: int | None = None,
    *,
    whole_rows: bool = False,
) -> cute.ComposedLayout:
    """(rows, columns, stages), with the widest swizzle that the columns allow; columns are a multiple of 16.

    `part`: columns that are to be an operand of their own. `whole_rows`: eight rows lie together with all of
    their columns, otherwise all rows of a chunk of columns.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}[chunk_of(part or columns)]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(1, 0, 2) if whole_rows else (0, 1, 2))


def column_major_layout(
    dtype: type,
    columns: int,
    rows: int,
    stages: int,
    part: int | None = None,
    *,
    whole_rows: bool = False,
) -> cute.ComposedLayout:
    """(columns, rows, stages), contiguous along the columns: the same memory as `row_major_layout`'s."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {64: kinds.MN_SW128, 32: kinds.MN_SW64, 16: kinds.MN_SW32}[chunk_of(part or columns)]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    # What lies together is one box of a TMA copy.
    return cute.tile_to_shape(atom, (columns, rows, stages), order=(0, 1, 2) if whole_rows else (1, 0, 2))


def allocate(memory: SmemAllocator, dtype: type, layout: cute.ComposedLayout) -> cute.Tensor:
    """A tensor of that layout, aligned as its swizzle requires."""
    return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def chunk_of(columns: int) -> int:
    """Columns of a chunk, which lie together: as many as a swizzle spans."""
    return next(chunk for chunk in (64, 32, 16) if columns % chunk == 0)


def vector_address(stage: cute.Tensor, row: Int32, vector: Int32, part: int | None = None) -> Int32:
    """SMEM address of a row's vector of 16 bytes in a stage (rows, columns) of `row_major_layout`."""
    rows, columns = (cute.size(stage, mode=[i]) for i in range(2))
    row_bytes = chunk_of(part or columns) * 2
    vectors = row_bytes // 16
    inside = row * row_bytes
    # A swizzle flips the bits that number a vector by the bits from 7 on.
    swizzled = inside + ((vector % vectors) * 16 ^ (inside >> 3 & row_bytes - 16))
    return Int32(stage.iterator.toint()) + vector // vectors * (rows * row_bytes) + swizzled
