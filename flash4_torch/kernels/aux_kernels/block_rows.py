"""What each query sees of a block mask and its mask_mod: how many keys, the first one and the last one.

The first kernel writes the states of the mask's blocks. In the second a warp has a query: lanes look at the
states of 32 blocks, and share the keys of each partial one, which they evaluate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint8

from ..common import dependent_launch, host, mods, programs
from ..common.attn_mask import within
from ..common.lowering import Layout, lower
from ..common.programs import Captured, Columns, arguments_of
from .block_tables import STATE_THREADS, BlockLists, example_lists, states_kernel

_THREADS = 256
_WARP = 32
_WARPS = _THREADS // _WARP
_OFFSETS = (0, 32, 64, 96)
"""Keys that a lane evaluates at once: those of a warp lie side by side."""


class Sizes(NamedTuple):
    """Keys of a mask, and positions of its blocks."""

    Sk: Int32
    q_block: Int32
    kv_block: Int32


class Seen(NamedTuple):
    """What is known of a query."""

    keys: Int32
    first: Int32
    """Sk or more if there are none."""
    last: Int32
    """-1 if there are none."""


def compile_block_rows(mask_mod: str, has_full: bool) -> Any:
    """`block_rows` for any sizes; call it with its arguments except `mask_mod` and `stream`."""
    captured = Captured.example(lower(mask_mod, Layout()).program)
    full = example_lists() if has_full else None
    seen = host.compact(Int32, (3, *host.any_sizes(3)))
    sizes = Sizes(*(Int32(1) for _ in Sizes._fields))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    given = example_lists(), full, host.strided(Uint8, 4), captured, sizes, seen, mask_mod, stream
    return cute.compile(block_rows, *given, options="--enable-tvm-ffi")


@cute.jit
def block_rows(
    listed: BlockLists,
    full: BlockLists | None,
    states: cute.Tensor,
    captured: Captured | None,
    sizes: Sizes,
    seen: cute.Tensor,
    mask_mod: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch both kernels.

    states (B or 1, H or 1, rows, columns) uint8: written, those of the mask's blocks. seen (3, Bm, Hm, Sq)
    int32: written, the fields of `Seen`. A block in both lists is full.
    """
    B, H, rows, _ = states.shape
    states_kernel(listed, full, Int32(mods.PARTIAL), states).launch(
        grid=(B * H * rows, 1, 1), block=(STATE_THREADS, 1, 1), stream=stream
    )
    _, B, H, Sq = seen.shape
    rows_kernel(states, captured, sizes, seen, mask_mod).launch(
        grid=(cute.ceil_div(B * H * Sq, _WARPS), 1, 1),
        block=(_THREADS, 1, 1),
        stream=stream,
        use_pdl=dependent_launch.is_possible(),
    )


@cute.kernel
def rows_kernel(
    states: cute.Tensor,
    captured: Captured | None,
    sizes: Sizes,
    seen: cute.Tensor,
    mask_mod: cutlass.Constexpr,
) -> None:
    dependent_launch.wait_for_previous_kernel()
    group, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    _, B, H, Sq = seen.shape
    row = group * _WARPS + warp
    if row < B * H * Sq:
        place = row // Sq // H, row // Sq % H, row % Sq
        own = _look(states, captured, sizes, place, mask_mod)
        keys = cute.arch.warp_redux_sync(own.keys, "add")
        first = cute.arch.warp_redux_sync(own.first, "min")
        last = cute.arch.warp_redux_sync(own.last, "max")
        if lane == 0:
            seen[0, place[0], place[1], place[2]] = keys
            seen[1, place[0], place[1], place[2]] = first
            seen[2, place[0], place[1], place[2]] = last


@cute.jit
def _look(
    states: cute.Tensor, captured: Captured | None, sizes: Sizes, place: tuple, mask_mod: cutlass.Constexpr
) -> Seen:
    """A lane's part of what a query sees."""
    lane = cute.arch.lane_idx()
    Bs, Hs, rows, columns = states.shape
    line = states[within(place[0], Bs), within(place[1], Hs), within(place[2] // sizes.q_block, rows), None]
    own = Seen(Int32(0), sizes.Sk, Int32(-1))
    for c in cutlass.range(0, columns, _WARP, unroll=1):
        state = Int32(mods.EMPTY)
        if c + lane < columns:
            state = line[c + lane].to(Int32)
        if state == mods.FULL:
            begin = (c + lane) * sizes.kv_block
            end = cutlass.min(begin + sizes.kv_block, sizes.Sk)
            own = Seen(own.keys + end - begin, cutlass.min(own.first, begin), cutlass.max(own.last, end - 1))
        partial = cute.arch.vote_ballot_sync(state == mods.PARTIAL)
        for bit in cutlass.range(_WARP, unroll=1):
            if (partial >> bit & 1) != 0:
                begin = (c + bit) * sizes.kv_block
                end = cutlass.min(begin + sizes.kv_block, sizes.Sk)
                for key in cutlass.range(begin + lane, end, _WARP * len(_OFFSETS), unroll=1):
                    own = _evaluate(captured, mask_mod, place, key, end, own)
    return own


def _evaluate(
    captured: Captured | None, mask_mod: str, place: tuple, key: Int32, end: Int32, before: Seen
) -> Seen:
    """What a lane knows, with what the keys at `_OFFSETS` from `key` on and before `end` show."""
    lowering, arguments, found = lower(mask_mod, Layout()), arguments_of(captured), [before]
    batch, head, position = place
    row = programs.begin(lowering, arguments, batch, (head,), (position,))

    def put(_: int, column: int, shown: Boolean) -> None:
        own, at = found.pop(), key + _OFFSETS[column]
        shown = Boolean(shown) & (at < end)
        found.append(
            Seen(
                own.keys + cutlass.select_(shown, Int32(1), Int32(0)),
                cutlass.min(own.first, cutlass.select_(shown, at, own.first)),
                cutlass.max(own.last, cutlass.select_(shown, at, own.last)),
            )
        )

    programs.apply(lowering, arguments, row, Columns(key, _OFFSETS), lambda r, c: None, put)
    return found[0]
