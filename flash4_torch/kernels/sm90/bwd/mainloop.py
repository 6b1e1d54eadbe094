"""A consumer warpgroup's mainloop: five GEMMs for every block of rows, tile after tile.

Keys are the rows of the accumulators of S^T, dP^T, dK and dV, so that P^T and dS^T are operands from
registers. The tensor cores have work during the arithmetic: dP^T is in flight while S^T becomes P^T, dV while
dP^T becomes dS^T, and the next block's S^T while dQ is handed to the store warp that has it added.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import warp

from ....configs.types import Scope
from ...common import ring
from ...common.bwd import tiles
from ...common.bwd.tiles import Tile
from ...common.ring import Cursor
from ...common.role import role
from ...common.warps import GROUP
from .. import wgmma
from ..warps import ROWS
from . import walk
from .context import Context
from .epilogue import epilogue, epilogue_via_dq_smem
from .finish_dq import fetch_sums, finish_dq, is_last
from .plan import NamedBarrier
from .preprocess import preprocess
from .state import Cursors, Thread, TileState, after_block, rows_at, slot_at, start
from .store_commands import add_dq, send_end
from .weights import MaskRows, differentiate, dropped, fetch_words, mask_rows, recompute_p

ALONE = 2
"""A value of `_block`'s `last`, instead of True: only the first warpgroup's keys take part in the block."""


@role(
    produces=("write_stats", "share_ds"),
    consumes=("load_q", "load_do", "load_k", "load_v", "keep_bits", "share_ds"),
)
@cute.jit
def mainloop(ctx: Context, warpgroup: Int32) -> None:
    plan = ctx.plan
    if cutlass.const_expr(plan.config.preprocesses):
        preprocess(ctx)
    thread, _, _ = cute.arch.thread_idx()
    t = Thread(
        warpgroup,
        thread % GROUP,
        wgmma.scores_accumulator(plan.dtype, plan.queries),
        wgmma.output_accumulator(plan.dtype, plan.D),
        wgmma.output_accumulator(plan.dtype, plan.Dv),
    )
    at = _tiles_overlapped(ctx, t) if cutlass.const_expr(plan.config.next_tile) else _tiles(ctx, t)
    send_end(ctx, t, slot_at(ctx, t, at))


@cute.jit
def _tiles(ctx: Context, t: Thread) -> Cursors:
    """Process one tile after the other."""
    plan = ctx.plan
    kv_at = ring.start()
    at = start(ctx, t)
    tile = tiles.read(ctx, kv_at)
    while tile.index >= 0:
        ring.wait_full(ctx.load_q, at.q)
        _issue_scores(ctx, t, kv_at, at.q)
        ring.wait_full(ctx.load_v, kv_at)
        if cutlass.const_expr(plan.scope != Scope.KV_HEAD):
            at = _blocks(ctx, t, tile, kv_at, at)
        elif is_last(tile):
            at = _blocks(replace(ctx, finishes=True), t, tile, kv_at, at)
        else:
            at = _blocks(ctx, t, tile, kv_at, at)
        if cutlass.const_expr(plan.dkv_via_dq_smem):
            epilogue_via_dq_smem(ctx, t, kv_at, slot_at(ctx, t, at))
        else:
            epilogue(ctx, t, tile, kv_at)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(ctx, kv_at)
    return at


@cute.jit
def _blocks(ctx: Context, t: Thread, tile: Tile, kv_at: Cursor, at: Cursors) -> Cursors:
    """Process all blocks that the tile visits; the scores of the first one are in flight."""
    at, work, n, accumulate = walk.all_but_the_last(ctx, t, tile, kv_at, at, _block, ctx.plan.masks)
    return _last_block(ctx, t, work, n, accumulate, at)


@cute.jit
def _tiles_overlapped(ctx: Context, t: Thread) -> Cursors:
    """Process tiles with the next tile's first scores in flight while this tile's dK and dV are stored.

    A wgmma that a branch skips could not stay in flight (ptxas.md, P1). So scores are computed after the last
    tile, too, from whatever is left in shared memory, and are not used.
    """
    plan = ctx.plan
    kv_at = ring.start()
    at = start(ctx, t)
    tile = tiles.read(ctx, kv_at)
    if cutlass.const_expr(plan.features.varlen):
        # A CTA may claim no tile that has keys.
        if tile.index >= 0:
            ring.wait_full(ctx.load_q, at.q)
    else:
        ring.wait_full(ctx.load_q, at.q)
    _issue_scores(ctx, t, kv_at, at.q)
    while tile.index >= 0:
        ring.wait_full(ctx.load_v, kv_at)
        next_at, next_tile = ring.after(kv_at, plan.config.kv_stages), tile
        if cutlass.const_expr(plan.scope != Scope.KV_HEAD):
            next_tile, at = _blocks_overlapped(ctx, t, tile, kv_at, at)
        elif is_last(tile):
            next_tile, at = _blocks_overlapped(replace(ctx, finishes=True), t, tile, kv_at, at)
        else:
            next_tile, at = _blocks_overlapped(ctx, t, tile, kv_at, at)
        epilogue(ctx, t, tile, kv_at)
        tile, kv_at = next_tile, next_at
    wgmma.wait(0)
    return at


@cute.jit
def _blocks_overlapped(
    ctx: Context, t: Thread, tile: Tile, kv_at: Cursor, at: Cursors
) -> tuple[Tile, Cursors]:
    """Do as `_blocks` does, but leave the next tile's first scores in flight; returns that tile."""
    plan = ctx.plan
    at, work, n, accumulate = walk.all_but_the_last(ctx, t, tile, kv_at, at, _block, plan.masks)
    dQ, after = _block_to_dq(ctx, t, work, n, accumulate, plan.masks, at)
    next_at = ring.after(kv_at, plan.config.kv_stages)
    next_tile = tiles.read(ctx, next_at)
    if next_tile.index >= 0:
        ring.wait_full(ctx.load_q, after.q)
    _issue_scores(ctx, t, next_at, after.q)
    wgmma.wait(1)
    _add_dq(ctx, t, work, n, dQ, at, True)
    return next_tile, after


