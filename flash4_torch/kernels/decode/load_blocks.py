"""Loads of blocks of K and V that are each in one page, by one warp.

A block all of whose keys are seen comes by TMA. Of one with other keys, the first or the last of a sequence,
a warp copies by `cp.async` those that a row sees, so that nothing else is read, and zeroes the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...configs.decode import KEYS, WARPS
from ..common import copies, ring
from ..common.ring import Cursor
from ..common.warps import WARP
from .context import Context
from .load import Place, load_k, load_v


class BlockPages(NamedTuple):
    """Page numbers that the table has, as it has them; each lane has those of two blocks.

    They are read long before they are needed: to touch them is to wait for them.
    """

    now: Int32
    """Pages of 32 blocks after one another."""
    next: Int32
    """Pages of the next 32 blocks."""


def first_pages(ctx: Context, first: Int32) -> BlockPages:
    """Start to look up the pages of the blocks from `first` on."""
    return BlockPages(*(_look_up(ctx, first + WARP * i) for i in range(2)))


@cute.jit
def next_pages(ctx: Context, pages: BlockPages, first: Int32, n: Int32) -> BlockPages:
    """The pages to find block n with, after those for block n - 1."""
    now, after = pages.now, pages.next
    if cutlass.const_expr(ctx.plan.form.paged):
        if (n - first) % WARP == 0:
            now = after
            after = _look_up(ctx, n + WARP)
    return BlockPages(now, after)


@cute.jit
def find(ctx: Context, pages: BlockPages, first: Int32, n: Int32) -> Place:
    """The place of block n's first key."""
    page, row = ctx.tile.batch, n * ctx.plan.form.keys
    if cutlass.const_expr(ctx.plan.form.paged):
        page = cute.arch.shuffle_sync(pages.now, (n - first) % WARP)
        page = cutlass.max(cutlass.min(page, ctx.tensors.k.shape[0] - 1), 0)
        row = row % ctx.divisors.page_size
    return Place(page, row)


@cute.jit
def _look_up(ctx: Context, own: Int32) -> Int32:
    """The page that the table has for the lane's block, `own` and its lane, if a row sees a key of it."""
    page = Int32(0)
    if cutlass.const_expr(ctx.plan.form.paged):
        first, last = ctx.tile.keys
        begin = (own + ctx.lane) * ctx.plan.form.keys
        key = cutlass.max(begin, first)
        if (key < last) & (key < begin + ctx.plan.form.keys):
            page = ctx.tensors.block_table[ctx.tile.batch, key // ctx.divisors.page_size]
    return page


def is_partial(ctx: Context, n: Int32) -> Boolean:
    """Whether block n has a key that no row sees."""
    first, last = ctx.tile.keys
    return (n * ctx.plan.form.keys < first) | (last < (n + 1) * ctx.plan.form.keys)


@cute.jit
def copy_k(ctx: Context, n: Int32, last: Int32, place: Place, at: Cursor, partial: Boolean) -> None:
    """Start to copy block n of K once its stage is empty, by TMA, or by lanes if it is partial."""
    plan, maps, stage = ctx.plan, ctx.maps, ctx.sK[None, None, at.stage]
    ring.wait_empty(ctx.load_k, at)
    if partial:
        _copy_seen(ctx, load_k, n, last, place, at.stage)
    else:
        mK = maps.mK[None, None, ctx.tile.kv_head, place.page]
        gK = cute.local_tile(mK, (plan.form.keys, plan.D), (place.row // plan.form.keys, 0))
        _copy_whole(maps.load_k, gK, stage, ctx.load_k.full + at.stage)


@cute.jit
def copy_v(ctx: Context, n: Int32, last: Int32, place: Place, at: Cursor, partial: Boolean) -> None:
    """Start to copy block n of V in the same way."""
    plan, maps, stage = ctx.plan, ctx.maps, ctx.sV[None, None, at.stage]
    ring.wait_empty(ctx.load_v, at)
    if partial:
        _copy_seen(ctx, load_v, n, last, place, at.stage)
    else:
        mV = maps.mV[None, None, ctx.tile.kv_head, place.page]
        gV = cute.local_tile(mV, (plan.Dv, plan.form.keys), (0, place.row // plan.form.keys))
        _copy_whole(maps.load_v, gV, stage, ctx.load_v.full + at.stage)


@cute.jit
def await_lanes(
    ctx: Context, k_at: Cursor, k_is_partial: Boolean, v_at: Cursor, v_is_partial: Boolean
) -> None:
    """Wait for what lanes copied to these stages, and signal it."""
    cute.arch.cp_async_wait_group(0)
    # Copies by threads are writes of the generic proxy, and wgmmas read through the asynchronous one.
    cute.arch.fence_view_async_shared()
    if k_is_partial:
        ring.fill(ctx.load_k, k_at)
    if v_is_partial:
        ring.fill(ctx.load_v, v_at)


@cute.jit
def _copy_whole(atom, source: cute.Tensor, stage: cute.Tensor, full: cute.Pointer) -> None:
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, copies.stage_bytes(stage))
    copies.copy(atom, source, stage, full)


@cute.jit
def _copy_seen(
    ctx: Context, load: cutlass.Constexpr, n: Int32, last: Int32, place: Place, stage: Int32
) -> None:
    """Start to copy the seen keys of a block, those of one of four warps after another's."""
    for warp in cutlass.range(WARPS, unroll=1):
        own = replace(ctx, warp=warp)
        rows = [place.row + own.copied_keys + KEYS * i for i in range(ctx.plan.copies)]
        load(own, n, last, tuple(Place(place.page, row) for row in rows), stage)
    cute.arch.cp_async_commit_group()
