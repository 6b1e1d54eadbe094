"""Evaluates mask_mod everywhere and writes a block mask's lists: the blocks that show anything.

The first kernel has a CTA for each block, whose threads evaluate 8 neighbouring keys of a query at a time.
The second has a CTA for each row of blocks, and one for each column: it lists the blocks in order, and behind
them the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint8
from cutlass.memory import SmemAllocator

from ..common import dependent_launch, host, mods, programs
from ..common.lowering import Layout, lower
from ..common.programs import Captured, Columns, arguments_of
from ..common.scan import prefix_count
from .block_tables import BlockLists, example_lists

_STATE_THREADS = 256
_LIST_THREADS = 128
_WARPS = _LIST_THREADS // 32
_AT_ONCE = 8
"""Keys that a thread evaluates at once."""
_SOME_SHOWN, _SOME_HIDDEN = 1, 2


class Sizes(NamedTuple):
    """Positions of a mask, and of each of its blocks."""

    Sq: Int32
    Sk: Int32
    q_block: Int32
    kv_block: Int32


class Lists(NamedTuple):
    """Lists of the blocks in one state: by rows of blocks, and by columns."""

    of_rows: BlockLists
    of_columns: BlockLists


def compile_block_lists(mask_mod: str, has_full: bool) -> Any:
    """`block_lists` for any sizes; call it with its arguments except `mask_mod` and `stream`.

    has_full: whether full blocks have lists of their own.
    """
    captured = Captured.example(lower(mask_mod, Layout()).program)
    lists = [Lists(example_lists(), example_lists()) for _ in range(1 + has_full)]
    sizes = Sizes(*(Int32(1) for _ in Sizes._fields))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    given = (
        captured,
        sizes,
        host.strided(Uint8, 4),
        lists[0],
        lists[1] if has_full else None,
        mask_mod,
        stream,
    )
    return cute.compile(block_lists, *given, options="--enable-tvm-ffi")


@cute.jit
def block_lists(
    captured: Captured | None,
    sizes: Sizes,
    states: cute.Tensor,
    partial: Lists,
    full: Lists | None,
    mask_mod: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch both kernels.

    states (B, H, rows, columns) uint8: written. partial: the lists of partial blocks, of the shapes that
    `BlockLists` says; without `full` those of all blocks that show anything. A block that reaches beyond the
    end is not full, as in torch.
    """
    B, H, rows, columns = states.shape
    states_kernel(captured, sizes, states, mask_mod).launch(
        grid=(B * H * rows * columns, 1, 1), block=(_STATE_THREADS, 1, 1), stream=stream
    )
    lists_kernel(states, partial, full).launch(
        grid=(B * H * (rows + columns), 1, 1),
        block=(_LIST_THREADS, 1, 1),
        stream=stream,
        use_pdl=dependent_launch.is_possible(),
    )


@cute.kernel
def states_kernel(
    captured: Captured | None, sizes: Sizes, states: cute.Tensor, mask_mod: cutlass.Constexpr
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    _, H, rows, columns = states.shape
    n, rest = block % columns, block // columns
    m, head, batch = rest % rows, rest // rows % H, rest // rows // H
    state = SmemAllocator().allocate_tensor(Int32, cute.make_layout(1))
    if thread == 0:
        state[0] = 0
    cute.arch.sync_threads()
    begin, key = m * sizes.q_block, n * sizes.kv_block
    high = cutlass.min(sizes.q_block, sizes.Sq - begin)
    wide = cutlass.min(sizes.kv_block, sizes.Sk - key)
    groups = cute.ceil_div(wide, _AT_ONCE)
    found = Int32(_SOME_HIDDEN if (high < sizes.q_block) | (wide < sizes.kv_block) else 0)
    for item in cutlass.range(thread, high * groups, _STATE_THREADS, unroll=1):
        row, first = begin + item // groups, item % groups * _AT_ONCE
        found = found | _evaluate(captured, mask_mod, (batch, head, row), key + first, wide - first)
    cute.arch.atomic_or(state.iterator, found, sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    found = state[0]
    own = states[batch, head, m, None]
    if thread == 0:
        shown = Int32(mods.FULL if (found & _SOME_HIDDEN) == 0 else mods.PARTIAL)
        own[n] = Uint8(shown if (found & _SOME_SHOWN) != 0 else mods.EMPTY)


def _evaluate(captured: Captured | None, mask_mod: str, place: Any, first: Int32, number: Int32) -> Int32:
    """What the first `number` of neighbouring keys show to a query: its batch entry, head and position."""
    lowering, arguments, found = lower(mask_mod, Layout()), arguments_of(captured), [Int32(0)]
    batch, head, position = place
    row = programs.begin(lowering, arguments, batch, (head,), (position,))

    def put(_: int, column: int, shown: Boolean) -> None:
        own = cutlass.select_(shown, Int32(_SOME_SHOWN), Int32(_SOME_HIDDEN))
        found.append(found.pop() | cutlass.select_(number > column, own, Int32(0)))

    columns = Columns(first, tuple(range(_AT_ONCE)))
    programs.apply(lowering, arguments, row, columns, lambda r, c: None, put)
    return found[0]


@cute.kernel
def lists_kernel(states: cute.Tensor, partial: Lists, full: Lists | None) -> None:
    dependent_launch.wait_for_previous_kernel()
    group, _, _ = cute.arch.block_idx()
    _, H, rows, columns = states.shape
    own, rest = group % (rows + columns), group // (rows + columns)
    head, batch = rest % H, rest // H
    if own < rows:
        line = states[batch, head, own, None]
        _list_both(line, (batch, head, own), partial.of_rows, None if full is None else full.of_rows)
    else:
        line, place = states[batch, head, None, own - rows], (batch, head, own - rows)
        _list_both(line, place, partial.of_columns, None if full is None else full.of_columns)


@cute.jit
def _list_both(line: cute.Tensor, place: tuple, partial: BlockLists, full: BlockLists | None) -> None:
    if cutlass.const_expr(full is None):
        _list(line, place, partial, mods.PARTIAL, mods.FULL)
    else:
        _list(line, place, partial, mods.PARTIAL, mods.PARTIAL)
        _list(line, place, full, mods.FULL, mods.FULL)


@cute.jit
def _list(
    line: cute.Tensor, place: tuple, lists: BlockLists, low: cutlass.Constexpr, high: cutlass.Constexpr
) -> None:
    """List a line's blocks whose states are from `low` to `high`, and behind them the others."""
    thread, _, _ = cute.arch.thread_idx()
    counts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(_WARPS), byte_alignment=16)
    length, numbers, targets = line.shape[0], lists.counts, lists.columns[(*place, None)]
    total = Int32(0)
    for first in cutlass.range(0, length, _LIST_THREADS, unroll=1):
        total = total + prefix_count(_is_listed(line, first + thread, low, high), counts)[1]
    if thread == 0:
        numbers[place] = total
    before = Int32(0)
    for first in cutlass.range(0, length, _LIST_THREADS, unroll=1):
        n = first + thread
        listed = _is_listed(line, n, low, high)
        own, more = prefix_count(listed, counts)
        own, before = before + own, before + more
        at = cutlass.select_(listed, own, total + n - own)
        if n < length:
            targets[at] = n


@cute.jit
def _is_listed(line: cute.Tensor, n: Int32, low: cutlass.Constexpr, high: cutlass.Constexpr) -> Boolean:
    listed = Boolean(False)
    if n < line.shape[0]:
        state = line[n].to(Int32)
        listed = (state >= low) & (state <= high)
    return listed
