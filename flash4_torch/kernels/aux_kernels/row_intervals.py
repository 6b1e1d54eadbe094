"""Tells whether what rows see are intervals: a band's, documents', or others that never decrease.

A CTA has the rows of one batch entry and head. It goes through them twice: first each row gets its bounds
within the band of the call, those that see nothing where the rows before them end, and the rows that begin a
document are listed; then the bounds are compared with a band's and with documents'.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.memory import SmemAllocator

from ..common import host
from ..common.row_verdicts import NUMBERS, TILE_ROWS, Verdict
from ..common.scan import prefix_count

_THREADS = 512
_WARP = 32
_WARPS = _THREADS // _WARP


class Call(NamedTuple):
    """Sizes of a call, and its band: a row sees keys from its diagonal minus `left` to it plus `right`."""

    Sk: Int32
    left: Int32
    """`UNBOUNDED` if nothing is hidden on that side."""
    right: Int32


def compile_row_intervals() -> Any:
    """`row_intervals` for any sizes; call it with its arguments except `stream`."""
    seen = host.compact(Int32, (3, *host.any_sizes(2)))
    bounds = host.compact(Int32, (*host.any_sizes(2), 2))
    starts, numbers = (
        host.compact(Int32, host.any_sizes(2)),
        host.compact(Int32, (*host.any_sizes(1), NUMBERS)),
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    given = seen, Call(*(Int32(1) for _ in Call._fields)), bounds, starts, numbers, stream
    return cute.compile(row_intervals, *given, options="--enable-tvm-ffi")


@cute.jit
def row_intervals(
    seen: cute.Tensor,
    call: Call,
    bounds: cute.Tensor,
    starts: cute.Tensor,
    numbers: cute.Tensor,
    stream: cuda.CUstream,
) -> None:
    """seen (3, groups, Sq) int32: `block_rows.Seen`'s fields. All others are written. bounds (groups, Sq, 2)
    int32: the first and the last key of each row. starts (groups, Sq) int32: rows whose first key is of their
    own position. numbers (groups, `NUMBERS`) int32: `Verdict`'s fields.
    """
    row_intervals_kernel(seen, call, bounds, starts, numbers).launch(
        grid=(seen.shape[1], 1, 1), block=(_THREADS, 1, 1), stream=stream
    )


class _Carried(NamedTuple):
    """What is known of the rows before."""

    last: Int32
    """The greatest last key."""
    starts: Int32
    """How many begin a document."""


@cute.kernel
def row_intervals_kernel(
    seen: cute.Tensor, call: Call, bounds: cute.Tensor, starts: cute.Tensor, numbers: cute.Tensor
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    memory, Sq = SmemAllocator(), seen.shape[2]
    room = memory.allocate_tensor(Int32, cute.make_layout((_WARPS, NUMBERS)), byte_alignment=16)
    whole = memory.allocate_tensor(Int32, cute.make_layout(NUMBERS), byte_alignment=16)
    own, begin, target = bounds[group, None, None], starts[group, None], numbers[group, None]

    found, before = _nothing(call.Sk, Sq), _Carried(Int32(-1), Int32(0))
    for first in cutlass.range(0, Sq, _THREADS, unroll=1):
        found, before = _bound(seen, call, group, first + thread, own, begin, found, before, room)
    _reduce(found, room, whole)
    left, right = whole[Verdict._fields.index("left")], whole[Verdict._fields.index("right")]
    found = found._replace(starts=before.starts)
    for i in cutlass.range(thread, Sq, _THREADS, unroll=1):
        found = _compare(call.Sk, i, own, left, right, found)
    for k in cutlass.range(thread, before.starts, _THREADS, unroll=1):
        end = Sq
        if k + 1 < before.starts:
            end = begin[k + 1]
        length = end - begin[k]
        tiles = found.tiles + cute.ceil_div(length, TILE_ROWS)
        found = found._replace(longest=cutlass.max(found.longest, length), tiles=tiles)
    _reduce(found, room, whole)
    if thread < NUMBERS:
        target[thread] = whole[thread]


def _nothing(Sk: Int32, Sq: Int32) -> Verdict:
    """The verdict on no rows."""
    zeros = Verdict(*(Int32(0) for _ in Verdict._fields))
    return zeros._replace(left=-Sk, right=-Sq)


@cute.jit
def _bound(
    seen: cute.Tensor,
    call: Call,
    group: Int32,
    i: Int32,
    own: cute.Tensor,
    starts: cute.Tensor,
    found: Verdict,
    before: _Carried,
    room: cute.Tensor,
) -> tuple[Verdict, _Carried]:
    """Write the bounds of row i, which may be beyond the end."""
    Sq = seen.shape[2]
    is_there, row = i < Sq, cutlass.min(i, Sq - 1)
    keys, first, last = (seen[field, group, row] for field in range(3))
    gaps = is_there & (keys != cutlass.max(last - first + 1, 0))
    shift = call.Sk - Sq
    first = cutlass.max(first, row + shift - call.left)
    last = cutlass.min(last, row + shift + call.right)
    number = cutlass.max(last - first + 1, 0)
    is_empty = (number == 0) | (i >= Sq)
    end, greatest = _prefix_max(cutlass.select_(is_empty, Int32(-1), last), room)
    end = cutlass.max(end, before.last)
    decreases = (i < Sq) & (number != 0) & (end != last)
    begin = cutlass.select_(is_empty, end + 1, first)
    starts_here = is_there & (begin == row)
    place, more = prefix_count(starts_here, room[None, 1])
    if is_there:
        own[row, 0] = begin
        own[row, 1] = end
    if starts_here:
        starts[before.starts + place] = row
    found = found._replace(
        has_gaps=found.has_gaps | _flag(gaps),
        decreases=found.decreases | _flag(decreases),
        left=cutlass.max(found.left, cutlass.select_(is_empty, -call.Sk, row - first)),
        right=cutlass.max(found.right, cutlass.select_(is_empty, -Sq, last - row)),
        most=cutlass.max(found.most, cutlass.select_(is_there, number, Int32(0))),
    )
    return found, _Carried(cutlass.max(before.last, greatest), before.starts + more)


@cute.jit
def _compare(Sk: Int32, i: Int32, own: cute.Tensor, left: Int32, right: Int32, found: Verdict) -> Verdict:
    """Compare the bounds of row i with a band's, and with documents'."""
    Sq = own.shape[0]
    first, last, before = own[i, 0], own[i, 1], own[cutlass.max(i - 1, 0), 0]
    low, high = cutlass.max(i - left, 0), cutlass.min(i + right, Sk - 1)
    number = cutlass.max(last - first + 1, 0)
    lies_so = (number == 0) | ((first == low) & (last == high))
    is_band = lies_so & (number == cutlass.max(high - low + 1, 0))
    start, end = _within(first, Sq), _within(last, Sq)
    is_document = (first <= i) & (first == start) & (own[start, 0] == first)
    next_begins = (last == Sq - 1) | (own[_within(last + 1, Sq), 0] == last + 1)
    is_whole = (last >= i) & (last == end) & (own[end, 0] == first) & next_begins
    return found._replace(
        decreases=found.decreases | _flag(first < before),
        is_no_band=found.is_no_band | _flag(~is_band),
        hides_left=found.hides_left | _flag(first > 0),
        hides_right=found.hides_right | _flag(last < Sk - 1),
        no_documents=found.no_documents | _flag(~is_document),
        not_causal=found.not_causal | _flag(last != i),
        not_whole=found.not_whole | _flag(~is_whole),
    )


def _within(i: Int32, size: Int32) -> Int32:
    return cutlass.max(cutlass.min(i, size - 1), 0)


def _flag(holds: Boolean) -> Int32:
    return cutlass.select_(holds, Int32(1), Int32(0))


@cute.jit
def _prefix_max(x: Int32, room: cute.Tensor) -> tuple[Int32, Int32]:
    """The greatest number of the threads up to this one, and of all."""
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(x, 1 << step, mask_and_clamp=0)
        x = cutlass.select_(lane >= 1 << step, cutlass.max(x, other), x)
    # All have read what the turn before wrote.
    cute.arch.sync_threads()
    if lane == _WARP - 1:
        room[warp, 0] = x
    cute.arch.sync_threads()
    greatest = room[0, 0]
    for w in cutlass.range_constexpr(_WARPS):
        x = cutlass.select_(w < warp, cutlass.max(x, room[w, 0]), x)
        greatest = cutlass.max(greatest, room[w, 0])
    return x, greatest


@cute.jit
def _reduce(found: Verdict, room: cute.Tensor, whole: cute.Tensor) -> None:
    """What is so of the rows of all threads, in shared memory: the greatest numbers, and the sum of tiles."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    # All have read what lies there, and written the rows' bounds, which others read next.
    cute.arch.sync_threads()
    for field in cutlass.range_constexpr(NUMBERS):
        how = "add" if Verdict._fields[field] == "tiles" else "max"
        number = cute.arch.warp_redux_sync(found[field], how)
        if lane == 0:
            room[warp, field] = number
    cute.arch.sync_threads()
    if thread < NUMBERS:
        number = room[0, thread]
        for w in cutlass.range_constexpr(1, _WARPS):
            other = room[w, thread]
            is_sum = thread == Verdict._fields.index("tiles")
            number = cutlass.select_(is_sum, number + other, cutlass.max(number, other))
        whole[thread] = number
    cute.arch.sync_threads()
