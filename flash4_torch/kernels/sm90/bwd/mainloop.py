"""A consumer warpgroup: five products for every block of rows, tile after tile.

Keys are the rows of all its accumulators, so that P^T and dS^T are operands from registers. The tensor cores
have work while it computes weights: dP^T is under way while S^T becomes P^T, dV while dP^T becomes dS^T, and
the next block's S^T while dQ is left for the warp that has it added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warp

from ...common import attn_mask, dropout, ring, scores
from ...common import band as bands
from ...common import key_tiles as tiles
from ...common.add_dmask import add_dmask
from ...common.band import Band, Span
from ...common.fragment import Fragment, wgmma_fragment
from ...common.key_tiles import Blocks, Place, Tile
from ...common.ring import Cursor
from ...common.rounding import round_to, widened
from ...common.warps import GROUP, WARP, WARPS
from .. import wgmma
from ..warps import LANES, ROWS, WARP_ROWS
from .epilogue import epilogue, epilogue_aside
from .plan import SHARED
from .store_dq import add_dq, end_adding, other_slot

if TYPE_CHECKING:
    from .kernel import Kernel


class Thread(NamedTuple):
    """A thread of a warpgroup, and what it keeps in registers from block to block."""

    warpgroup: Int32
    index: Int32
    S: cute.Tensor
    dK: cute.Tensor
    dV: cute.Tensor
    held: cute.Tensor | None = None
    """K or V, where they are operands from registers."""

    @property
    def lane(self) -> Int32:
        return self.index % WARP

    @property
    def row(self) -> Int32:
        """The first of its two keys among the warpgroup's 64; the other one is eight further on."""
        return self.index // WARP * WARP_ROWS + self.lane // LANES


class Work(NamedTuple):
    """A tile and one of its query heads, as a thread sees it."""

    tile: Tile
    kv: Cursor
    band: Band
    span: Span
    turn: tiles.Turn | None
    """If sums have an order."""
    positions: tuple[Int32, Int32]
    """Of the thread's keys."""
    head: Int32
    blocks: Blocks


class Cursors(NamedTuple):
    q: Cursor
    do: Cursor
    ds: Cursor
    dq: Int32 | None = None
    """The slot in which the warpgroup leaves its dQ; None where `split`, which has one."""


class MaskRows(NamedTuple):
    """What attn_mask says of a thread's keys, and what has been loaded of it for a block."""

    rows: attn_mask.Rows
    words: tuple


class Made(NamedTuple):
    """Of a block's scores, in the order of their registers: what its dS needs, besides S itself."""

    P: cute.Tensor
    slopes: cute.Tensor | None
    """Of softcap, 16 bits."""
    kept: cute.Tensor | None


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
    end_adding(k, t, at.dq)


@cute.jit
def _tiles(k: Kernel, t: Thread) -> Cursors:
    """One tile after the other."""
    plan = k.plan
    kv_at = ring.start()
    at = Cursors(ring.start(), ring.start(), ring.start(), t.warpgroup)
    tile = tiles.read(k, kv_at)
    while tile.block >= 0:
        ring.wait_full(k.load_q, at.q)
        _issue_scores(k, t, kv_at, at.q)
        ring.wait_full(k.load_v, kv_at)
        at = each_block(k, t, tile, kv_at, at, _block, plan.masks)
        if cutlass.const_expr(plan.gradients_aside):
            epilogue_aside(k, t, kv_at, at.dq)
        else:
            epilogue(k, t, tile, kv_at)
        kv_at = ring.after(kv_at, plan.config.kv_stages)
        tile = tiles.read(k, kv_at)
    return at


@cute.jit
def _tiles_overlapped(k: Kernel, t: Thread) -> Cursors:
    """The next tile's first scores are under way while this tile's dK and dV are stored.

    Products that a branch skips could not stay under way: after the last tile scores are made of what is left
    in shared memory, and not used.
    """
    plan = k.plan
    kv_at = ring.start()
    at = Cursors(ring.start(), ring.start(), ring.start(), t.warpgroup)
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
        at, work, n, started = _each_block_but_the_last(k, t, tile, kv_at, at, _block, plan.masks)
        dQ, after = _block_to_dq(k, t, work, n, started, plan.masks, at)
        next_at = ring.after(kv_at, plan.config.kv_stages)
        next_tile = tiles.read(k, next_at)
        if next_tile.block >= 0:
            ring.wait_full(k.load_q, after.q)
        _issue_scores(k, t, next_at, after.q)
        wgmma.wait(1)
        _add_dq(k, t, work, n, dQ, at)
        epilogue(k, t, tile, kv_at)
        tile, kv_at, at = next_tile, next_at, after
    wgmma.wait(0)
    return at


