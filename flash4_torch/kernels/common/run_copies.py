"""Copies of rows from global to shared memory by cp.async, 16 bytes a lane: runs by one warp, or blocks.

The lanes copy a chunk (what a swizzle spans) of 4, 8 or 16 rows at once. So a lane has the same vector of
each chunk, and of rows those that are a constant number apart: addresses are those of few rows, and all else
is constants.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .copies import VECTOR
from .smem_layouts import chunk_of, vector_address
from .warps import WARP

RUN = 16
"""Rows that a warp copies to a stage."""
_BYTES = 16
"""Bytes of a vector."""


class Source(NamedTuple):
    """A run's rows in global memory."""

    start: Int64
    """The address of the lane's vector of its first row; without a pitch, of the row that lanes l and l + 16
    name."""
    pitch: Int64 | None
    """Bytes from each row to the next one; None if rows are anywhere."""


class Wanted(NamedTuple):
    """What to copy: rows if their number is below `rows`, and nothing at all unless `block` < `last`.

    Of other rows nothing is read, and they become 0.
    """

    first: Int32
    """Number of the run's first row; negative numbers are not below anything."""
    rows: Int32
    block: Int32
    last: Int32


class Lane(NamedTuple):
    """A lane's row among those that are copied at once, and its vector of each chunk."""

    row: Int32
    vector: Int32


def lane_of(stage: cute.Tensor) -> Lane:
    """The lane's place in a copy of rows to a stage (rows, columns)."""
    vectors = _chunk(stage) // VECTOR
    lane = cute.arch.lane_idx()
    return Lane(lane // vectors, lane % vectors)


def rows_at_once(stage: cute.Tensor) -> int:
    """Rows of which a warp copies a chunk at once."""
    return WARP * VECTOR // _chunk(stage)


def copy_run(stage: cute.Tensor, first: Int32, source: Source, wanted: Wanted, columns: int) -> None:
    """Start to copy 16 rows to a stage (rows, columns), the first of them to row `first`, a multiple of 8.

    Columns from `columns` on become 0. The copies belong to the thread's next
    cp.async group.
    """
    lane, step, pitch = lane_of(stage), rows_at_once(stage), 2 * _chunk(stage)
    target, start = vector_address(stage, lane.row, lane.vector) + first * pitch, source.start
    for row in range(0, RUN, step):
        if source.pitch is None:
            start = cute.arch.shuffle_sync(source.start, lane.row + row) + Int64(lane.vector * _BYTES)
        elif row:
            start += source.pitch * step
        # Rows 4 further have their vectors elsewhere in a swizzle of 8 rows, or in the same place.
        place = (target ^ (row * pitch >> 3 & pitch - _BYTES)) + row * pitch
        copy_row(stage, place, start, wanted._replace(first=wanted.first + lane.row + row), columns)


def copy_block(
    stage: cute.Tensor, warp: Int32, warps: int, source: Source, wanted: Wanted, columns: int
) -> None:
    """Start to copy a whole stage (rows, columns), whose rows `warps` warps divide, as `copy_run`.

    source: the run that begins with the lane's first row, `own_row`; it has a pitch. wanted: rows are counted
    from the stage's first one, which is 0.
    """
    lane, rows, step = lane_of(stage), cute.size(stage, mode=[0]), warps * rows_at_once(stage)
    assert step % 8 == 0, "rows that a lane copies have their vectors at the same place in a swizzle"
    own, start = own_row(stage, warp), source.start
    target = vector_address(stage, own, lane.vector)
    for row in range(0, rows, step):
        last = wanted.last
        if row + step > rows:
            last = cutlass.select_(own + row < rows, last, wanted.block)
        place = target + row * 2 * _chunk(stage)
        # What a lane compares is the same for all of its rows, which saves registers.
        of_row = wanted._replace(first=own, rows=cutlass.max(wanted.rows - row, 0), last=last)
        copy_row(stage, place, start, of_row, columns)
        start += source.pitch * step


def own_row(stage: cute.Tensor, warp: Int32) -> Int32:
    """The first row of a stage that the lane copies in `copy_block`."""
    return warp * rows_at_once(stage) + lane_of(stage).row


def copy_row(stage: cute.Tensor, target: Int32, start: Int64, wanted: Wanted, columns: int) -> None:
    """Start to copy the lane's vectors of one row; target: the SMEM address of the first of them.

    Columns from `columns` on become 0.
    """
    chunk = _chunk(stage)
    between, whole = cute.size(stage, mode=[0]) * 2 * chunk, columns // chunk
    copy = "@wanted cp.async.cg.shared.global.L2::128B [{$r0}+%d], [{$r1}+%d], 16, absent; "
    code = "".join(copy % (i * between, i * 2 * chunk) for i in range(whole))
    if columns % chunk:
        rest = columns % chunk // VECTOR
        code += f"setp.ge.or.s32 absent, {{$r6}}, {rest}, absent; "
        code += copy % (whole * between, whole * 2 * chunk)
    beyond = range(-(-columns // chunk), cute.size(stage, mode=[1]) // chunk)
    code += "setp.eq.s32 absent, 0, 0; " if beyond else ""
    code += "".join(copy % (i * between, 0) for i in beyond)
    cute.arch.inline_ptx(
        "{ .reg .pred wanted, absent; setp.lt.s32 wanted, {$r4}, {$r5}; setp.ge.u32 absent, {$r2}, {$r3}; "
        + code
        + "}",
        read_only_args=[target, start, *wanted, lane_of(stage).vector],
    )


def _chunk(stage: cute.Tensor) -> int:
    return chunk_of(cute.size(stage, mode=[1]))
