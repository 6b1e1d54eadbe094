"""A consumer warpgroup: five products for every block of rows, tile after tile.

Keys are the rows of all its accumulators, so that P^T and dS^T are operands from registers. The tensor cores
have work while it computes weights: dP^T is under way while S^T becomes P^T, dV while dP^T becomes dS^T, and
the next block's S^T while dQ is left for the warp that has it added.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import warp

from ...common import key_tiles as tiles
from ...common import ring
from ...common.key_tiles import Tile
from ...common.ring import Cursor
from ...common.warps import GROUP
from .. import wgmma
from ..warps import ROWS
from . import walk
from .epilogue import epilogue, epilogue_aside
from .finish_dq import fetch_sums, finish_dq, is_last
from .plan import SHARED
from .store_dq import add_dq, end_adding
from .weights import differentiate, dropped, mask_rows, weigh
from .work import Cursors, Thread, Work, after_block, rows_at, slot_at, start

if TYPE_CHECKING:
    from .kernel import Kernel


ALONE = 2
"""Instead of True for `_block`'s `last`: only the first warpgroup's keys take part in it."""


@cute.jit
def consume(k: Kernel, warpgroup: Int32) -> None:
    plan = k.plan
    thread, _, _ = cute.arch.thread_idx()
    t = Thread(
        warpgroup,
        thread % GROUP,
        wgmma.scores_accumulator(plan.dtype, plan.queries),
        wgmma.output_accumulator(plan.dtype, plan.D),
        wgmma.output_accumulator(plan.dtype, plan.Dv),
    )
    at = _tiles_overlapped(k, t) if cutlass.const_expr(plan.config.next_tile) else _tiles(k, t)
    end_adding(k, t, slot_at(k, t, at))


@cute.jit
def _tiles(k: Kernel, t: Thread) -> Cursors:
    """One tile after the other."""
    plan = k.plan
    kv_at = ring.start()
    at = start(k, t)
    tile = tiles.read(k, kv_at)
    while tile.block >= 0:
        ring.wait_full(k.load_q, at.q)
        _issue_scores(k, t, kv_at, at.q)
        ring.wait_full(k.load_v, kv_at)
        if cutlass.const_expr(not plan.whole_heads):
            at = _blocks(k, t, tile, kv_at, at)
        elif is_last(tile):
            at = _blocks(replace(k, finishes=True), t, tile, kv_at, at)
        else:
            at = _blocks(k, t, tile, kv_at, at)
        if cutlass.const_expr(plan.gradients_aside):
            epilogue_aside(k, t, kv_at, slot_at(k, t, at))
        else:
            epilogue(k, t, tile, kv_at)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(k, kv_at)
    return at


@cute.jit
def _blocks(k: Kernel, t: Thread, tile: Tile, kv_at: Cursor, at: Cursors) -> Cursors:
    """All that the tile visits; the scores of the first one are under way."""
    at, work, n, started = walk.all_but_the_last(k, t, tile, kv_at, at, _block, k.plan.masks)
    return _last_block(k, t, work, n, started, at)


@cute.jit
def _tiles_overlapped(k: Kernel, t: Thread) -> Cursors:
    """The next tile's first scores are under way while this tile's dK and dV are stored.

    Products that a branch skips could not stay under way: after the last tile scores are made of what is left
    in shared memory, and not used.
    """
    plan = k.plan
    kv_at = ring.start()
    at = start(k, t)
    tile = tiles.read(k, kv_at)
    if cutlass.const_expr(plan.features.varlen):
        # A CTA may draw no tile that has keys.
        if tile.block >= 0:
            ring.wait_full(k.load_q, at.q)
    else:
        ring.wait_full(k.load_q, at.q)
    _issue_scores(k, t, kv_at, at.q)
    while tile.block >= 0:
        ring.wait_full(k.load_v, kv_at)
        next_at, next_tile = ring.after(kv_at, plan.config.kv_stages), tile
        if cutlass.const_expr(not plan.whole_heads):
            next_tile, at = _blocks_overlapped(k, t, tile, kv_at, at)
        elif is_last(tile):
            next_tile, at = _blocks_overlapped(replace(k, finishes=True), t, tile, kv_at, at)
        else:
            next_tile, at = _blocks_overlapped(k, t, tile, kv_at, at)
        epilogue(k, t, tile, kv_at)
        tile, kv_at = next_tile, next_at
    wgmma.wait(0)
    return at


@cute.jit
def _blocks_overlapped(k: Kernel, t: Thread, tile: Tile, kv_at: Cursor, at: Cursors) -> tuple[Tile, Cursors]:
    """`_blocks`; leaves the next tile's first scores under way, and returns which that is."""
    plan = k.plan
    at, work, n, started = walk.all_but_the_last(k, t, tile, kv_at, at, _block, plan.masks)
    dQ, after = _block_to_dq(k, t, work, n, started, plan.masks, at)
    next_at = ring.after(kv_at, plan.config.kv_stages)
    next_tile = tiles.read(k, next_at)
    if next_tile.block >= 0:
        ring.wait_full(k.load_q, after.q)
    _issue_scores(k, t, next_at, after.q)
    wgmma.wait(1)
    _add_dq(k, t, work, n, dQ, at, True)
    return next_tile, after