@cute.jit
def _issue_scores(k: Kernel, t: Thread, kv_at: Cursor, q_at: Cursor) -> None:
    wgmma.scores(t.S, _own(k.sK[None, None, kv_at.stage], t), k.sQ[None, None, q_at.stage])


@cute.jit
def each_block(
    k: Kernel,
    t: Thread,
    tile: Tile,
    kv_at: Cursor,
    at: Cursors,
    block: cutlass.Constexpr,
    masks: cutlass.Constexpr,
) -> Cursors:
    """`block` for all blocks of all heads of the group; the very last one has no successor to begin with."""
    at, work, n, started = _each_block_but_the_last(k, t, tile, kv_at, at, block, masks)
    return block(k, t, work, n, started, masks, True, at)


@cute.jit
def _each_block_but_the_last(
    k: Kernel,
    t: Thread,
    tile: Tile,
    kv_at: Cursor,
    at: Cursors,
    block: cutlass.Constexpr,
    masks: cutlass.Constexpr,
) -> tuple:
    """And which one is left, and whether there were others.

    `masks`: whether `block` has to know which blocks are masked.
    """
    if cutlass.const_expr(k.plan.heads_inside):
        return _blocks_of_all_heads(k, t, tile, kv_at, at, block, masks)
    heads = tiles.group(k)
    started = Boolean(False)
    for h in cutlass.range(heads, unroll=1):
        work = _work(k, t, tile, kv_at, h)
        last = work.blocks.span.last - 1 if h == heads - 1 else work.blocks.span.last
        if cutlass.const_expr(not masks):
            at, started = _blocks_uncut(k, t, work, last, started, at, block)
        elif cutlass.const_expr(k.plan.features.mask):
            at, started = _blocks_cut_anywhere(k, t, work, last, started, at, block)
        else:
            at, started = _blocks_cut_at_the_ends(k, t, work, last, started, at, block)
    work = _work(k, t, tile, kv_at, heads - 1)
    n, _ = tiles.block_at(k, work.blocks, work.blocks.span.last - 1)
    return at, work, n, started


@cute.jit
def _blocks_of_all_heads(
    k: Kernel,
    t: Thread,
    tile: Tile,
    kv_at: Cursor,
    at: Cursors,
    block: cutlass.Constexpr,
    masks: cutlass.Constexpr,
) -> tuple:
    """The same from the last block to the first one, each of all heads: one loop for all plain blocks."""
    plan, heads = k.plan, tiles.group(k)
    work = _work(k, t, tile, kv_at, Int32(0))
    span, started = work.span, Boolean(False)
    place, count = tiles.last_place(span), (span.last - span.first) * heads - 1
    first_plain, first_cut = Int32(0), count
    if cutlass.const_expr(masks):
        # Both may lie behind the last block.
        start, end = _whole(k, work)
        first_plain = cutlass.min(cutlass.max(span.last - end, 0) * heads, count)
        first_cut = cutlass.min(cutlass.max(span.last - start, 0) * heads, count)
    if cutlass.const_expr(masks and plan.cuts_at_the_end):
        at, place, started = _blocks_down(k, t, work, first_plain, place, started, at, block, True)
    at, place, started = _blocks_down(k, t, work, first_cut - first_plain, place, started, at, block, False)
    if cutlass.const_expr(masks and plan.cuts_at_the_start):
        at, place, started = _blocks_down(k, t, work, count - first_cut, place, started, at, block, True)
    return at, _of_head(k, work, heads - 1), span.first, started


@cute.jit
def _blocks_down(
    k: Kernel,
    t: Thread,
    work: Work,
    count: Int32,
    place: Place,
    started: Boolean,
    at: Cursors,
    block: cutlass.Constexpr,
    masked: cutlass.Constexpr,
) -> tuple:
    """So many blocks, from a place on."""
    for _ in cutlass.range(count, unroll=1):
        at = block(k, t, _of_head(k, work, place.h), place.n, started, masked, False, at)
        place, started = tiles.next_place(k, place), Boolean(True)
    return at, place, started


@cute.jit
def _of_head(k: Kernel, work: Work, h: Int32) -> Work:
    """The tile's work for another head of the group."""
    head = work.tile.key_head * tiles.group(k) + h
    return Work(work.tile, work.kv, work.band, work.span, work.turn, work.positions, head, work.blocks)


