"""Loads: rows of Q, and keys and values from wherever the block table says that they are."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ...configs.decode import KEYS, RUN, WARPS
from ..common.run_copies import Source, Wanted, copy_row, copy_run, lane_of, rows_at_once
from ..common.smem_layouts import vector_address
from .context import Context


class Place(NamedTuple):
    """The place in the cache of the first of the warp's keys of a block, which are a run.

    Without runs in pages it is that of a lane's key; lanes l and l + 16 have the same one.
    """

    page: Int32
    row: Int32


Places = tuple[Place, ...]
"""The places of the runs of a block that a warp copies."""


@cute.jit
def load_q(ctx: Context, warpgroup: int | Int32 = 0) -> None:
    """Start to copy the rows of Q that the warps of a warpgroup share; rows after the last one are 0."""
    plan, tile, q = ctx.plan, ctx.tile, ctx.tensors.q
    columns = plan.features.D
    lane, step = lane_of(ctx.sQ), rows_at_once(ctx.sQ)
    warp, first_row = ctx.warp - warpgroup * WARPS, tile.first_row + warpgroup * plan.q_rows
    for i in cutlass.range_constexpr(0, plan.q_rows, step * WARPS):
        own = warp * step + lane.row + i
        row = first_row + own
        token, head = ctx.place_of(cutlass.min(row, tile.num_rows - 1))
        start = _first(q) + _bytes(q, 0, token) + _bytes(q, 1, head) + Int64(lane.vector * 16)
        # A tile has fewer rows than the warps copy at once, if chunks are narrow.
        wanted = Wanted(row, tile.num_rows, own, Int32(plan.q_rows))
        copy_row(ctx.sQ, vector_address(ctx.sQ, own, lane.vector), start, wanted, columns)


class Pages(NamedTuple):
    """Page numbers that the table has, read long before they are needed: each lane has those of two runs.

    They are as the table has them, since to touch them is to wait for them.
    """

    now: Int32
    """Those of 32 runs of the warp after one another."""
    next: Int32
    """Those of its next 32 runs."""


def _has_pages(ctx: Context) -> bool:
    """Whether pages are looked up for 32 runs at a time; keys without runs have places of their own."""
    return ctx.plan.form.paged and ctx.plan.form.has_runs


def look_up_first(ctx: Context, first: Int32) -> Pages:
    """Start to look up pages of the blocks from `first` on."""
    if not _has_pages(ctx):
        return Pages(Int32(0), Int32(0))
    start = first * ctx.plan.copies
    return Pages(*(_look_up(ctx, _key(ctx, start + 32 * i + ctx.lane))[0] for i in range(2)))


def locate(ctx: Context, pages: Pages, first: Int32, n: Int32) -> Places:
    """The places of the warp's runs of block n, or of the lane's keys, some time before they are loaded.

    pages: those of the 32 runs that these are among, counted from block `first` on.
    """
    copies = ctx.plan.copies
    return tuple(_locate(ctx, pages, (n - first) * copies + i, n * copies + i) for i in range(copies))


@cute.jit
def _locate(ctx: Context, pages: Pages, index: Int32, run: Int32) -> Place:
    key = _key(ctx, run)
    page, row = Int32(0), key
    if cutlass.const_expr(ctx.plan.form.paged):
        if cutlass.const_expr(_has_pages(ctx)):
            page = cute.arch.shuffle_sync(pages.now, index % 32)
            row = key % ctx.divisors.page_size
        else:
            page, row = _look_up(ctx, key + ctx.lane % RUN)
        page = cutlass.max(cutlass.min(page, ctx.tensors.k.shape[0] - 1), 0)
    return Place(page, row)


@cute.jit
def look_up_next(ctx: Context, pages: Pages, first: Int32, n: Int32) -> Pages:
    """The pages to locate block n with, after those for block n - 1."""
    now, after = pages.now, pages.next
    if cutlass.const_expr(_has_pages(ctx)):
        copies = ctx.plan.copies
        if (n - first) * copies % 32 == 0:
            now = after
            after = _look_up(ctx, _key(ctx, n * copies + 32 + ctx.lane))[0]
    return Pages(now, after)


def _key(ctx: Context, run: Int32) -> Int32:
    """The first key of one of the warp's runs, which are `KEYS` keys apart."""
    return run * KEYS + ctx.copied_keys


@cute.jit
def _look_up(ctx: Context, key: Int32) -> tuple[Int32, Int32]:
    """The page that the table has for a key, if a row may see it or one of its run, and its row there."""
    first, last = ctx.tile.keys
    if cutlass.const_expr(ctx.plan.form.has_runs):
        first -= RUN - 1
    block, row = divmod(key, ctx.divisors.page_size)
    page = Int32(0)
    if (first <= key) & (key < last):
        page = ctx.tensors.block_table[ctx.tile.batch, block]
    return page, row


def load_k(ctx: Context, n: Int32, last: Int32, places: Places, stage: Int32) -> None:
    """Start to copy the warp's keys of K's block n, if it is before block `last`; keys that no row sees
    become 0.
    """
    _load(ctx, ctx.tensors.k, ctx.sK[None, None, stage], ctx.plan.features.D, n, last, places)


def load_v(ctx: Context, n: Int32, last: Int32, places: Places, stage: Int32) -> None:
    """Start to copy the warp's keys of V's block n in the same way."""
    values = ctx.sV[None, None, stage]
    by_key = cute.make_tensor(values.iterator, cute.select(values.layout, [1, 0]))
    _load(ctx, ctx.tensors.v, by_key, ctx.plan.features.Dv, n, last, places)


def _load(
    ctx: Context, cache: cute.Tensor, staged: cute.Tensor, columns: int, n: Int32, last: Int32, places: Places
) -> None:
    columns = columns * ctx.plan.cache_dtype.width // 16
    for i, place in enumerate(places):
        own, keys = ctx.copied_keys + i * KEYS, ctx.tile.keys
        wanted = Wanted(n * ctx.plan.form.keys + own - keys[0], cutlass.max(keys[1] - keys[0], 0), n, last)
        copy_run(staged, own, _source(ctx, cache, place, staged), wanted, columns)


def _source(ctx: Context, cache: cute.Tensor, place: Place, stage: cute.Tensor) -> Source:
    """The warp's run of a block: what does not change from block to block comes first in the sum."""
    pitch, start = None, _first(cache) + _bytes(cache, 2, ctx.tile.kv_head)
    if ctx.plan.form.has_runs:
        lane, pitch = lane_of(stage), _stride(cache, 1)
        start += _bytes(cache, 1, lane.row) + Int64(lane.vector * 16)
    if ctx.plan.form.paged:
        start += _bytes(cache, 0, place.page)
    else:
        start += _bytes(cache, 0, ctx.tile.batch)
    return Source(start + _bytes(cache, 1, place.row), pitch)


def _first(x: cute.Tensor) -> Int64:
    return Int64(x.iterator.toint())


def _stride(x: cute.Tensor, mode: int) -> Int64:
    """The stride in bytes."""
    return Int64(x.stride[mode]) * (x.element_type.width // 8)


def _bytes(x: cute.Tensor, mode: int, index: Int32) -> Int64:
    """Bytes to an index, which is not negative; they may be more than 2**31."""
    return Int64(Uint32(index)) * _stride(x, mode)
