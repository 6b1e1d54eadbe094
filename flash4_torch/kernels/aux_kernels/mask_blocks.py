"""Reads an attn_mask once and writes the tables by which the attention kernels walk and apply it.

A CTA has the rows of one block of queries and goes through all keys, `THREADS` blocks of keys at a time. A
warp takes some of these blocks and a few rows: every lane loads 16 bytes of each row, so that a warp's loads
lie side by side. Ballots tell what the warp's blocks hold, shared memory gathers that over the rows, and a
running count over the threads, one block each, lists the visible blocks. Rows that do not start at a multiple
of 16 bytes, and rows whose keys are not contiguous, are loaded one key at a time.

Where few blocks of queries have many keys, several CTAs divide the keys of each. They leave what blocks hold
in the list's place, and a second launch lists them.

A column-major mask is a view whose rows are neighbours in memory, as keys are for the backward. There a warp
takes a whole block, and its lanes lie along the rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from ..common import dependent_launch
from ..common.attn_mask import Mask, MaskArgs, example_args, is_aligned, make_mask, vector_at, within
from ..common.mask_tables import PANEL, MaskPlan

WARP = 32
THREADS = 512
WARPS = THREADS // WARP
DEPTH = 8
"""Loads of a lane in flight."""
VISIBLE, PARTIAL = 1, 2
_FEW_CTAS = 128
"""CTAs that keys are divided among, at most."""
_LEAST_TURNS, _LEAST_PARTS = 4, 3
"""Loads of each warp in a part of the keys, and parts, at least: fewer would take less time than a launch."""


class Shape(NamedTuple):
    """How a warp is laid over the keys of blocks."""

    step: int
    """Keys of a lane's load."""
    lanes: int
    """Neighbouring lanes on a block."""
    turns: int
    """Loads of each lane to cover a block."""
    rows: int
    """Rows that a warp loads together."""

    @property
    def blocks(self) -> int:
        """Blocks of keys of a warp."""
        return WARP // self.lanes