@cute.jit
def _work(k: Kernel, t: Thread, tile: Tile, kv_at: Cursor, h: Int32) -> Work:
    """For the h-th query head of the tile's group."""
    plan = k.plan
    first = tile.block * plan.keys + t.warpgroup * ROWS + t.row
    positions, head = (first, first + 8), tile.key_head * tiles.group(k) + h
    span, turn = tiles.span_of(k, tile), None
    if cutlass.const_expr(plan.features.deterministic):
        turn = tiles.turn_of(k, tile)
    blocks = tiles.blocks_of(k, tile, span, head)
    return Work(tile, kv_at, tiles.band_of(k, tile), span, turn, positions, head, blocks)


@cute.jit
def _blocks_uncut(
    k: Kernel, t: Thread, work: Work, last: Int32, started: Boolean, at: Cursors, block: cutlass.Constexpr
) -> tuple:
    """Blocks up to position `last`."""
    for position in cutlass.range(work.blocks.span.first, last, unroll=1):
        n, _ = tiles.block_at(k, work.blocks, position)
        at = block(k, t, work, n, started, False, False, at)
        started = Boolean(True)
    return at, started


@cute.jit
def _blocks_cut_at_the_ends(
    k: Kernel, t: Thread, work: Work, last: Int32, started: Boolean, at: Cursors, block: cutlass.Constexpr
) -> tuple:
    """Blocks up to `last`, of which some of the first and the last ones have to be masked."""
    plan = k.plan
    start, end = _whole(k, work)
    start, end = cutlass.min(start, last), cutlass.min(end, last)
    if cutlass.const_expr(plan.cuts_at_the_start):
        for n in cutlass.range(work.span.first, start, unroll=1):
            at = block(k, t, work, n, started, True, False, at)
            started = Boolean(True)
    for n in cutlass.range(start, end, unroll=1):
        at = block(k, t, work, n, started, False, False, at)
        started = Boolean(True)
    if cutlass.const_expr(plan.cuts_at_the_end):
        for n in cutlass.range(end, last, unroll=1):
            at = block(k, t, work, n, started, True, False, at)
            started = Boolean(True)
    return at, started


@cute.jit
def _blocks_cut_anywhere(
    k: Kernel, t: Thread, work: Work, last: Int32, started: Boolean, at: Cursors, block: cutlass.Constexpr
) -> tuple:
    """Blocks up to position `last`, any of which may have to be masked."""
    start, end = _whole(k, work)
    for position in cutlass.range(work.blocks.span.first, last, unroll=1):
        n, mixed = tiles.block_at(k, work.blocks, position)
        # A vote is known to be the same in all lanes, which keeps the products' addresses uniform.
        if cute.arch.vote_any_sync(mixed | (n < start) | (n >= end)):
            at = block(k, t, work, n, started, True, False, at)
        else:
            at = block(k, t, work, n, started, False, False, at)
        started = Boolean(True)
    return at, started


@cute.jit
def _whole(k: Kernel, work: Work) -> tuple:
    """The first block that neither the band nor the end of Sk cuts, and the first one after those."""
    plan, tile, span, band = k.plan, work.tile, work.span, work.band
    first = tile.block * plan.keys
    start, end = span.first, span.last
    if cutlass.const_expr(plan.band.left):
        lowest = cutlass.max(first + plan.keys - 1 + band.lowest, 0)
        start = cutlass.max(start, cute.ceil_div(lowest, plan.queries))
    if cutlass.const_expr(plan.band.right):
        end = cutlass.min(end, bands.whole_blocks(band, plan.band, first))
    if cutlass.const_expr(plan.config.tail):
        # All blocks have to hide keys beyond the end.
        ragged = first + plan.keys > tile.Sk
        start = span.last if ragged else start
    return start, cutlass.max(start, end)


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
    dQ, after = _block_to_dq(k, t, work, n, add, masked, at)
    if cutlass.const_expr(last or not config.scores_first):
        wgmma.wait(0)
    if cutlass.const_expr(not last):
        ring.wait_full(k.load_q, after.q)
        _issue_scores(k, t, work.kv, after.q)
        if cutlass.const_expr(config.scores_first):
            wgmma.wait(1)
    _add_dq(k, t, work, n, dQ, at)
    return after