@cute.jit
def _issue_scores(ctx: Context, t: Thread, kv_at: Cursor, q_at: Cursor) -> None:
    wgmma.scores(t.S, _own(ctx.sK[None, None, kv_at.stage], t), ctx.sQ[None, None, q_at.stage])


@cute.jit
def _last_block(
    ctx: Context, t: Thread, work: TileState, n: Int32, accumulate: Boolean, at: Cursors
) -> Cursors:
    """Process the last block. If only the first warpgroup sees something of it, only its keys take part."""
    if cutlass.const_expr(not ctx.plan.skip_masked_half):
        return _block(ctx, t, work, n, accumulate, ctx.plan.masks, True, at)
    first_of_others = work.tile.index * ctx.plan.keys + ROWS
    after = at
    if (n + 1) * ctx.plan.queries > work.band.first_key(first_of_others):
        after = _block(ctx, t, work, n, accumulate, True, True, at)
    elif t.warpgroup == 0:
        after = _block(ctx, t, work, n, accumulate, True, ALONE, at)
    else:
        after = _masked_block(ctx, t, work, n, accumulate, at)
    return after


@cute.jit
def _masked_block(ctx: Context, t: Thread, work: TileState, n: Int32, add: Boolean, at: Cursors) -> Cursors:
    """Process a tile's last block, of which the warpgroup sees nothing: it still computes its part of dQ."""
    # Its scores were issued with the block before, and their registers are needed.
    wgmma.wait(0)
    if not add:
        t.dK.fill(0.0)
        t.dV.fill(0.0)
    cute.arch.barrier(barrier_id=NamedBarrier.DS_WRITTEN, number_of_threads=ctx.plan.consumers)
    dQ = wgmma.output_accumulator(ctx.plan.dtype, ctx.plan.blocks.piece_columns)
    _issue_dq(ctx, t, work, dQ, at.ds, True)
    _fetch_sums(ctx, t, work, n, at)
    ring.release(ctx.load_do, rows_at(at))
    ring.release(ctx.load_q, at.q)
    wgmma.wait(0)
    _add_dq(ctx, t, work, n, dQ, at, True)
    return after_block(ctx, at)


@cute.jit
def _block(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    add: Boolean,
    masked: cutlass.Constexpr,
    last: cutlass.Constexpr,
    at: Cursors,
) -> Cursors:
    """Process block n of a head, whose scores are in flight; leaves those of the next one in flight."""
    dQ, after = _block_to_dq(ctx, t, work, n, add, masked, at, last == ALONE)
    if cutlass.const_expr(last):
        wgmma.wait(0)
    else:
        ring.wait_full(ctx.load_q, after.q)
        _issue_scores(ctx, t, work.kv, after.q)
        after = fetch_words(ctx, t, work, after)
        wgmma.wait(1)
    _add_dq(ctx, t, work, n, dQ, at, bool(last))
    return after


