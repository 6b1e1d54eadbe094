"""attn_mask on the device: the blocks of keys that a tile visits, and what the mask does to its scores.

An earlier kernel, `kernels.aux_kernels.mask_blocks`, or `mask_transpose` where rows are keys, writes the
tables of `mask_tables`. A role that loads then does

    mask = make_mask(args, plan)
    blocks = visible_blocks(mask, batch, head, block, span.first, span.last)  # once a tile
    for i in range(blocks.count):
        n, partial = block_at(blocks, i)  # from the last to the first; load block n of K and V

and a role that holds scores does

    own = rows_of(mask, batch, heads, rows, lane % 4)  # once a tile
    words = words_of(own, n)  # early: the bits of a bool mask come from memory
    if partial:
        apply(mask, own, words, n, fragment)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from .band import Span
from .fragment import Fragment
from .host import NUMERIC, strided
from .mask_tables import PANEL, MaskPlan, place

AnyContext = TypeVar("AnyContext")
VECTOR = 16
"""Bytes of the widest load."""


Words = tuple[tuple[Uint32, ...], ...]
"""The words of a block that a thread needs of a bool mask, for each row."""


class MaskArgs(NamedTuple):
    """A mask and its tables, as a kernel receives them."""

    mask: cute.Tensor
    """(Bm, Hm, Sqm, Sk); the first three dimensions are full or 1. Any strides: 0 where Sk is expanded."""
    tables: cute.Tensor
    """Words of int32: as many as `mask_tables.place` says, or those of one row of blocks."""


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
    """The visible blocks of a tile. `entries` has a word for each, 2 n + partial, in ascending order."""

    count: Int32
    entries: cute.Tensor
    last: Int32
    """Index of the tile's last block in `entries`."""


class Block(NamedTuple):
    n: Int32
    partial: Boolean
    """Whether the mask changes any of its scores."""


class Rows(NamedTuple):
    """A thread's rows of the mask."""

    values: tuple[cute.Tensor, ...]
    """(Sk,) for each row."""
    bits: tuple[cute.Tensor, ...]
    """(NB, words) for each row: the words of a block that the thread needs; empty if the mask is floating."""
    aligned: Boolean
    """Floating masks: whether `run` keys of a row can be loaded at once."""
    run: int
    """Number of neighbouring keys that a thread has, at most 16 bytes of them."""
    shared: Boolean | None
    """Whether a thread, which has two of every eight keys, loads eight at once, for itself and three lanes;
    None if the kernel does not."""


def example_args(plan: MaskPlan) -> MaskArgs:
    """A mask and tables that stand for any others when a kernel is compiled."""
    mask = strided(NUMERIC[plan.dtype], 4)
    tables = cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int64(),), assumed_align=VECTOR)
    return MaskArgs(mask, tables)


@cute.jit
def make_mask(args: MaskArgs, plan: cutlass.Constexpr) -> Mask:
    Bm, Hm, Sqm, Sk = args.mask.shape
    at = place(plan, Int64(Bm), Int64(Hm), Int64(Sqm), Int64(Sk))
    HB, MB, NB = Int32(at.HB), Int32(at.MB), Int32(at.NB)
    base = args.tables.iterator
    values, bits = args.mask, None
    if cutlass.const_expr(plan.dtype == "bool"):
        # A byte per key; the DSL's Boolean would be a bit in registers.
        values = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=cutlass.Uint8), values.layout)
        bits = _compact(base, (Bm, Hm, Sqm, NB, 4 * plan.panels))
    rows, between = (Bm, HB, MB), at.rank - at.blocks
    if cutlass.const_expr(plan.dtype != "bool"):
        is_one_row = args.tables.shape[0] == 2 * at.NB + 1
        rows = tuple(cutlass.select_(is_one_row, Int32(1), Int32(size)) for size in rows)
        between = cutlass.select_(is_one_row, at.NB, between)
    blocks = base + at.blocks
    rank = _compact(blocks + between, (*rows, NB + 1))
    return Mask(plan, values, bits, _compact(blocks, (*rows, NB)), rank)


def with_mask(ctx: AnyContext, args: MaskArgs | None) -> AnyContext:
    """The context of one role, with the mask.

    It is built per role: built once for all, it would stay live from kernel entry and spill (ptxas.md, P15).
    """
    return ctx if args is None else replace(ctx, mask=make_mask(args, ctx.plan.mask))