@cute.jit
def _block_to_dq(
    k: Kernel, t: Thread, work: Work, n: Int32, add: Boolean, masked: cutlass.Constexpr, at: Cursors
) -> tuple:
    """Everything but the end of dQ, which is left under way."""
    plan = k.plan
    mask = None
    if cutlass.const_expr(masked and plan.features.mask != ""):
        mask = mask_rows(k, t, work, n)
    ring.wait_full(k.load_do, at.do)
    # Products that cross the loop's edge have to be waited for alone: ptxas serialises everything otherwise.
    wgmma.wait(0)
    dP = wgmma.scores_accumulator(plan.dtype, plan.queries)
    wgmma.scores(dP, _own(k.sV[None, None, work.kv.stage], t), k.sdO[None, None, at.do.stage])
    made = weigh(k, t, work, n, at.q, mask, masked)
    wgmma.accumulate(t.dV, dropped(k, made), k.sdOt[None, None, at.do.stage], add)
    wgmma.wait(1)
    dS = differentiate(k, t, work, n, at.do, made, dP)
    if cutlass.const_expr(plan.config.ds_stages == 1):
        ring.wait_empty(k.share_ds, at.ds)
    share(k, t, dS, k.sdS[None, None, at.ds.stage])
    wgmma.accumulate(t.dK, dS, k.sQt[None, None, at.q.stage], add)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=SHARED, number_of_threads=plan.consumers)

    dQ = wgmma.output_accumulator(plan.dtype, plan.blocks.piece_columns)
    _issue_dq(k, t, work, dQ, at.ds)
    # With dK and the next scores under way together ptxas finds too few registers.
    wgmma.wait(1)
    ring.release(k.load_do, at.do)
    ring.release(k.load_q, at.q)
    config = plan.config
    return dQ, Cursors(
        ring.after(at.q, config.q_stages),
        ring.after(at.do, config.do_stages),
        ring.after(at.ds, config.ds_stages),
        other_slot(k, at.dq),
    )


@cute.jit
def _add_dq(k: Kernel, t: Thread, work: Work, n: Int32, dQ: cute.Tensor, at: Cursors) -> None:
    if cutlass.const_expr(k.plan.config.ds_stages == 1):
        ring.release(k.share_ds, at.ds)
    add_dq(k, t, dQ, at.dq, t.warpgroup, work, n)


@cute.jit
def mask_rows(k: Kernel, t: Thread, work: Work, n: Int32) -> MaskRows:
    """Found anew for every block: it would hold registers that products under way need."""
    heads = (work.head, work.head)
    rows = attn_mask.rows_of(k.mask, work.tile.batch, heads, work.positions, t.lane % LANES)
    return MaskRows(rows, attn_mask.words_of(rows, n))