@cute.jit
def _issue_scores(k: Kernel, t: Thread, kv_at: Cursor, q_at: Cursor) -> None:
    wgmma.scores(t.S, _own(k.sK[None, None, kv_at.stage], t), k.sQ[None, None, q_at.stage])


@cute.jit
def _last_block(k: Kernel, t: Thread, work: Work, n: Int32, started: Boolean, at: Cursors) -> Cursors:
    """If only the first warpgroup sees something of it, only its keys take part."""
    if cutlass.const_expr(not k.plan.skips_hidden):
        return _block(k, t, work, n, started, k.plan.masks, True, at)
    first_of_others = work.tile.block * k.plan.keys + ROWS
    after = at
    if (n + 1) * k.plan.queries > first_of_others + work.band.lowest:
        after = _block(k, t, work, n, started, True, True, at)
    elif t.warpgroup == 0:
        after = _block(k, t, work, n, started, True, ALONE, at)
    else:
        after = _hidden_block(k, t, work, n, started, at)
    return after


@cute.jit
def _hidden_block(k: Kernel, t: Thread, work: Work, n: Int32, add: Boolean, at: Cursors) -> Cursors:
    """By a warpgroup that sees nothing of a tile's last block: it has its columns of dQ to make."""
    # Its scores were issued with the block before, and their registers are needed.
    wgmma.wait(0)
    if not add:
        t.dK.fill(0.0)
        t.dV.fill(0.0)
    cute.arch.barrier(barrier_id=SHARED, number_of_threads=k.plan.consumers)
    dQ = wgmma.output_accumulator(k.plan.dtype, k.plan.blocks.piece_columns)
    _issue_dq(k, t, work, dQ, at.ds, True)
    _fetch_sums(k, t, work, n, at)
    ring.release(k.load_do, rows_at(at))
    ring.release(k.load_q, at.q)
    wgmma.wait(0)
    _add_dq(k, t, work, n, dQ, at, True)
    return after_block(k, at)


@cute.jit
def _block(
    k: Kernel,
    t: Thread,
    work: Work,
    n: Int32,
    add: Boolean,
    masked: cutlass.Constexpr,
    last: cutlass.Constexpr,
    at: Cursors,
) -> Cursors:
    """Block n of a head, whose scores are under way; leaves those of the next one under way."""
    config = k.plan.config
    dQ, after = _block_to_dq(k, t, work, n, add, masked, at, last == ALONE)
    if cutlass.const_expr(last or not config.scores_first):
        wgmma.wait(0)
    if cutlass.const_expr(not last):
        ring.wait_full(k.load_q, after.q)
        _issue_scores(k, t, work.kv, after.q)
        if cutlass.const_expr(config.scores_first):
            wgmma.wait(1)
    _add_dq(k, t, work, n, dQ, at, bool(last))
    return after