@cute.jit
def _block_to_dq(
    ctx: Context,
    t: Thread,
    work: TileState,
    n: Int32,
    add: Boolean,
    masked: cutlass.Constexpr,
    at: Cursors,
    alone: cutlass.Constexpr = False,
) -> tuple:
    """Process a block up to dQ, which is left in flight; returns dQ and the next block's cursors."""
    plan = ctx.plan
    mask = None
    if cutlass.const_expr(masked and plan.fetches_words):
        mask = MaskRows(None, at.words)
    elif cutlass.const_expr(masked and plan.features.mask != ""):
        mask = mask_rows(ctx, t, work, n)
    ring.wait_full(ctx.load_do, rows_at(at))
    # A wgmma that crosses the loop's edge has to be waited for alone: ptxas serialises everything otherwise
    # (ptxas.md, P3).
    wgmma.wait(0)
    dP = wgmma.scores_accumulator(plan.dtype, plan.queries)
    wgmma.scores(dP, _own(ctx.sV[None, None, work.kv.stage], t), ctx.sdO[None, None, rows_at(at).stage])
    _fetch_sums(ctx, t, work, n, at)
    probs = recompute_p(ctx, t, work, n, at.q, mask, masked)
    wgmma.accumulate(t.dV, dropped(ctx, probs), ctx.sdOt[None, None, rows_at(at).stage], add)
    wgmma.wait(1)
    dS = differentiate(ctx, t, work, n, rows_at(at), probs, dP)
    if cutlass.const_expr(plan.config.ds_stages == 1):
        ring.wait_empty(ctx.share_ds, at.ds)
    share(ctx, t, dS, ctx.sdS[None, None, at.ds.stage])
    wgmma.accumulate(t.dK, dS, ctx.sQt[None, None, at.q.stage], add)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=NamedBarrier.DS_WRITTEN, number_of_threads=plan.consumers)

    dQ = wgmma.output_accumulator(plan.dtype, plan.blocks.piece_columns)
    _issue_dq(ctx, t, work, dQ, at.ds, alone)
    # With dK and the next scores in flight together, ptxas finds too few registers (ptxas.md, P4).
    wgmma.wait(1)
    ring.release(ctx.load_do, rows_at(at))
    ring.release(ctx.load_q, at.q)
    return dQ, after_block(ctx, at)


@cute.jit
def _fetch_sums(ctx: Context, t: Thread, work: TileState, n: Int32, at: Cursors) -> None:
    """Begin to fetch the sums of dQ, if this tile completes them."""
    if cutlass.const_expr(ctx.finishes):
        fetch_sums(ctx, t, slot_at(ctx, t, at), t.warpgroup, work, n)


@cute.jit
def _add_dq(
    ctx: Context, t: Thread, work: TileState, n: Int32, dQ: cute.Tensor, at: Cursors, last: cutlass.Constexpr
) -> None:
    if cutlass.const_expr(ctx.plan.config.ds_stages == 1):
        ring.release(ctx.share_ds, at.ds)
    slot = slot_at(ctx, t, at)
    if cutlass.const_expr(ctx.finishes):
        finish_dq(ctx, t, dQ, slot, work, n)
    else:
        add_dq(ctx, t, dQ, slot, t.warpgroup, work, n, last)


@cute.jit
def share(ctx: Context, t: Thread, dS: cute.Tensor, stage: cute.Tensor) -> None:
    """Write dS of the warpgroup's own keys where every warpgroup reads it."""
    turned = cute.make_tensor(stage.iterator, cute.select(stage.layout, [1, 0]))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), ctx.plan.dtype)
    mma = wgmma.scores_mma(ctx.plan.dtype, ctx.plan.queries)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(t.index)
    source = cute.make_tensor(dS.iterator, t.S.layout)
    cute.copy(atom, copy.retile(source), copy.partition_D(_own(turned, t)))


@cute.jit
def _issue_dq(
    ctx: Context, t: Thread, work: TileState, dQ: cute.Tensor, ds_at: Cursor, alone: cutlass.Constexpr
) -> None:
    """Issue the warpgroup's piece of dQ = dS K. `alone`: from the first warpgroup's keys only."""
    blocks, w = ctx.plan.blocks, t.warpgroup
    dS, keys = ctx.sdS[None, None, ds_at.stage], ctx.sKt[None, None, work.kv.stage]
    if cutlass.const_expr(blocks.bands > 1):
        dS = cute.local_tile(dS, (ROWS, ctx.plan.keys), (w, 0))
    if cutlass.const_expr(blocks.parts > 1):
        keys = cute.local_tile(keys, (blocks.piece_columns, ctx.plan.keys), (w, 0))
    if cutlass.const_expr(alone):
        dS, keys = (cute.local_tile(x, (cute.size(x, mode=[0]), ROWS), (0, 0)) for x in (dS, keys))
    wgmma.transposed(dQ, dS, keys)


def _own(x: cute.Tensor, t: Thread) -> cute.Tensor:
    """The warpgroup's 64 rows."""
    return cute.local_tile(x, (ROWS, cute.size(x, mode=[1])), (t.warpgroup, 0))
