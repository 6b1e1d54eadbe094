"""Reads an attn_mask whose keys are neighbours once, for a kernel whose rows are keys: writes the mask
transposed, and the tables by which the kernel walks and applies it.

The rows of the mask's tensor are keys, as everywhere in the backward, but they are neighbours in memory.
A CTA has one block of a floating mask, and takes 128 bytes of each query's keys at a time: lanes load 16
bytes, look at the numbers, and put them into shared memory, from where they come transposed, 16 bytes of a
key's queries. A swizzle keeps lanes in different banks both ways.

Of a bool mask the attention kernels read the bits alone, so it needs no copy: a lane has 16 keys and every
fourth pair of queries, which are one word of a panel.

First the list of blocks has at each block's place what the block holds. A second kernel makes the list of
it, in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from ..common import dependent_launch, host
from ..common.attn_mask import VECTOR, Mask, MaskArgs, example_args, is_aligned, make_mask, vector_at, within
from ..common.mask_tables import PANEL, MaskPlan
from .mask_blocks import PARTIAL, THREADS, VISIBLE, WARP, list_kernel

TILE_THREADS = 128
TILE_WARPS = TILE_THREADS // WARP
SPAN = 128
"""Bytes of a query's keys in shared memory: all banks once."""
VECTORS = SPAN // VECTOR
ROWS = TILE_THREADS // VECTORS
"""Queries that a CTA loads together."""
PATCH = 32
"""Queries that a warp takes from shared memory at a time."""
BIT_THREADS = 256
WORDS = 4
"""Words of 16 bytes, and of a panel."""


class Strip(NamedTuple):
    """The part of a block that is in shared memory at a time: its keys, of all of the block's queries."""

    mask: Mask
    place: tuple[Int32, Int32]
    """Batch entry and head."""
    key: Int32
    """The first one."""
    query: Int32
    """The first one of the block."""
    base: Int32
    """Address in shared memory, of (queries, 128 bytes)."""


def compile_mask_transpose(plan: MaskPlan) -> Any:
    """The kernels for any sizes and strides; call them as (mask, copy, tables).

    mask (Bm, Hm, Sk, Sq): of the plan's dtype, any strides, though it is fast if keys are contiguous and
    queries begin at multiples of 16 bytes. copy: None for a bool mask, else a tensor of its dtype that
    becomes it, (Bm, Hm, Sk, Sq rounded up to a multiple of 8), contiguous, 16-byte aligned; beyond Sq it
    gets other numbers of the mask. tables: int32, 16-byte aligned; `mask_tables.place` gives their size. No
    size may be 0. Runs on the current stream.
    """
    assert plan.rows % PATCH == 0 and plan.keys % PATCH == 0 and plan.heads == 1 and not plan.column_major
    mask, tables = example_args(plan)
    copy = None if plan.dtype == "bool" else host.rows(host.NUMERIC[plan.dtype], host.any_sizes(4))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(mask_transpose, mask, copy, tables, plan, stream, options="--enable-tvm-ffi")


