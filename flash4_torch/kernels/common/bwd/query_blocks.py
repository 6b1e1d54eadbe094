"""The rows of a CTA in the backward's small kernels: a block of queries of one head."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..sequences import sequence_of
from .row_blocks import RowBlocks


class QueryBlock(NamedTuple):
    batch: Int32
    """0 for packed sequences."""
    head: Int32
    first: Int32
    """Index in the tensors of the block's first row."""
    count: Int32
    """Rows of the sequence from there on: more than the block has, or fewer; none, or even a negative
    number."""
    number: Int64
    """Index of the block among those of all heads and batch entries."""

    def row(self, r: Int32) -> Int32:
        """Index in the tensors of the block's row r; of some existing row where that one does not exist."""
        return cutlass.max(self.first + cutlass.min(r, self.count - 1), 0)

    def has(self, r: Int32) -> Boolean:
        return r < self.count


def heads_and_blocks(x: cute.Tensor, cu_seqlens: cute.Tensor | None, blocks: RowBlocks) -> tuple:
    """(B, Hq, blocks of a head) for rows x, (B, Sq, Hq, D) or packed (T, Hq, D).

    Packed rows are one batch entry here, as are those of segments, all entries' rows.
    """
    *rows, Hq, _ = x.shape
    if cu_seqlens is None:
        return rows[0], Hq, blocks.count(rows[1])
    T = rows[0] * rows[1] if len(rows) > 1 else rows[0]
    return 1, Hq, blocks.packed_count(T, cu_seqlens.shape[0] - 1)


def block_of(x: cute.Tensor, blocks: RowBlocks, batch: Int32, head: Int32, block: Int32) -> QueryBlock:
    """A block of a head of rows x, (B, Sq, Hq, D)."""
    _, Hq, count = heads_and_blocks(x, None, blocks)
    first = block * blocks.queries
    number = (Int64(batch) * Hq + head) * count + block
    return QueryBlock(batch, head, first, x.shape[1] - first, number)


@cute.jit
def own_block(x: cute.Tensor, cu_seqlens: cute.Tensor | None, blocks: cutlass.Constexpr) -> QueryBlock:
    """The block of this CTA, in a grid with a CTA for each block of each head and batch entry
    (`heads_and_blocks`).

    Neighbouring CTAs have the same rows of neighbouring heads, which lie side by side.
    """
    group, _, _ = cute.arch.block_idx()
    _, Hq, count = heads_and_blocks(x, cu_seqlens, blocks)
    rest = group // Hq
    batch, head, block = rest // count, group % Hq, rest % count
    if cutlass.const_expr(cu_seqlens is None):
        return block_of(x, blocks, batch, head, block)
    number = (Int64(batch) * Hq + head) * count + block
    b = sequence_of(block, cu_seqlens, blocks)
    start, end = cu_seqlens[b], cu_seqlens[b + 1]
    first = start + (block - blocks.first(start, b)) * blocks.queries
    left = end - first
    if cutlass.const_expr(cute.rank(x) > 3):
        batch = start // x.shape[1]
        first = first - batch * x.shape[1]
    return QueryBlock(batch, head, first, left, number)
