"""attn_mask on the device: which blocks of keys a tile visits, and what the mask does to its scores.

`kernels.shared.mask_blocks` has written the tables of `mask_tables` before. A role then does

    mask = make_mask(args, plan)
    list = visible_blocks(mask, batch, head, block, span.first, span.last)  # once a tile
    for i in range(list.count):
        n, mixed = block_at(list, i)  # from the last to the first; load block n of K and V

and one that holds scores

    own = rows_of(mask, batch, heads, rows)  # once a tile
    words = words_of(mask, own, n)  # early: bits of a bool mask come from memory
    if mixed:
        change(mask, own, words, n, fragment)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from .fragment import Fragment
from .mask_tables import PANEL, MaskPlan, place

LOG2E = math.log2(math.e)
_VECTOR = 16
"""Bytes of the widest load."""
NUMERIC = {
    "bool": cutlass.Boolean,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": Float32,
}


class MaskArgs(NamedTuple):
    """What a kernel is given."""

    mask: cute.Tensor
    """(Bm, Hm, Sqm, Sk); the first three dimensions are full or 1. Any strides: 0 where Sk is expanded."""
    tables: cute.Tensor
    """Words of int32, as many as `mask_tables.place` says."""


class Mask(NamedTuple):
    """A mask and its tables."""

    plan: MaskPlan
    values: cute.Tensor
    """(Bm, Hm, Sqm, Sk)"""
    bits: cute.Tensor | None
    """(Bm, Hm, Sqm, NB, 4 * panels)"""
    blocks: cute.Tensor
    """(Bm, HB, MB, NB)"""
    rank: cute.Tensor
    """(Bm, HB, MB, NB + 1)"""


class BlockList(NamedTuple):
    """The visible blocks of a tile. `entries` is one word for each, 2 n + mixed, in ascending order."""

    count: Int32
    entries: cute.Tensor
    last: Int32
    """Where the last one stands in `entries`."""


class Block(NamedTuple):
    n: Int32
    mixed: Boolean
    """Whether the mask changes any of its scores."""


class Rows(NamedTuple):
    """Where a thread's rows lie in the mask."""

    values: tuple[Any, ...]
    """(Sk,) for each row."""
    bits: tuple[Any, ...]
    """(NB, 4 * panels) for each row; none if the mask is floating."""


def example_args(plan: MaskPlan) -> MaskArgs:
    """Stands for any mask when a kernel is compiled."""
    numeric = NUMERIC[plan.dtype]
    shape = tuple(cute.sym_int() for _ in range(4))
    stride = tuple(cute.sym_int64() for _ in range(4))
    mask = cute.runtime.make_fake_tensor(numeric, shape, stride, assumed_align=max(numeric.width // 8, 1))
    tables = cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int64(),), assumed_align=_VECTOR)
    return MaskArgs(mask, tables)


@cute.jit
def make_mask(args: MaskArgs, plan: cutlass.Constexpr) -> Mask:
    Bm, Hm, Sqm, Sk = args.mask.shape
    at = place(plan, Int64(Bm), Int64(Hm), Int64(Sqm), Int64(Sk))
    HB, MB, NB = Int32(at.HB), Int32(at.MB), Int32(at.NB)
    base = args.tables.iterator
    values, bits = args.mask, None
    if cutlass.const_expr(plan.dtype == "bool"):
        # A byte each; the DSL's Boolean would be a bit in registers.
        values = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=cutlass.Uint8), values.layout)
        bits = _compact(base, (Bm, Hm, Sqm, NB, 4 * plan.panels))
    blocks = _compact(base + at.blocks, (Bm, HB, MB, NB))
    return Mask(plan, values, bits, blocks, _compact(base + at.rank, (Bm, HB, MB, NB + 1)))


def _compact(base: cute.Pointer, shape: tuple[Any, ...]) -> cute.Tensor:
    """The last dimension is the fastest; strides are 64 bits wide."""
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.append(Int64(size) * strides[-1])
    return cute.make_tensor(base, cute.make_layout(shape, stride=tuple(reversed(strides))))


@cute.jit
def visible_blocks(
    mask: Mask, batch: Int32, head: Int32, block: Int32, first: Int32, last: Int32
) -> BlockList:
    """The blocks `first <= n < last` of keys that the mask leaves to a tile of queries.

    head: any of the tile's. block: the tile's position among the queries, in tiles.
    """
    b, h = within(batch, mask.blocks.shape[0]), within(head // mask.plan.heads, mask.blocks.shape[1])
    m = within(block, mask.blocks.shape[2])
    rank = mask.rank[b, h, m, None]
    end = rank[last]
    return BlockList(end - rank[first], mask.blocks[b, h, m, None], end - 1)


@cute.jit
def block_at(blocks: BlockList, i: Int32) -> Block:
    """The i-th visible block from the last one down; beyond the list no error, and some block or other."""
    entry = blocks.entries[cutlass.max(blocks.last - i, 0)]
    return Block(entry >> 1, (entry & 1) != 0)


@cute.jit
def rows_of(mask: Mask, batch: Int32, heads: tuple[Int32, ...], rows: tuple[Int32, ...]) -> Rows:
    """heads, rows: head and query of each of a thread's rows; those beyond the end are read as the last."""
    Bm, Hm, Sqm, _ = mask.values.shape
    values, bits = [], []
    for r in cutlass.range_constexpr(len(rows)):
        place = within(batch, Bm), within(heads[r], Hm), within(rows[r], Sqm)
        values.append(mask.values[(*place, None)])
        if cutlass.const_expr(mask.bits is not None):
            bits.append(mask.bits[(*place, None, None)])
    return Rows(tuple(values), tuple(bits))


def within(index: Int32, size: Int32) -> Int32:
    """Where a dimension that is full or 1 is read; the last index stands for those beyond."""
    return cutlass.min(index, size - 1)