@cute.jit
def mask_transpose(
    values: cute.Tensor,
    copy: cute.Tensor | None,
    tables: cute.Tensor,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    B, H, MB, NB = make_mask(MaskArgs(values, tables), plan).blocks.shape
    if cutlass.const_expr(copy is None):
        parts = cute.ceil_div(NB, _blocks_at_once(plan))
        bits_kernel(values, tables, plan).launch(
            grid=(B * H * MB * parts, 1, 1), block=(BIT_THREADS, 1, 1), stream=stream
        )
    else:
        copy_kernel(values, copy, tables, plan).launch(
            grid=(B * H * MB * NB, 1, 1), block=(TILE_THREADS, 1, 1), stream=stream
        )
    list_kernel(values, tables, plan).launch(
        grid=(B * H * MB, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=dependent_launch.is_possible()
    )


@cute.kernel
def copy_kernel(values: cute.Tensor, copy: cute.Tensor, tables: cute.Tensor, plan: cutlass.Constexpr) -> None:
    mask = make_mask(MaskArgs(values, tables), plan)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    _, H, MB, NB = mask.blocks.shape
    # Neighbouring CTAs write neighbouring queries.
    n, rest = block % NB, block // NB
    m, head, batch = rest % MB, rest // MB % H, rest // MB // H

    memory = SmemAllocator()
    stages = memory.allocate_tensor(Uint32, cute.make_layout(2 * plan.keys * SPAN // 4), byte_alignment=SPAN)
    state = memory.allocate_tensor(Int32, cute.make_layout(1))
    if thread == 0:
        state[0] = 0

    each = mask.values.element_type.width // 8
    own = thread % VECTORS * (VECTOR // each)
    Sk, aligned = mask.values.shape[2], is_aligned(mask.values, VECTOR // each, along=2)
    first, span = m * plan.rows, SPAN // each
    base = Int32(stages.iterator.toint())
    loaded = cute.make_rmem_tensor((VECTOR // each, plan.keys // ROWS), mask.values.element_type)
    if aligned & (first + own + VECTOR // each <= Sk):
        _load(Strip(mask, (batch, head), first, n * plan.keys, base), loaded)
    seen, changed = Boolean(False), Boolean(False)
    for s in cutlass.range(cute.ceil_div(cutlass.min(plan.rows, Sk - first), span), unroll=1):
        key = first + s * span
        strip = Strip(mask, (batch, head), key, n * plan.keys, base + s % 2 * (plan.keys * SPAN))
        if aligned & (key + own + VECTOR // each <= Sk):
            for i in cutlass.range_constexpr(plan.keys // ROWS):
                one_seen, one_changed = _put(strip, i, loaded[None, i])
                seen, changed = seen | one_seen, changed | one_changed
        else:
            for i in cutlass.range(plan.keys // ROWS, unroll=1):
                one_seen, one_changed = _put(strip, i, _one_by_one(strip, i))
                seen, changed = seen | one_seen, changed | one_changed
        # The next strip is on its way while this one is written.
        if aligned & (key + span + own + VECTOR // each <= Sk) & ((s + 1) * span < plan.rows):
            _load(Strip(mask, (batch, head), key + span, n * plan.keys, base), loaded)
        # One barrier for each strip: whoever puts the next but one has passed the next one's.
        cute.arch.sync_threads()
        if cutlass.const_expr(each == 2):
            _write_halves(strip, copy)
        else:
            _write_words(strip, copy)

    seen, changed = cute.arch.vote_any_sync(seen), cute.arch.vote_any_sync(changed)
    if thread % WARP == 0:
        _add(state.iterator, seen, changed)
    cute.arch.sync_threads()
    blocks = mask.blocks[batch, head, m, None]
    if thread == 0:
        blocks[n] = state[0]


@cute.jit
def _add(state: cute.Pointer, seen: Boolean, changed: Boolean) -> None:
    found = (VISIBLE if seen else 0) | (PARTIAL if changed else 0)
    cute.arch.atomic_or(state, Int32(found), sem="relaxed", scope="cta")


def _own_row(i: Any) -> Int32:
    """The i-th query of a thread in the block."""
    thread, _, _ = cute.arch.thread_idx()
    return thread // VECTORS + i * ROWS


def _own_keys(strip: Strip) -> Int32:
    """The first of a thread's keys."""
    thread, _, _ = cute.arch.thread_idx()
    return strip.key + thread % VECTORS * (VECTOR * 8 // strip.mask.values.element_type.width)


def _load(strip: Strip, loaded: cute.Tensor) -> None:
    """Load a thread's numbers, (neighbours, rows); queries beyond the end are read as the last one."""
    values = strip.mask.values
    for i in range(cute.size(loaded, mode=[1])):
        source = values[(*strip.place, None, within(strip.query + _own_row(i), values.shape[3]))]
        start = source.iterator + _own_keys(strip)
        cute.autovec_copy(vector_at(start, cute.size(loaded, mode=[0])), loaded[None, i])


def _one_by_one(strip: Strip, i: Int32) -> cute.Tensor:
    """A thread's numbers of its i-th query, loaded singly; keys beyond the end are read as the last one."""
    values, first = strip.mask.values, _own_keys(strip)
    source = values[(*strip.place, None, within(strip.query + _own_row(i), values.shape[3]))]
    numbers = cute.make_rmem_tensor(VECTOR * 8 // values.element_type.width, values.element_type)
    for k in range(cute.size(numbers)):
        numbers[k] = source[within(first + k, values.shape[2])]
    return numbers


def _put(strip: Strip, i: Any, numbers: cute.Tensor) -> tuple[Boolean, Boolean]:
    """Put a thread's numbers of its i-th query into shared memory; returns whether any is visible, and
    whether any changes scores.
    """
    thread, _, _ = cute.arch.thread_idx()
    row, vector = _own_row(i), thread % VECTORS
    # Rows that lanes read together: eight of a matrix of 16-bit numbers, or every fourth one.
    each = numbers.element_type.width // 8
    other = row // 8 % 4 * 2 + row % 2 if each == 2 else row // 4 % 8
    target = strip.base + row * SPAN + (vector ^ other) * VECTOR
    words = cute.recast_tensor(numbers, Uint32)
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[target, *(words[w] for w in range(WORDS))],
    )
    seen, changed = Boolean(False), Boolean(False)
    for k in range(cute.size(numbers)):
        x = numbers[k].to(Float32)
        seen, changed = seen | (x != -Float32.inf), changed | (x != 0.0)
    return seen, changed


def _write_halves(strip: Strip, copy: cute.Tensor) -> None:
    """Write a strip of 16-bit numbers to the copy, a patch of 8 keys and 32 queries at a time.

    A transposing ldmatrix gives a lane two rows of each of four matrices: these are chosen such that a lane
    gets 8 neighbouring queries of one key.
    """
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    matrix, row = lane // 8, lane % 8
    start = strip.base + (row // 2 * 8 + matrix * 2 + row % 2) * SPAN
    for v in range(VECTORS // TILE_WARPS):
        vector = warp * (VECTORS // TILE_WARPS) + v
        key = strip.key + vector * 8 + lane // 4
        for first in range(0, strip.mask.plan.keys, PATCH):
            words = cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} },"
                f" [{{$r0}}+{first * SPAN}];",
                write_only_types=[Uint32] * WORDS,
                read_only_args=[start + (vector ^ row) * VECTOR],
            )
            _write(strip, copy, key, first + lane % 4 * 8, words)


def _write_words(strip: Strip, copy: cute.Tensor) -> None:
    """Write a strip of 32-bit numbers to the copy, a patch of 4 keys and 32 queries at a time."""
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row, number = lane % 8, lane // 8
    for v in range(VECTORS // TILE_WARPS):
        vector = warp * (VECTORS // TILE_WARPS) + v
        start = strip.base + row * 4 * SPAN + (vector ^ row) * VECTOR + number * 4
        for first in range(0, strip.mask.plan.keys, PATCH):
            words = tuple(
                cute.arch.inline_ptx(
                    f"ld.shared.b32 {{$w0}}, [{{$r0}}+{(first + j) * SPAN}];",
                    write_only_types=[Uint32],
                    read_only_args=[start],
                )
                for j in range(WORDS)
            )
            _write(strip, copy, strip.key + vector * 4 + number, first + row * 4, words)


@cute.jit
def _write(strip: Strip, copy: cute.Tensor, key: Int32, query: Int32, words: tuple) -> None:
    """Write 16 bytes of a key's queries, from one of the block on, unless they are beyond the end."""
    if (key < strip.mask.values.shape[2]) & (strip.query + query < copy.shape[3]):
        vector = cute.make_rmem_tensor(WORDS, Uint32)
        for w in cutlass.range_constexpr(WORDS):
            vector[w] = words[w]
        target = copy[(*strip.place, key, None)].iterator + (strip.query + query)
        cute.autovec_copy(vector, vector_at(target, WORDS, Uint32))


def _blocks_at_once(plan: MaskPlan) -> int:
    """Blocks of a bool mask that a CTA has: every thread has a word of 16 keys."""
    return BIT_THREADS // (plan.rows // VECTOR * WORDS)


@cute.kernel
def bits_kernel(values: cute.Tensor, tables: cute.Tensor, plan: cutlass.Constexpr) -> None:
    mask = make_mask(MaskArgs(values, tables), plan)
    thread, _, _ = cute.arch.thread_idx()
    part, _, _ = cute.arch.block_idx()
    _, H, MB, NB = mask.blocks.shape
    at_once = _blocks_at_once(plan)
    parts = cute.ceil_div(NB, at_once)
    rest = part // parts
    m, head, batch = rest % MB, rest // MB % H, rest // MB // H
    threads = BIT_THREADS // at_once
    slot, own = thread // threads, thread % threads
    n, word = part % parts * at_once + slot, own % WORDS
    key = m * plan.rows + own // WORDS * VECTOR

    memory = SmemAllocator()
    state = memory.allocate_tensor(Int32, cute.make_layout(at_once))
    if thread < at_once:
        state[thread] = 0
    cute.arch.sync_threads()
    if n < NB:
        _, _, Sk, Sq = mask.values.shape
        aligned = is_aligned(mask.values, VECTOR, along=2) & (key + VECTOR <= Sk)
        end = cutlass.min((n + 1) * plan.keys, Sq)
        seen, changed = Boolean(False), Boolean(False)
        for panel in cutlass.range_constexpr(plan.panels):
            groups = []
            for first in cutlass.range_constexpr(0, min(plan.keys - panel * PANEL, PANEL), PATCH):
                query = n * plan.keys + panel * PANEL + first + 2 * word
                group, some, hidden = _group(mask, (batch, head), key, query, end, aligned)
                groups = [*groups, group]
                seen, changed = seen | some, changed | hidden
            _write_bits(mask.bits[batch, head, None, n, WORDS * panel + word], key, groups)
        if seen | changed:
            _add(state.iterator + slot, seen, changed)
    cute.arch.sync_threads()
    blocks, n = mask.blocks[batch, head, m, None], part % parts * at_once + thread
    if (thread < at_once) & (n < NB):
        blocks[n] = state[thread]


@cute.jit
def _group(
    mask: Mask, place: tuple, key: Int32, query: Int32, end: Int32, aligned: Boolean
) -> tuple[tuple, Boolean, Boolean]:
    """Bits of 16 keys and the eight queries of 32 that belong to a word, from its first one on.

    Byte k % 4 of word k // 4 has those of key k, and bit 2 i + e that of query 8 i + e; queries beyond `end`
    have none. Keys beyond the end are read as the last one. Also whether any pair is visible, and whether any
    is masked.
    """
    values, words = mask.values, (Uint32(0),) * WORDS
    if aligned:
        loaded = cute.make_rmem_tensor((VECTOR, 8), values.element_type)
        for i in cutlass.range_constexpr(8):
            source = values[(*place, None, within(query + i // 2 * 8 + i % 2, values.shape[3]))]
            cute.autovec_copy(vector_at(source.iterator + key, VECTOR), loaded[None, i])
        for i in cutlass.range_constexpr(8):
            words = _with_bit(words, cute.recast_tensor(loaded[None, i], Uint32), Int32(i))
    else:
        for i in cutlass.range(8, unroll=1):
            source = values[(*place, None, within(query + i // 2 * 8 + i % 2, values.shape[3]))]
            row = cute.make_rmem_tensor(VECTOR, values.element_type)
            for k in cutlass.range_constexpr(VECTOR):
                row[k] = source[within(key + k, values.shape[2])]
            words = _with_bit(words, cute.recast_tensor(row, Uint32), i)
    keep = Uint32(0)
    for i in cutlass.range_constexpr(8):
        keep = keep | cutlass.select_(query + i // 2 * 8 + i % 2 < end, Uint32(0x01010101 << i), Uint32(0))
    some, hidden = Uint32(0), Uint32(0)
    for w in cutlass.range_constexpr(WORDS):
        some, hidden = some | words[w] & keep, hidden | ~words[w] & keep
    return tuple(word & keep for word in words), some != 0, hidden != 0


def _with_bit(words: tuple, row: cute.Tensor, bit: Int32) -> tuple:
    """The words, with a bit in every byte that is not 0 in the row's word."""
    marks = (((row[w] & 0x7F7F7F7F) + 0x7F7F7F7F | row[w]) & Uint32(0x80808080) for w in range(WORDS))
    return tuple(word | mark >> Uint32(7 - bit) for word, mark in zip(words, marks, strict=True))


@cute.jit
def _write_bits(target: cute.Tensor, key: Int32, groups: cutlass.Constexpr) -> None:
    """Write a word for each of 16 keys, from one on: a byte of each of up to four groups."""
    groups = [*groups, *[(Uint32(0),) * WORDS] * (WORDS - len(groups))]
    for w in cutlass.range_constexpr(WORDS):
        for k, bits in enumerate(_transpose(*(group[w] for group in groups))):
            if key + 4 * w + k < target.shape[0]:
                target[key + 4 * w + k] = Int32(bits)


def _transpose(*rows: Uint32) -> tuple[Any, ...]:
    """The columns of a square of bytes, whose rows are words."""
    low, high = ([cute.arch.prmt(rows[i], rows[i + 1], way) for i in (0, 2)] for way in (0x5140, 0x7362))
    return tuple(cute.arch.prmt(*pair, way) for pair in (low, high) for way in (0x5410, 0x7632))
