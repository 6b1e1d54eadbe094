"""Evaluates mask_mod where a block mask's blocks are partial; writes attn_mask's tables of what both show.

The first kernel writes the states of the mask's blocks. The second has a CTA for each tile of an attention
kernel, and nothing to do where all that the tile overlaps is empty. Elsewhere a thread has 32 columns of a
row, a word of its bits, and evaluates them if any lies in a partial block. The third lists the tiles that see
anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64
from cutlass.memory import SmemAllocator

from ..common import dependent_launch, host, mods, programs
from ..common.attn_mask import MaskArgs, example_args, make_mask, within
from ..common.lowering import Layout, Lowering, lower
from ..common.mask_tables import PANEL, MaskPlan
from ..common.programs import Arguments, Captured, Columns, arguments_of
from .block_tables import (
    STATE_THREADS,
    BlockLists,
    Span,
    example_lists,
    look,
    overlapped,
    states_kernel,
)
from .mask_blocks import PARTIAL, THREADS, VISIBLE, list_kernel

_BITS_THREADS = 256
_WORDS = 4
"""Words of a panel."""
_AT_ONCE = 8
"""Columns that are evaluated at once: more take registers, and fewer CTAs share an SM."""
_OFFSETS = tuple(8 * (bit // 2) + bit % 2 for bit in range(_AT_ONCE))
"""Columns of neighbouring bits of a word: see `mask_tables`."""


class BitsPlan(NamedTuple):
    """What the kernels are compiled for."""

    mask: MaskPlan
    """How the attention kernel's tiles lie, "bool"."""
    mask_mod: str
    """The program, or "": then all listed blocks are full."""
    rows_are_keys: bool
    has_full: bool
    """Whether there are lists of full blocks."""

    @property
    def lowering(self) -> Lowering:
        return lower(self.mask_mod, Layout(rows_are_keys=self.rows_are_keys))


class Block(NamedTuple):
    """Positions of one of the mask's blocks."""

    rows: Int32
    columns: Int32


class Evaluated(NamedTuple):
    """What is evaluated."""

    captured: Captured | None
    states: cute.Tensor
    """(B or 1, Hq or 1, rows, columns) uint8: those of the mask's blocks, by the tables' rows and columns."""
    block: Block