def _compact(base: cute.Pointer, shape: tuple[Any, ...]) -> cute.Tensor:
    """A contiguous tensor: the last dimension is the fastest, and strides are 64 bits wide."""
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.append(Int64(size) * strides[-1])
    return cute.make_tensor(base, cute.make_layout(shape, stride=tuple(reversed(strides))))


@cute.jit
def visible_blocks(
    mask: Mask, batch: Int32, head: Int32, block: Int32, first: Int32, last: Int32
) -> BlockList:
    """The blocks `first <= n < last` of keys that the mask leaves visible to a tile of queries.

    head: any of the tile's. block: the tile's position among the queries, in tiles.
    """
    b, h = within(batch, mask.blocks.shape[0]), within(head // mask.plan.heads, mask.blocks.shape[1])
    m = within(block, mask.blocks.shape[2])
    rank = mask.rank[b, h, m, None]
    end = rank[last]
    return BlockList(end - rank[first], mask.blocks[b, h, m, None], end - 1)


@cute.jit
def positions(mask: Mask, batch: Int32, head: Int32, block: Int32, span: Span) -> Span:
    """The positions of a narrower span's visible blocks among the entries of the tile's list."""
    b, h = within(batch, mask.blocks.shape[0]), within(head // mask.plan.heads, mask.blocks.shape[1])
    rank = mask.rank[b, h, within(block, mask.blocks.shape[2]), None]
    return Span(rank[span.first], rank[span.last])


@cute.jit
def block_at(blocks: BlockList, i: Int32) -> Block:
    """The i-th visible block, from the last one down. Past the list's end n is arbitrary, not an error."""
    entry = blocks.entries[cutlass.max(blocks.last - i, 0)]
    return Block(entry >> 1, (entry & 1) != 0)


@cute.jit
def rows_of(
    mask: Mask,
    batch: Int32,
    heads: tuple[Int32, ...],
    rows: tuple[Int32, ...],
    pair: Int32 | None = None,
    shares: cutlass.Constexpr = False,
) -> Rows:
    """The mask of a thread's rows; rows beyond the end are read as the last one.

    heads, rows: query head and query of each row. pair: which two of every eight keys are the thread's, lane
    % 4 for a wgmma accumulator; None: all are. shares: where rows of a floating mask of 16 bits differ and a
    thread has pairs, four lanes load eight keys each for one another. That takes registers, and the L1 cache
    a quarter of the time; lanes that load a row together do not need it.
    """
    Bm, Hm, Sqm, _ = mask.values.shape
    values, bits = [], []
    for r in cutlass.range_constexpr(len(rows)):
        place = within(batch, Bm), within(heads[r], Hm), within(rows[r], Sqm)
        values.append(mask.values[(*place, None)])
        if cutlass.const_expr(mask.bits is not None):
            row = mask.bits[(*place, None, None)]
            if cutlass.const_expr(pair is not None):
                words = cute.make_layout((row.shape[0], mask.plan.panels), stride=(row.stride[0], 4))
                row = cute.make_tensor(row.iterator + pair, words)
            bits.append(row)
    width = mask.values.element_type.width
    run, shared = 2 if pair is not None else VECTOR * 8 // width, None
    if cutlass.const_expr(shares and width == 16):
        shared = is_aligned(mask.values, 8) & (Sqm > 1)
    return Rows(tuple(values), tuple(bits), is_aligned(mask.values, run), run, shared)


@cute.jit
def words_of(own: Rows, n: Int32) -> tuple[cute.Tensor, ...]:
    """The bits of block n for each row, to be loaded early; empty if the mask is floating."""
    words = []
    for r in cutlass.range_constexpr(len(own.bits)):
        row = own.bits[r][n, None]
        loaded = cute.make_rmem_tensor(cute.size(row), Uint32)
        width = 1 if row.stride[0] == 4 else 4
        for w in cutlass.range_constexpr(0, cute.size(row), width):
            start = row.iterator + w * row.stride[0]
            into = cute.make_tensor(loaded.iterator + w, cute.make_layout(width))
            cute.autovec_copy(vector_at(start, width, Uint32), into)
        words.append(loaded)
    return tuple(words)


@cute.jit
def words_at(mask: Mask, batch: Int32, head: Int32, rows: tuple[Int32, ...], n: Int32, pair: Int32) -> Words:
    """What `words_of` loads, for kernels that find a thread's rows of a bool mask anew for every block: few
    instructions, most of them for all rows together.
    """
    Bm, Hm, Sqm, NB, size = mask.bits.shape
    first = (within(batch, Bm) * Hm + within(head, Hm)) * Sqm
    each = size * Uint32.width // 8
    start, words = mask.bits.iterator.toint() + Int64(n * each + pair * 4), []
    for row in rows:
        # 32 bits suffice for a row's number and for its bytes, but not for their product.
        place = start + Int64(Uint64(Uint32(first + within(row, Sqm))) * Uint64(Uint32(NB * each)))
        own = cute.make_ptr(Uint32, place, cute.AddressSpace.gmem, assumed_align=4)
        panels = cute.make_tensor(own, cute.make_layout(mask.plan.panels, stride=4))
        words.append(tuple(panels[p] for p in range(mask.plan.panels)))
    return tuple(words)


def all_ones(plan: MaskPlan, rows: int) -> Words:
    """Words that hide nothing, in the place of those that `words_at` loads."""
    return tuple(tuple(Uint32(0xFFFFFFFF) for _ in range(plan.panels)) for _ in range(rows))


@cute.jit
def apply(
    mask: Mask,
    own: Rows,
    words: tuple[cute.Tensor, ...],
    n: Int32,
    fragment: Fragment,
    one_by_one: cutlass.Constexpr = False,
) -> None:
    """Mask scores of block n, or add to them; for a floating mask they are already scaled, in natural units.

    one_by_one: keys of a floating mask that are not neighbours are read row after row, for lack of registers.

    The fragment's column 0 is the first of the thread's keys in the block. Scores of keys beyond Sk become
    arbitrary; a block in which the mask changes nothing (`partial` is false) needs no call.
    """
    if cutlass.const_expr(mask.plan.dtype == "bool"):
        mask_out(words, fragment)
    elif cutlass.const_expr(one_by_one):
        _add_one_by_one(mask, own, n, fragment)
    else:
        _add(mask, own, n, fragment)


@cute.jit
def prefetch(mask: Mask, own: Rows, n: Int32, lane: Int32) -> None:
    """Bring block n of a floating mask to the L2 cache; four lanes of a row name a quarter of it each."""
    quarter = mask.plan.keys // 4
    key = within(n * mask.plan.keys + lane % 4 * quarter, mask.values.shape[3])
    for row in own.values:
        place = row.iterator.toint() + Int64(key) * row.stride[0] * (row.element_type.width // 8)
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[place])


def mask_out(words: tuple[cute.Tensor, ...], fragment: Fragment) -> None:
    """Mask scores by the words of a bool mask."""
    scores = fragment.values
    one_pair = all(offset % 8 < 2 for offset in fragment.offsets)
    for r in range(len(fragment.rows)):
        for c, offset in enumerate(fragment.offsets):
            panel, key = divmod(offset, PANEL)
            word = words[r][panel if one_pair else 4 * panel + key % 8 // 2]
            visible = (word & (1 << (key // 8 * 2 + key % 2))) != 0
            scores[r, c] = cutlass.select_(visible, scores[r, c], -Float32.inf)


@cute.jit
def _add(mask: Mask, own: Rows, n: Int32, fragment: Fragment) -> None:
    rows, is_whole = range(len(own.values)), (n + 1) * mask.plan.keys <= mask.values.shape[3]
    if cutlass.const_expr(own.shared is None):
        if own.aligned and is_whole:
            _add_runs(own, fragment, rows)
        else:
            _add_keys(own, fragment, rows, mask.values.shape[3])
    else:
        if own.shared and is_whole:
            _add_runs(own, fragment, rows, 8)
        elif own.aligned and is_whole:
            _add_runs(own, fragment, rows)
        else:
            _add_keys(own, fragment, rows, mask.values.shape[3])


@cute.jit
def _add_one_by_one(mask: Mask, own: Rows, n: Int32, fragment: Fragment) -> None:
    """Add by branches on votes: the compiler would merge branches on one condition, and put all sums after
    them.

    Then every number would have a register there, and so would every key's offset, where keys are read one by
    one.
    """
    rows = range(len(own.values))
    aligned = own.aligned & ((n + 1) * mask.plan.keys <= mask.values.shape[3])
    if cute.arch.vote_any_sync(aligned):
        _add_runs(own, fragment, rows)
    for r in cutlass.range_constexpr(len(own.values)):
        if not cute.arch.vote_any_sync(aligned):
            _add_keys(own, fragment, (r,), mask.values.shape[3])


_OF_FOUR_LANES = (0, 1, 8, 9, 16, 17, 24, 25)
"""Offsets of a thread's keys among 32 that it shares with three lanes."""


def _add_runs(own: Rows, fragment: Fragment, rows: Sequence[int], most: int = 0) -> None:
    """Add runs of neighbours; most: as many keys at once where four lanes can share them, else `own.run`."""
    scores, offsets, c = fragment.values, fragment.offsets, 0
    while c < len(offsets):
        is_shared = tuple(x - offsets[c] for x in offsets[c : c + most]) == _OF_FOUR_LANES
        size = most if is_shared else own.run
        for r in rows:
            start = own.values[r].iterator + (fragment.key + offsets[c])
            numbers = _load_shared(start) if is_shared else _load(start, size)
            for i in range(size):
                scores[r, c + i] = scores[r, c + i] + numbers[i].to(Float32)
        c += size


def _load(start: cute.Pointer, run: int) -> cute.Tensor:
    loaded = cute.make_rmem_tensor(run, start.dtype)
    cute.autovec_copy(vector_at(start, run), loaded)
    return loaded


def _load_shared(start: cute.Pointer) -> cute.Tensor:
    """Two of every eight of 32 keys, from `start` on. Lane l of four loads keys 8 l to 8 l + 7; its own first
    one is 2 l.
    """
    lane = cute.arch.lane_idx() % 4
    loaded, own = _load(start + 6 * lane, 8), cute.make_rmem_tensor(4, Uint32)
    words = cute.recast_tensor(loaded, Uint32)
    for i, word in enumerate(_transposed([words[i] for i in range(4)], lane)):
        own[i] = word
    return cute.recast_tensor(own, start.dtype)


def _transposed(words: list[Uint32], lane: Int32) -> list[Uint32]:
    """Word `lane` of each of four lanes, which hold four words each."""
    for bit in (1, 2):
        is_upper = (lane & bit) != 0
        for i in (i for i in range(4) if not i & bit):
            low, high = words[i], words[i | bit]
            other = cute.arch.shuffle_sync_bfly(cutlass.select_(is_upper, low, high), bit)
            words[i] = cutlass.select_(is_upper, other, low)
            words[i | bit] = cutlass.select_(is_upper, high, other)
    return words


def _add_keys(own: Rows, fragment: Fragment, rows: Sequence[int], Sk: Int32) -> None:
    for r in rows:
        for c, offset in enumerate(fragment.offsets):
            x = own.values[r][within(fragment.key + offset, Sk)].to(Float32)
            fragment.values[r, c] = fragment.values[r, c] + x


@cute.jit
def add_by_steps(mask: Mask, own: Rows, fragment: Fragment) -> None:
    """Add a floating mask to one row of neighbouring keys, like `apply`, stepping from one number's address
    to the next.

    It is for rows whose numbers are seldom contiguous: there are no vector loads, nor a branch for them.
    """
    row, scores, Sk = own.values[0], fragment.values, mask.values.shape[3]
    each = row.element_type.width // 8
    step = row.stride[0] * each
    place = row.iterator.toint() + within(fragment.key, Sk) * step
    for i in cutlass.range_constexpr(len(fragment.offsets)):
        number = cute.make_ptr(row.element_type, place, cute.AddressSpace.gmem, assumed_align=each)
        x = cute.make_tensor(number, cute.make_layout(1))[0].to(Float32)
        scores[0, i] = scores[0, i] + x
        place = place + cutlass.select_(fragment.key + i + 1 < Sk, step, Int64(0))


def vector_at(start: cute.Pointer, size: int, numeric: Any = None) -> cute.Tensor:
    """A view of `size` neighbours, which one instruction loads or stores; `start` is a multiple of their
    bytes.
    """
    numeric = numeric or start.dtype
    align = size * numeric.width // 8
    pointer = cute.make_ptr(numeric, start.toint(), cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(size))


def is_aligned(values: cute.Tensor, size: int, along: int = 3) -> Boolean:
    """Whether the keys of a row are neighbours, and each row begins at a multiple of `size` keys.

    along: the dimension to ask of, 3 for keys; 2 for the rows of a column.
    """
    others = [d for d in range(4) if d != along]
    # A dimension of 1 may have any stride, which is never used.
    b, h, i = (cutlass.select_(values.shape[d] > 1, values.stride[d], Int64(0)) for d in others)
    odd = values.iterator.toint() & (size * values.element_type.width // 8 - 1) | (b | h | i) & (size - 1)
    return (values.stride[along] == 1) & (odd == 0)


def within(index: Int32, size: Int32) -> Int32:
    """The index to read in a dimension that is full or 1: the last index stands for those beyond."""
    return cutlass.min(index, size - 1)