def shape_of(plan: MaskPlan) -> Shape:
    if plan.dtype == "bool":
        # Lanes cover whole panels of 128 keys, even if the block ends inside: they make its words together.
        return Shape(16, plan.panels * PANEL // 16, 1, min(DEPTH, plan.rows))
    step = 4 if plan.dtype == "float32" else 8
    vectors = plan.keys // step
    lanes = math.gcd(vectors, WARP)
    turns = vectors // lanes
    return Shape(step, lanes, turns, max(1, min(DEPTH // turns, plan.rows)))


def compile_mask_blocks(plan: MaskPlan) -> Any:
    """The kernel for any sizes and strides; call it as (mask, tables).

    mask (Bm, Hm, Sqm, Sk): of the plan's dtype, each of the first three dimensions full or 1, Sk in full (as
    a view of stride 0 where it broadcasts). tables: int32, 16-byte aligned; `mask_tables.place` gives their
    size. No size may be 0. Runs on the current stream.
    """
    assert plan.keys % 16 == 0 and 16 <= plan.keys <= 256
    if plan.column_major:
        assert plan.dtype != "bool" and plan.heads == 1 and plan.rows in (16, 32, 64, 128)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(mask_blocks, *example_args(plan), plan, stream, options="--enable-tvm-ffi")


@cute.jit
def mask_blocks(
    values: cute.Tensor, tables: cute.Tensor, plan: cutlass.Constexpr, stream: cuda.CUstream
) -> None:
    mask = make_mask(MaskArgs(values, tables), plan)
    B, HB, MB, NB = mask.blocks.shape
    groups, block = B * HB * MB, (THREADS, 1, 1)
    parts = Int32(1)
    if cutlass.const_expr(not plan.column_major):
        parts = cutlass.min(_FEW_CTAS // groups, _turns(mask) // _LEAST_TURNS)
    if parts >= _LEAST_PARTS:
        blocks = shape_of(plan).blocks
        each = cute.ceil_div(cute.ceil_div(NB, parts), blocks) * blocks
        mask_blocks_kernel(values, tables, each, plan, False).launch(
            grid=(groups, cute.ceil_div(NB, each), 1), block=block, stream=stream
        )
        list_kernel(values, tables, plan).launch(
            grid=(groups, 1, 1), block=block, stream=stream, use_pdl=dependent_launch.is_possible()
        )
    else:
        mask_blocks_kernel(values, tables, NB, plan, True).launch(
            grid=(groups, 1, 1), block=block, stream=stream
        )


def _turns(mask: Mask) -> Int32:
    """Times that each warp loads, if a CTA has all keys of its queries."""
    plan, shape = mask.plan, shape_of(mask.plan)
    _, Hm, Sqm, _ = mask.values.shape
    rows = cutlass.min(plan.rows, Sqm) * cutlass.min(plan.heads, Hm)
    return cute.ceil_div(mask.blocks.shape[3], shape.blocks) * rows // (shape.rows * WARPS)


class Queries(NamedTuple):
    """A block of queries, by the indices of its row of the tables."""

    batch: Int32
    head_block: Int32
    m: Int32


def _queries(mask: Mask, group: Int32) -> Queries:
    _, HB, MB, _ = mask.blocks.shape
    rest = group // MB
    return Queries(rest // HB, rest % HB, group % MB)


@cute.kernel
def mask_blocks_kernel(
    values: cute.Tensor, tables: cute.Tensor, each: Int32, plan: cutlass.Constexpr, lists: cutlass.Constexpr
) -> None:
    """Examine `each` blocks of keys; list them if these are all."""
    mask = make_mask(MaskArgs(values, tables), plan)
    thread, _, _ = cute.arch.thread_idx()
    group, part, _ = cute.arch.block_idx()
    own, NB = _queries(mask, group), mask.blocks.shape[3]

    memory = SmemAllocator()
    state = memory.allocate_tensor(Int32, cute.make_layout(THREADS), byte_alignment=16)
    counts = memory.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)

    step, along = shape_of(plan).step, 2 if plan.column_major else 3
    aligned = is_aligned(mask.values, step, along) & (mask.values.shape[along] % step == 0)
    blocks, rank = mask.blocks[(*own, None)], mask.rank[(*own, None)]
    total = Int32(0)
    begin, end = Int32(0), NB
    if cutlass.const_expr(not lists):
        begin, end = part * each, cutlass.min((part + 1) * each, NB)
    for first in cutlass.range(begin, end, THREADS, unroll=1):
        state[thread] = 0
        cute.arch.sync_threads()
        if cutlass.const_expr(plan.column_major):
            _examine_columns(mask, own.batch, own.head_block, own.m, first, aligned, state)
        else:
            _examine(mask, own.batch, own.head_block, own.m, first, end, aligned, state)
        cute.arch.sync_threads()
        if cutlass.const_expr(lists):
            total = list_blocks(blocks, rank, first, NB, state[thread], counts, total)
        elif first + thread < end:
            blocks[first + thread] = state[thread]
    if cutlass.const_expr(lists):
        if thread == 0:
            rank[NB] = total


@cute.kernel
def list_kernel(values: cute.Tensor, tables: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """List the visible blocks in the place of what all of them hold."""
    dependent_launch.wait_for_previous_kernel()
    mask = make_mask(MaskArgs(values, tables), plan)
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    own, NB = _queries(mask, group), mask.blocks.shape[3]
    counts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
    blocks, rank = mask.blocks[(*own, None)], mask.rank[(*own, None)]
    total = Int32(0)
    for first in cutlass.range(0, NB, THREADS, unroll=1):
        found = Int32(0)
        if first + thread < NB:
            found = blocks[first + thread]
        # All have read what they overwrite, and the counts of the turn before.
        cute.arch.sync_threads()
        total = list_blocks(blocks, rank, first, NB, found, counts, total)
    if thread == 0:
        rank[NB] = total


@cute.jit
def _examine(
    mask: Mask,
    batch: Int32,
    head_block: Int32,
    m: Int32,
    first: Int32,
    last: Int32,
    aligned: Boolean,
    state: cute.Tensor,
) -> None:
    """Find out what the blocks from `first` to `last` hold, in `state`, and write bits of a bool mask."""
    plan = mask.plan
    shape = shape_of(plan)
    _, Hm, Sqm, _ = mask.values.shape
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()

    end = cutlass.min((m + 1) * plan.rows, Sqm)
    columns = cute.ceil_div(cutlass.min(last - first, THREADS), shape.blocks)
    parts = cute.ceil_div(end - m * plan.rows, shape.rows)
    heads = cutlass.min(plan.heads, Hm)
    for item in cutlass.range(warp, columns * parts * heads, WARPS, unroll=1):
        column, rest = item % columns, item // columns
        head = head_block * plan.heads + rest // parts
        row = m * plan.rows + rest % parts * shape.rows
        slot = column * shape.blocks + lane // shape.lanes
        seen, changed = _look(mask, batch, head, row, end, first + slot, lane % shape.lanes, aligned)
        own = ((1 << shape.lanes) - 1) << (lane - lane % shape.lanes)
        seen = cute.arch.vote_ballot_sync(seen) & own
        changed = cute.arch.vote_ballot_sync(changed) & own
        if lane % shape.lanes == 0 and seen | changed:
            found = (VISIBLE if seen != 0 else 0) | (PARTIAL if changed != 0 else 0)
            cute.arch.atomic_or(state.iterator + slot, Int32(found), sem="relaxed", scope="cta")


@cute.jit
def _examine_columns(
    mask: Mask, batch: Int32, head: Int32, m: Int32, first: Int32, aligned: Boolean, state: cute.Tensor
) -> None:
    """Find out what the blocks from `first` on of a column-major mask hold, in `state`."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    step = shape_of(mask.plan).step
    for slot in cutlass.range(warp, cutlass.min(mask.blocks.shape[3] - first, THREADS), WARPS, unroll=1):
        seen, changed = Boolean(False), Boolean(False)
        if aligned:
            seen, changed = _look_down(mask, batch, head, m, first + slot, step)
        else:
            seen, changed = _look_down(mask, batch, head, m, first + slot, 1)
        seen, changed = cute.arch.vote_any_sync(seen), cute.arch.vote_any_sync(changed)
        if lane == 0:
            state[slot] = (VISIBLE if seen else 0) | (PARTIAL if changed else 0)


@cute.jit
def _look_down(
    mask: Mask, batch: Int32, head: Int32, m: Int32, n: Int32, step: cutlass.Constexpr
) -> tuple[Boolean, Boolean]:
    """A lane's part of block n: whether any of its numbers is visible, whether any changes scores.

    step: neighbouring rows that a lane loads at once. Rows and keys beyond the end are read as the last ones.
    """
    plan, lane = mask.plan, cute.arch.lane_idx()
    lanes = min(plan.rows // step, WARP)
    turns, at_once = plan.rows // (step * lanes), WARP // lanes
    depth = min(max(DEPTH // turns, 1), plan.keys // at_once)
    _, _, rows, keys = mask.values.shape
    seen, changed = Boolean(False), Boolean(False)
    for part in cutlass.range(plan.keys // (at_once * depth), unroll=1):
        loaded = cute.make_rmem_tensor((step, turns, depth), mask.values.element_type)
        for d in cutlass.range_constexpr(depth):
            key = within(n * plan.keys + (part * depth + d) * at_once + lane // lanes, keys)
            for t in cutlass.range_constexpr(turns):
                row = m * plan.rows + (t * lanes + lane % lanes) * step
                number = mask.values[batch, head, None, key]
                if cutlass.const_expr(step > 1):
                    start = number.iterator + cutlass.min(row, rows - step)
                    cute.autovec_copy(vector_at(start, step), loaded[None, t, d])
                else:
                    loaded[0, t, d] = number[within(row, rows)]
        for i in cutlass.range(cute.size(loaded), unroll_full=True):
            x = loaded[i].to(Float32)
            seen, changed = seen | (x != -Float32.inf), changed | (x != 0.0)
    return seen, changed


@cute.jit
def _look(
    mask: Mask, batch: Int32, head: Int32, row: Int32, end: Int32, n: Int32, lane: Int32, aligned: Boolean
) -> tuple[Boolean, Boolean]:
    """A lane's keys of block n in a few rows from `row` on: whether any is visible, whether any is changed.

    lane: index among the lanes on the block. end: end of the rows. Keys and rows beyond the end are loaded as
    the last one.
    """
    rows = shape_of(mask.plan).rows
    seen, changed = Boolean(False), Boolean(False)
    if aligned:
        loaded = _load_vectors(mask, batch, head, row, end, n, lane, rows)
        seen, changed = _judge(mask, batch, head, row, end, n, lane, loaded)
    else:
        # In a loop: the unrolled loads of all rows would take more registers than there are.
        for r in cutlass.range(row, cutlass.min(row + rows, end), unroll=1):
            loaded = _load_keys(mask, batch, head, r, n, lane)
            one_seen, one_changed = _judge(mask, batch, head, r, end, n, lane, loaded)
            seen, changed = seen | one_seen, changed | one_changed
    return seen, changed


def _load_vectors(
    mask: Mask, batch: Int32, head: Int32, row: Int32, end: Int32, n: Int32, lane: Int32, rows: int
) -> cute.Tensor:
    """The lane's keys, (step, turns, rows)."""
    shape = shape_of(mask.plan)
    last = _end(mask, n) - shape.step
    loaded = cute.make_rmem_tensor((shape.step, shape.turns, rows), mask.values.element_type)
    for r in range(rows):
        source = mask.values[batch, head, cutlass.min(row + r, end - 1), None]
        for t in range(shape.turns):
            start = source.iterator + cutlass.min(_key(mask.plan, n, lane, t), last)
            cute.autovec_copy(vector_at(start, shape.step), loaded[None, t, r])
    return loaded


def _load_keys(mask: Mask, batch: Int32, head: Int32, row: Int32, n: Int32, lane: Int32) -> cute.Tensor:
    """The lane's keys of one row, (step, turns, 1), loaded one by one."""
    shape = shape_of(mask.plan)
    source = mask.values[batch, head, row, None]
    loaded = cute.make_rmem_tensor((shape.step, shape.turns, 1), mask.values.element_type)
    for t in range(shape.turns):
        for i in range(shape.step):
            loaded[i, t, 0] = source[within(_key(mask.plan, n, lane, t) + i, mask.values.shape[3])]
    return loaded


def _key(plan: MaskPlan, n: Int32, lane: Int32, turn: int) -> Int32:
    """The first key of a lane's load."""
    shape = shape_of(plan)
    return n * plan.keys + (turn * shape.lanes + lane) * shape.step


def _end(mask: Mask, n: Int32) -> Int32:
    """The end of the keys of block n."""
    return cutlass.min((n + 1) * mask.plan.keys, mask.values.shape[3])


@cute.jit
def _judge(
    mask: Mask,
    batch: Int32,
    head: Int32,
    row: Int32,
    end: Int32,
    n: Int32,
    lane: Int32,
    loaded: cute.Tensor,
) -> tuple[Boolean, Boolean]:
    """What `_look` returns, from loaded rows; stores the bits of a bool mask."""
    shape = shape_of(mask.plan)
    rows = loaded.shape[2]
    inside = _end(mask, n) - _key(mask.plan, n, lane, 0)
    seen, changed = Boolean(False), Boolean(False)
    if cutlass.const_expr(mask.plan.dtype == "bool"):
        keep = _spread(cutlass.max(cutlass.min(inside, shape.step), 0))
        some, hidden = Uint32(0), Uint32(0)
        bits, NB = mask.bits, mask.blocks.shape[3]
        for r in cutlass.range_constexpr(rows):
            shown = _gather(cute.recast_tensor(loaded[None, 0, r], Uint32))
            some, hidden = some | shown & keep, hidden | ~shown & keep
            word = _transpose(shown & keep, lane)
            if row + r < end and n < NB and lane % 2 == 0:
                bits[batch, head, row + r, n, lane // 8 * 4 + lane % 8 // 2] = Int32(word)
        seen, changed = some != 0, hidden != 0
    else:
        for i in cutlass.range(cute.size(loaded), unroll_full=True):
            x = loaded[i].to(Float32)
            seen, changed = seen | (x != -Float32.inf), changed | (x != 0.0)
        seen, changed = seen & (inside > 0), changed & (inside > 0)
    return seen, changed


def _spread(count: Int32) -> Uint32:
    """A mask of the lowest `count` of 16 keys: key k is bit 8 (k % 8 // 2) + 2 (k // 8) + k % 2."""
    keys = (Uint32(1) << Uint32(count)) - 1
    result = Uint32(0)
    for p in range(4):
        pairs = (keys >> (2 * p) & 3) | (keys >> (8 + 2 * p) & 3) << 2
        result = result | pairs << (8 * p)
    return result


def _gather(words: cute.Tensor) -> Uint32:
    """A bit for each of 16 bytes, whether it is not 0, in the order of `_spread`."""
    marks = [((w & 0x7F7F7F7F) + 0x7F7F7F7F | w) & 0x80808080 for w in (words[i] for i in range(4))]
    # Bits 0 and 2 of each byte: a key of the first eight, and the one eight further.
    low, high = (marks[i] >> 7 | marks[i + 2] >> 5 for i in range(2))
    low, high = low | low >> 7, high | high >> 7
    return Uint32(cute.arch.prmt(low, high, 0x6420)) & 0x0F0F0F0F


def _transpose(own: Uint32, lane: Int32) -> Uint32:
    """Words of panels from lanes' 16 keys: among 8 lanes, lanes 2 p and 2 p + 1 get word p.

    own: byte p has the lane's four bits of word p.
    """
    own = own << Uint32(4 * (lane & 1))
    own = own | cute.arch.shuffle_sync_bfly(own, 1)
    # What is left is a square, four bytes of four pairs of lanes, which two exchanges transpose.
    other = cute.arch.shuffle_sync_bfly(own, 2)
    own = Uint32(cute.arch.prmt(own, other, cutlass.select_((lane & 2) == 0, Int32(0x6240), Int32(0x3715))))
    other = cute.arch.shuffle_sync_bfly(own, 4)
    return Uint32(cute.arch.prmt(own, other, cutlass.select_((lane & 4) == 0, Int32(0x5410), Int32(0x3276))))


@cute.jit
def list_blocks(
    blocks: cute.Tensor,
    rank: cute.Tensor,
    first: Int32,
    NB: Int32,
    found: Int32,
    counts: cute.Tensor,
    total: Int32,
) -> Int32:
    """Append the visible ones of the blocks from `first` on to `total` others; returns the new total."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    visible = (found & VISIBLE) != 0
    ballot = cute.arch.vote_ballot_sync(visible)
    if lane == 0:
        counts[warp] = cute.arch.popc(ballot)
    cute.arch.sync_threads()
    place = total + cute.arch.popc(ballot & Int32(cute.arch.lanemask_lt()))
    for w in cutlass.range_constexpr(WARPS):
        total = total + counts[w]
        place = place + (counts[w] if w < warp else 0)
    n = first + thread
    if n < NB:
        rank[n] = place
        if visible:
            blocks[place] = 2 * n + (found & PARTIAL) // PARTIAL
    return total