def compile_block_bits(mask: MaskPlan, mask_mod: str, rows_are_keys: bool, has_full: bool) -> Any:
    """`block_bits` of a `BitsPlan` for any sizes; call it with its arguments except `plan` and `stream`."""
    assert mask.dtype == "bool" and not mask.column_major
    plan = BitsPlan(mask, mask_mod, rows_are_keys, has_full)
    captured = Captured.example(plan.lowering.program) if mask_mod else None
    lists = example_lists(), example_lists() if plan.has_full else None
    states = host.strided(cutlass.Uint8, 4), host.strided(cutlass.Uint8, 4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    given = *lists, *states, captured, Block(Int32(1), Int32(1)), *example_args(plan.mask), plan, stream
    return cute.compile(block_bits, *given, options="--enable-tvm-ffi")


@cute.jit
def block_bits(
    listed: BlockLists,
    full: BlockLists | None,
    states: cute.Tensor,
    seen: cute.Tensor,
    captured: Captured | None,
    block: Block,
    mask: cute.Tensor,
    tables: cute.Tensor,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch the kernels.

    states (Bm, Hm, rows, columns) uint8: those of the mask's blocks, the lists' rows and columns. seen: the
    same memory by the tables' rows and columns, which are the other ones where rows are keys. mask (Bm, Hm,
    rows, columns) bool: of any strides, of which the sizes alone are read. tables: int32, 16-byte aligned;
    `mask_tables.place` gives their size. Bits of tiles that see nothing are not written, as attention kernels
    do not read them. A block in both lists is full.
    """
    B, H, rows, _ = states.shape
    states_kernel(listed, full, Int32(mods.PARTIAL if plan.mask_mod else mods.FULL), states).launch(
        grid=(B * H * rows, 1, 1), block=(STATE_THREADS, 1, 1), stream=stream
    )
    B, HB, MB, NB = make_mask(MaskArgs(mask, tables), plan.mask).blocks.shape
    bits_kernel(Evaluated(captured, seen, block), mask, tables, plan).launch(
        grid=(B * HB * MB * NB, 1, 1),
        block=(_BITS_THREADS, 1, 1),
        stream=stream,
        use_pdl=dependent_launch.is_possible(),
    )
    list_kernel(mask, tables, plan.mask).launch(
        grid=(B * HB * MB, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=dependent_launch.is_possible()
    )


class _Word(NamedTuple):
    """A thread's 32 columns of a row."""

    row: Int32
    first: Int32
    """The first column of the panel."""
    number: Int32
    """Its place among the panel's words."""


@cute.kernel
def bits_kernel(
    evaluated: Evaluated, values: cute.Tensor, tables: cute.Tensor, plan: cutlass.Constexpr
) -> None:
    dependent_launch.wait_for_previous_kernel()
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    mask, tile = make_mask(MaskArgs(values, tables), plan.mask), plan.mask
    _, H, rows, columns = mask.values.shape
    _, HB, MB, NB = mask.blocks.shape
    n, rest = group % NB, group // NB
    m, rest = rest % MB, rest // MB
    head_block, batch = rest % HB, rest // HB
    bits, state = mask.bits, SmemAllocator().allocate_tensor(Int32, cute.make_layout(1))

    B, Hb, _, _ = evaluated.states.shape
    own = evaluated.states[within(batch, B), None, None, None]
    first_head = head_block * tile.heads
    last_head = within(first_head + tile.heads - 1, H)
    found = look(
        own,
        Span(within(first_head, Hb), within(last_head, Hb) + 1),
        overlapped(m, Int32(tile.rows), evaluated.block.rows, rows),
        overlapped(n, Int32(tile.keys), evaluated.block.columns, columns),
    )
    if found != 0:
        if thread == 0:
            state[0] = 0
        cute.arch.sync_threads()
        is_whole, words = found == VISIBLE, _WORDS * tile.panels
        found, end = Int32(0), cutlass.min((n + 1) * tile.keys, columns)
        for item in cutlass.range(thread, tile.heads * tile.rows * words, _BITS_THREADS, unroll=1):
            place, row = item % words, m * tile.rows + item // words % tile.rows
            head = first_head + item // (words * tile.rows)
            if (row < rows) & (head < H):
                word = _Word(row, n * tile.keys + place // _WORDS * PANEL, place % _WORDS)
                inside = _before(end - word.first, word.number)
                shown = inside
                if not is_whole:
                    shown = _evaluate(evaluated, plan, batch, head, word, end)
                bits[batch, head, row, n, place] = Int32(shown)
                found = found | (VISIBLE if shown != 0 else 0) | (PARTIAL if inside != shown else 0)
        cute.arch.atomic_or(state.iterator, found, sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        found = state[0]
    blocks = mask.blocks[batch, head_block, m, None]
    if thread == 0:
        blocks[n] = found


@cute.jit
def _evaluate(
    evaluated: Evaluated, plan: cutlass.Constexpr, batch: Int32, head: Int32, word: _Word, end: Int32
) -> Uint32:
    """Bits of what a word's columns before `end` show."""
    B, Hb, rows, _ = evaluated.states.shape
    states = evaluated.states[
        within(batch, B), within(head, Hb), within(word.row // evaluated.block.rows, rows), None
    ]
    whole, partial, size = Uint32(0), Uint32(0), evaluated.block.columns
    last = cutlass.min(word.first + PANEL, end)
    for c in cutlass.range(word.first // size, cute.ceil_div(last, size), unroll=1):
        state = states[c].to(Int32)
        begin, stop = cutlass.max(c * size, word.first), cutlass.min((c + 1) * size, last)
        inside = _before(stop - word.first, word.number) & ~_before(begin - word.first, word.number)
        whole = whole | (inside if state == mods.FULL else Uint32(0))
        partial = partial | (inside if state == mods.PARTIAL else Uint32(0))
    if cutlass.const_expr(plan.mask_mod):
        if partial != 0:
            whole = whole | partial & _result(evaluated, plan, batch, head, word)
    return whole


@cute.jit
def _result(evaluated: Evaluated, plan: cutlass.Constexpr, batch: Int32, head: Int32, word: _Word) -> Uint32:
    """Bits of mask_mod's results."""
    lowering, arguments, bits = plan.lowering, arguments_of(evaluated.captured), Uint32(0)
    row = programs.begin(lowering, arguments, batch, (head,), (word.row,))
    for turn in cutlass.range(32 // _AT_ONCE, unroll=1):
        first = word.first + 2 * word.number + turn * (4 * _AT_ONCE)
        own = _of_columns(lowering, arguments, row, Columns(first, _OFFSETS))
        bits = bits | own << Uint32(turn * _AT_ONCE)
    return bits


def _of_columns(lowering: Lowering, arguments: Arguments, row: programs.Tile, columns: Columns) -> Uint32:
    """A bit for each of a row's columns, from the lowest on."""
    bits = [Uint32(0)]

    def put(_: int, column: int, shown: Boolean) -> None:
        bits.append(bits.pop() | cutlass.select_(shown, Uint32(1 << column), Uint32(0)))

    programs.apply(lowering, arguments, row, columns, lambda r, c: None, put)
    return bits[0]


def _before(count: Int32, number: Int32) -> Uint32:
    """Bits of a word's columns among the first `count` of a panel."""
    count = cutlass.max(cutlass.min(count, PANEL), 0)
    own = count // 8 * 2 + cutlass.max(cutlass.min(count % 8 - 2 * number, 2), 0)
    return Uint32((Uint64(1) << Uint64(own)) - Uint64(1))
