"""Writes the tables by which attention kernels walk a block mask, from the mask's lists.

The first kernel has a CTA for each row of the mask's blocks, and writes their states. The second has one for
each row of an attention kernel's tiles: a thread looks at the mask's blocks that its tile overlaps, and a
running count over the threads lists the tiles that see anything. Neither size need divide the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8
from cutlass.memory import SmemAllocator

from ..common import dependent_launch, host, mods
from ..common.attn_mask import within
from .mask_blocks import PARTIAL, THREADS, VISIBLE, WARPS, list_blocks

STATE_THREADS = 128


class BlockLists(NamedTuple):
    """Blocks of each row of a block mask, by their columns."""

    counts: cute.Tensor
    """(B or 1, Hq or 1, rows or more) int32: how many blocks are listed."""
    columns: cute.Tensor
    """(B or 1, Hq or 1, rows or more, any) int32: the listed ones, then anything."""


class Lengths(NamedTuple):
    """Positions along the rows and the columns of a kernel's tiles."""

    rows: Int32
    columns: Int32
    """Those of the call."""
    block_rows: Int32
    block_columns: Int32
    """Those of one of the mask's blocks."""
    tile_rows: Int32
    tile_columns: Int32
    tile_heads: Int32
    """Heads side by side in a tile; they divide those of the mask."""


@cute.jit
def block_tables(
    listed: BlockLists,
    full: BlockLists | None,
    state: Int32,
    states: cute.Tensor,
    seen: cute.Tensor,
    visible: cute.Tensor,
    rank: cute.Tensor,
    lengths: Lengths,
    stream: cuda.CUstream,
) -> None:
    """Launch both kernels.

    state: that of `listed`'s blocks; those of `full` are FULL. states (Bm, Hm, rows, columns) uint8: those of
    all blocks, the lists' rows and columns. seen: the same memory by the rows and columns of the attention
    kernel, which are the other ones in the backward. visible (Bm, HB, MB, NB) and rank (Bm, HB, MB, NB + 1):
    see `mask_tables`. A block in both lists is full; one that is not there counts for nothing.
    """
    Bm, Hm, rows, _ = states.shape
    states_kernel(listed, full, state, states).launch(
        grid=(Bm * Hm * rows, 1, 1), block=(STATE_THREADS, 1, 1), stream=stream
    )
    _, HB, MB, _ = visible.shape
    tables_kernel(seen, visible, rank, lengths).launch(
        grid=(Bm * HB * MB, 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        use_pdl=dependent_launch.is_possible(),
    )


@cute.kernel
def states_kernel(listed: BlockLists, full: BlockLists | None, state: Int32, states: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    _, Hm, rows, columns = states.shape
    batch, head, row = group // rows // Hm, group // rows % Hm, group % rows
    own = states[batch, head, row, None]
    for n in cutlass.range(thread, columns, STATE_THREADS, unroll=1):
        own[n] = Uint8(mods.EMPTY)
    cute.arch.sync_threads()
    _mark(listed, batch, head, row, own, state)
    if cutlass.const_expr(full is not None):
        cute.arch.sync_threads()
        _mark(full, batch, head, row, own, Int32(mods.FULL))


@cute.jit
def _mark(lists: BlockLists, batch: Int32, head: Int32, row: Int32, own: cute.Tensor, state: Int32) -> None:
    """Write a state to the listed blocks of a row."""
    thread, _, _ = cute.arch.thread_idx()
    B, H, _, most = lists.columns.shape
    b, h = within(batch, B), within(head, H)
    for i in cutlass.range(thread, cutlass.min(lists.counts[b, h, row], most), STATE_THREADS, unroll=1):
        n = lists.columns[b, h, row, i]
        if n >= 0 and n < own.shape[0]:
            own[n] = Uint8(state)


@cute.kernel
def tables_kernel(states: cute.Tensor, visible: cute.Tensor, rank: cute.Tensor, lengths: Lengths) -> None:
    dependent_launch.wait_for_previous_kernel()
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    _, HB, MB, NB = visible.shape
    batch, head_block, m = group // MB // HB, group // MB % HB, group % MB
    counts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
    blocks, ranks = visible[batch, head_block, m, None], rank[batch, head_block, m, None]
    heads = Span(head_block * lengths.tile_heads, (head_block + 1) * lengths.tile_heads)
    rows = overlapped(m, lengths.tile_rows, lengths.block_rows, lengths.rows)
    total = Int32(0)
    for first in cutlass.range(0, NB, THREADS, unroll=1):
        found, n = Int32(0), first + thread
        if n < NB:
            columns = overlapped(n, lengths.tile_columns, lengths.block_columns, lengths.columns)
            found = look(states[batch, None, None, None], heads, rows, columns)
        # All have read the counts of the turn before.
        cute.arch.sync_threads()
        total = list_blocks(blocks, ranks, first, NB, found, counts, total)
    if thread == 0:
        ranks[NB] = total


class Span(NamedTuple):
    """What a tile overlaps, `first <= n < last`."""

    first: Int32
    last: Int32


def overlapped(n: Int32, tile: Int32, block: Int32, length: Int32) -> Span:
    """The mask's blocks that the nth tile overlaps along one dimension."""
    return Span(n * tile // block, (cutlass.min((n + 1) * tile, length) - 1) // block + 1)


@cute.jit
def look(states: cute.Tensor, heads: Span, rows: Span, columns: Span) -> Int32:
    """What a tile's blocks hold, as `mask_blocks` finds it."""
    found = Int32(0)
    for h in cutlass.range(heads.first, heads.last, unroll=1):
        for r in cutlass.range(rows.first, rows.last, unroll=1):
            for c in cutlass.range(columns.first, columns.last, unroll=1):
                state = states[h, r, c].to(Int32)
                found = (
                    found | (VISIBLE if state != mods.EMPTY else 0) | (PARTIAL if state != mods.FULL else 0)
                )
    return found


def compile_block_tables(has_full: bool) -> Any:
    """`block_tables` compiled for any sizes; call it with its arguments except `stream`."""

    states, seen = host.strided(Uint8, 4), host.strided(Uint8, 4)
    visible, rank = (host.compact(Int32, host.any_sizes(4)) for _ in range(2))
    full = example_lists() if has_full else None
    lengths = Lengths(*(Int32(1) for _ in Lengths._fields))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    given = example_lists(), full, Int32(PARTIAL), states, seen, visible, rank, lengths, stream
    return cute.compile(block_tables, *given, options="--enable-tvm-ffi")


def example_lists() -> BlockLists:
    """Lists that stand for any others when a kernel is compiled."""
    return BlockLists(host.strided(Int32, 3), host.strided(Int32, 4))