@cute.jit
def _block_to_dq(
    k: Kernel,
    t: Thread,
    work: Work,
    n: Int32,
    add: Boolean,
    masked: cutlass.Constexpr,
    at: Cursors,
    alone: cutlass.Constexpr = False,
) -> tuple:
    """Everything but the end of dQ, which is left under way."""
    plan = k.plan
    mask = None
    if cutlass.const_expr(masked and plan.features.mask != ""):
        mask = mask_rows(k, t, work, n)
    ring.wait_full(k.load_do, rows_at(at))
    # Products that cross the loop's edge have to be waited for alone: ptxas serialises everything otherwise.
    wgmma.wait(0)
    dP = wgmma.scores_accumulator(plan.dtype, plan.queries)
    wgmma.scores(dP, _own(k.sV[None, None, work.kv.stage], t), k.sdO[None, None, rows_at(at).stage])
    _fetch_sums(k, t, work, n, at)
    made = weigh(k, t, work, n, at.q, mask, masked)
    wgmma.accumulate(t.dV, dropped(k, made), k.sdOt[None, None, rows_at(at).stage], add)
    wgmma.wait(1)
    dS = differentiate(k, t, work, n, rows_at(at), made, dP)
    if cutlass.const_expr(plan.config.ds_stages == 1):
        ring.wait_empty(k.share_ds, at.ds)
    share(k, t, dS, k.sdS[None, None, at.ds.stage])
    wgmma.accumulate(t.dK, dS, k.sQt[None, None, at.q.stage], add)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=SHARED, number_of_threads=plan.consumers)

    dQ = wgmma.output_accumulator(plan.dtype, plan.blocks.piece_columns)
    _issue_dq(k, t, work, dQ, at.ds, alone)
    # With dK and the next scores under way together ptxas finds too few registers.
    wgmma.wait(1)
    ring.release(k.load_do, rows_at(at))
    ring.release(k.load_q, at.q)
    return dQ, after_block(k, at)


@cute.jit
def _fetch_sums(k: Kernel, t: Thread, work: Work, n: Int32, at: Cursors) -> None:
    """If the block's dQ will be complete."""
    if cutlass.const_expr(k.finishes):
        fetch_sums(k, t, slot_at(k, t, at), t.warpgroup, work, n)


@cute.jit
def _add_dq(
    k: Kernel, t: Thread, work: Work, n: Int32, dQ: cute.Tensor, at: Cursors, last: cutlass.Constexpr
) -> None:
    if cutlass.const_expr(k.plan.config.ds_stages == 1):
        ring.release(k.share_ds, at.ds)
    slot = slot_at(k, t, at)
    if cutlass.const_expr(k.finishes):
        finish_dq(k, t, dQ, slot, work, n)
    else:
        add_dq(k, t, dQ, slot, t.warpgroup, work, n, last)


@cute.jit
def share(k: Kernel, t: Thread, dS: cute.Tensor, stage: cute.Tensor) -> None:
    """Write the own keys' dS where every warpgroup reads it."""
    turned = cute.make_tensor(stage.iterator, cute.select(stage.layout, [1, 0]))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), k.plan.dtype)
    mma = wgmma.scores_mma(k.plan.dtype, k.plan.queries)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(t.index)
    source = cute.make_tensor(dS.iterator, t.S.layout)
    cute.copy(atom, copy.retile(source), copy.partition_D(_own(turned, t)))


@cute.jit
def _issue_dq(
    k: Kernel, t: Thread, work: Work, dQ: cute.Tensor, ds_at: Cursor, alone: cutlass.Constexpr
) -> None:
    """The warpgroup's piece of dQ = dS K. `alone`: of the first warpgroup's keys."""
    blocks, w = k.plan.blocks, t.warpgroup
    dS, keys = k.sdS[None, None, ds_at.stage], k.sKt[None, None, work.kv.stage]
    if cutlass.const_expr(blocks.bands > 1):
        dS = cute.local_tile(dS, (ROWS, k.plan.keys), (w, 0))
    if cutlass.const_expr(blocks.parts > 1):
        keys = cute.local_tile(keys, (blocks.piece_columns, k.plan.keys), (w, 0))
    if cutlass.const_expr(alone):
        dS, keys = (cute.local_tile(x, (cute.size(x, mode=[0]), ROWS), (0, 0)) for x in (dS, keys))
    wgmma.transposed(dQ, dS, keys)


def _own(x: cute.Tensor, t: Thread) -> cute.Tensor:
    """The warpgroup's 64 rows."""
    return cute.local_tile(x, (ROWS, cute.size(x, mode=[1])), (t.warpgroup, 0))