@cute.jit
def weigh(
    k: Kernel, t: Thread, work: Work, n: Int32, q_at: Cursor, mask: MaskRows | None, masked: cutlass.Constexpr
) -> Made:
    """Scores become weights, in place too."""
    plan, features = k.plan, k.plan.features
    P, slopes, kept = wgmma.weights_fragment(plan.dtype, plan.queries), None, None
    scores.change(t.S, k.rule, features.softcap, features.scaled)
    if cutlass.const_expr(features.softcap):
        slopes = wgmma.weights_fragment(plan.dtype, plan.queries)
        _slopes(k, t, slopes)
    if cutlass.const_expr(masked):
        fragment = wgmma_fragment(t.S, work.positions, n * plan.queries, t.lane)
        if cutlass.const_expr(features.mask):
            attn_mask.change(k.mask, mask.rows, mask.words, n, fragment)
        if cutlass.const_expr(plan.band.masks):
            bands.hide(work.band, plan.band, fragment)
        if cutlass.const_expr(plan.config.tail):
            _hide_rows(fragment, work.tile.Sk)
    scale = scores.softmax_scale(k.rule, features.scaled)
    lse = columns_of(k.sLse[None, q_at.stage], t)
    for j in cutlass.range_constexpr(cute.size(t.S) // 4):
        of_column = _pair(lse, j)
        for i in cutlass.range_constexpr(4):
            x = t.S[4 * j + i] * scale - of_column[i % 2]
            t.S[4 * j + i] = cute.math.exp2(x, fastmath=True)
        round_to(four_of(t.S, j), four_of(P, j))
    if cutlass.const_expr(features.dropout):
        kept = take_kept(k, t, q_at)
    return Made(P, slopes, kept)


@cute.jit
def take_kept(k: Kernel, t: Thread, q_at: Cursor) -> cute.Tensor:
    """Which of the thread's weights dropout keeps. Its ring turns with that of Q."""
    ring.wait_full(k.kept, q_at)
    own_warp = t.warpgroup * WARPS + t.index // WARP
    kept = dropout.take(k.sKept[None, None, own_warp, q_at.stage], t.lane)
    ring.release(k.kept, q_at)
    return kept


@cute.jit
def _slopes(k: Kernel, t: Thread, slopes: cute.Tensor) -> None:
    """Derivatives of the capped scores."""
    inverse = 1.0 / (k.rule.softcap * scores.LOG2E)
    for j in cutlass.range_constexpr(cute.size(t.S) // 4):
        values = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(4):
            tanh = t.S[4 * j + i] * inverse
            values[i] = 1.0 - tanh * tanh
        round_to(values, four_of(slopes, j))


@cute.jit
def dropped(k: Kernel, made: Made) -> cute.Tensor:
    """The weights that dropout leaves."""
    if cutlass.const_expr(not k.plan.features.dropout):
        return made.P
    dropped = wgmma.weights_fragment(k.plan.dtype, k.plan.queries)
    for i in cutlass.range_constexpr(cute.size(dropped)):
        dropped[i] = made.P[i]
    dropout.KeyRows.drop(dropped, made.kept)
    return dropped


@cute.jit
def differentiate(
    k: Kernel, t: Thread, work: Work, n: Int32, do_at: Cursor, made: Made, dP: cute.Tensor
) -> cute.Tensor:
    """dS = P (dP - delta), with respect to scaled scores."""
    features = k.plan.features
    dS = wgmma.weights_fragment(k.plan.dtype, k.plan.queries)
    if cutlass.const_expr(features.dropout):
        dropout.KeyRows.drop(dP, made.kept)
    delta = columns_of(k.sDelta[None, do_at.stage], t)
    for j in cutlass.range_constexpr(cute.size(dP) // 4):
        of_column, weights = _pair(delta, j), four_of(t.S, j)
        if cutlass.const_expr(k.plan.config.round_weights or k.plan.config.split):
            weights = widened(four_of(made.P, j))
        for i in cutlass.range_constexpr(4):
            gradient = dP[4 * j + i]
            if cutlass.const_expr(features.dropout):
                gradient = gradient * k.rule.keep_scale
            dP[4 * j + i] = weights[i] * (gradient - of_column[i % 2])
    if cutlass.const_expr(features.dmask):
        add_dmask(k, work, n, wgmma_fragment(dP, work.positions, n * k.plan.queries, t.lane))
    for j in cutlass.range_constexpr(cute.size(dP) // 4):
        if cutlass.const_expr(made.slopes is not None):
            slopes = widened(four_of(made.slopes, j))
            for i in cutlass.range_constexpr(4):
                dP[4 * j + i] = dP[4 * j + i] * slopes[i]
        round_to(four_of(dP, j), four_of(dS, j))
    return dS


def four_of(registers: cute.Tensor, j: int) -> cute.Tensor:
    """A thread's two rows of the j-th two columns."""
    return cute.make_tensor(registers.iterator + 4 * j, cute.make_layout(4))


@cute.jit
def _hide_rows(fragment: Fragment, Sk: Int32) -> None:
    for r in cutlass.range_constexpr(len(fragment.rows)):
        hidden = fragment.rows[r] >= Sk
        for c in cutlass.range_constexpr(len(fragment.offsets)):
            fragment.values[r, c] = -Float32.inf if hidden else fragment.values[r, c]


@cute.jit
def columns_of(numbers: cute.Tensor, t: Thread) -> cute.Tensor:
    """Of one number for each of a block's columns the thread's own: (2, C / 2) in shared memory."""
    start = (numbers.iterator + 2 * (t.lane % LANES)).toint()
    pairs = cute.make_ptr(Float32, start, cute.AddressSpace.smem, assumed_align=8)
    return cute.make_tensor(pairs, cute.make_layout((2, cute.size(numbers) // 8), stride=(1, 8)))


@cute.jit
def _pair(columns: cute.Tensor, j: cutlass.Constexpr) -> cute.Tensor:
    """Loaded where it is needed: all at once would take registers that products under way hold."""
    loaded = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(columns[None, j], loaded)
    return loaded


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
def _issue_dq(k: Kernel, t: Thread, work: Work, dQ: cute.Tensor, ds_at: Cursor) -> None:
    """The warpgroup's piece of dQ = dS K."""
    blocks, w = k.plan.blocks, t.warpgroup
    dS, keys = k.sdS[None, None, ds_at.stage], k.sKt[None, None, work.kv.stage]
    if cutlass.const_expr(blocks.bands > 1):
        dS = cute.local_tile(dS, (ROWS, k.plan.keys), (w, 0))
    if cutlass.const_expr(blocks.parts > 1):
        keys = cute.local_tile(keys, (blocks.piece_columns, k.plan.keys), (w, 0))
    wgmma.transposed(dQ, dS, keys)


def _own(x: cute.Tensor, t: Thread) -> cute.Tensor:
    """The warpgroup's 64 rows."""
    return cute.local_tile(x, (ROWS, cute.size(x, mode=[1])), (t.warpgroup, 0))
