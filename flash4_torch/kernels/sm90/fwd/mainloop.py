"""A consumer warpgroup: S = Q K^T, softmax, O += P V, block after block, tile after tile.

While one block's scores become weights, the tensor cores work on the block before: QK of block i and PV of
block i - 1 are issued together, and only QK is waited for before the softmax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...common import band as bands
from ...common import ring, scores, softmax
from ...common.band import Span
from ...common.fragment import wgmma_fragment
from ...common.ring import Cursor
from .. import wgmma
from . import tile as tiles
from .epilogue import epilogue
from .plan import GROUP, ROWS, TURN, WARP
from .tile import Tile

if TYPE_CHECKING:
    from .kernel import Kernel

LANES = 4
"""Neighbouring lanes that share a row of an accumulator."""


class Registers(NamedTuple):
    """A warpgroup's accumulators and the state of its rows."""

    S: cute.Tensor
    O: cute.Tensor
    P: cute.Tensor
    rows: softmax.Rows


class Share(NamedTuple):
    """What of a tile is this warpgroup's: query positions `first` to `last`, and blocks of keys.

    Of the tile's blocks, counted down, `before` and `after` are hidden from all its rows; it passes them.
    """

    first: Int32
    last: Int32
    top: Int32
    """The block it begins with, counting down."""
    before: Int32
    count: Int32
    after: Int32
    narrow: Boolean
    """The first block's upper half is hidden."""


class Place(NamedTuple):
    """A warpgroup and a thread of it."""

    warpgroup: Int32
    thread: Int32

    @property
    def lane(self) -> Int32:
        return self.thread % WARP

    @property
    def row(self) -> Int32:
        """The thread's first row of the warpgroup's 64; the other one is eight further on."""
        return self.thread // WARP * 16 + self.lane // LANES


@cute.jit
def consume(k: Kernel, warpgroup: Int32) -> None:
    plan = k.plan
    thread, _, _ = cute.arch.thread_idx()
    place = Place(warpgroup, thread % GROUP)
    r = Registers(
        wgmma.scores_accumulator(plan.dtype, plan.keys),
        wgmma.output_accumulator(plan.dtype, plan.Dv),
        wgmma.weights_fragment(plan.dtype, plan.keys),
        softmax.make_rows(2),
    )
    if cutlass.const_expr(plan.config.pingpong):
        if warpgroup == plan.warpgroups - 1:
            _pass_turn(k, place)

    if cutlass.const_expr(plan.config.next_tile):
        _tiles_overlapped(k, r, place)
    else:
        _tiles(k, r, place)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _tiles(k: Kernel, r: Registers, place: Place) -> None:
    """One tile after the other."""
    plan = k.plan
    q_at, k_at, v_at = ring.start(), ring.start(), ring.start()
    tile = tiles.read(k, q_at)
    while tile.block >= 0:
        share = _share(k, tile, place)
        k_at = _pass(k, place, share.before, k_at)
        ring.wait_full(k.load_k, k_at)
        _first_scores(k, r, place, share, q_at, k_at)
        k_at, v_at = _blocks(k, r, place, tile, share, q_at, k_at, v_at)
        wgmma.wait(0)
        ring.release(k.load_v, v_at)
        v_at = ring.after(v_at, plan.config.kv_stages)
        if cutlass.const_expr(plan.band.left):
            k_at, v_at = _pass_both(k, place, share.after, k_at, v_at)
        epilogue(k, r.O, r.rows, tile, q_at, place)
        q_at = ring.after(q_at, plan.config.q_stages)
        tile = tiles.read(k, q_at)


@cute.jit
def _tiles_overlapped(k: Kernel, r: Registers, place: Place) -> None:
    """The next tile's first scores are under way while this tile is normalised and stored.

    Products that a branch skips could not stay under way: after the last tile scores are made of what is left
    in shared memory, and not used.
    """
    plan = k.plan
    q_at, k_at, v_at = ring.start(), ring.start(), ring.start()
    tile = tiles.read(k, q_at)
    share = _share(k, tile, place)
    k_at = _pass(k, place, share.before, k_at)
    ring.wait_full(k.load_k, k_at)
    _issue_scores(k, r, place, q_at, k_at)
    while tile.block >= 0:
        wgmma.wait(0)
        k_at, v_at = _blocks(k, r, place, tile, share, q_at, k_at, v_at)
        own_q, q_at = q_at, ring.after(q_at, plan.config.q_stages)
        next_tile = tiles.read(k, q_at)
        next_share = _share(k, next_tile, place)
        if next_tile.block >= 0:
            k_at = _pass(k, place, next_share.before, k_at)
            ring.wait_full(k.load_k, k_at)
        _issue_scores(k, r, place, q_at, k_at)
        wgmma.wait(1)
        ring.release(k.load_v, v_at)
        v_at = ring.after(v_at, plan.config.kv_stages)
        epilogue(k, r.O, r.rows, tile, own_q, place)
        tile, share = next_tile, next_share
    wgmma.wait(0)


@cute.jit
def _share(k: Kernel, tile: Tile, place: Place) -> Share:
    plan = k.plan
    first = (tile.block * plan.warpgroups + place.warpgroup) * plan.tokens
    last = cutlass.min(first + plan.tokens, tile.Sq) - 1
    whole = tiles.span_of(k, tile)
    own = bands.visible_span(tiles.band_of(k, tile), plan.band, first, last)
    top = cutlass.max(cutlass.min(own.last, whole.last), whole.first + 1)
    bottom = cutlass.min(cutlass.max(own.first, whole.first), top - 1)
    narrow = Boolean(False)
    if cutlass.const_expr(plan.config.half):
        seen = cutlass.min(tile.Sk, last + tiles.band_of(k, tile).highest + 1)
        narrow = seen - (top - 1) * plan.keys <= plan.keys // 2
    return Share(first, last, top - 1, whole.last - top, top - bottom, bottom - whole.first, narrow)


@cute.jit
def _issue_scores(k: Kernel, r: Registers, place: Place, q_at: Cursor, k_at: Cursor) -> None:
    _wait_turn(k, place)
    wgmma.scores(r.S, _own_q(k, place, q_at), k.sK[None, None, k_at.stage])
    _pass_turn(k, place)


@cute.jit
def _first_scores(k: Kernel, r: Registers, place: Place, share: Share, q_at: Cursor, k_at: Cursor) -> None:
    """The first block's scores, or their lower half."""
    plan = k.plan
    if cutlass.const_expr(plan.config.half):
        if share.narrow:
            _wait_turn(k, place)
            half = cute.local_tile(k.sK[None, None, k_at.stage], (plan.keys // 2, plan.D), (0, 0))
            wgmma.scores(_lower_half(r.S), _own_q(k, place, q_at), half)
            _pass_turn(k, place)
            wgmma.wait(0)
        else:
            _issue_scores(k, r, place, q_at, k_at)
            wgmma.wait(0)
    else:
        _issue_scores(k, r, place, q_at, k_at)
        wgmma.wait(0)


@cute.jit
def _blocks(
    k: Kernel, r: Registers, place: Place, tile: Tile, share: Share, q_at: Cursor, k_at: Cursor, v_at: Cursor
):
    """All blocks, of which the first one's scores are there; leaves the last PV under way, its V held."""
    plan = k.plan
    ring.release(k.load_k, k_at)
    k_at = ring.after(k_at, plan.config.kv_stages)
    if cutlass.const_expr(plan.config.half):
        if share.narrow:
            _first_weights(k, r, _lower_half(r.S), place, tile, share)
            for i in cutlass.range_constexpr(cute.size(r.S) // 2, cute.size(r.S)):
                r.S[i] = Float32(0.0)
        else:
            _first_weights(k, r, r.S, place, tile, share)
    else:
        _first_weights(k, r, r.S, place, tile, share)
    wgmma.round_to(r.S, r.P)
    if cutlass.const_expr(plan.band.hides):
        v_at = _pass_quietly(k, k.load_v, share.before, v_at)
    for i in cutlass.range(1, share.count, unroll=1):
        k_at, v_at = _block(k, r, place, tile, share, i, q_at, k_at, v_at)
    _release_q(k, q_at)
    ring.wait_full(k.load_v, v_at)
    wgmma.accumulate(r.O, r.P, k.sV[None, None, v_at.stage], share.count > 1)
    return k_at, v_at


@cute.jit
def _block(
    k: Kernel,
    r: Registers,
    place: Place,
    tile: Tile,
    share: Share,
    i: Int32,
    q_at: Cursor,
    k_at: Cursor,
    v_at: Cursor,
):
    """QK of block i under PV of block i - 1."""
    plan = k.plan
    ring.wait_full(k.load_k, k_at)
    _wait_turn(k, place)
    wgmma.scores(r.S, _own_q(k, place, q_at), k.sK[None, None, k_at.stage])
    ring.wait_full(k.load_v, v_at)
    wgmma.accumulate(r.O, r.P, k.sV[None, None, v_at.stage], i > 1)
    _pass_turn(k, place)
    wgmma.wait(1)
    ring.release(k.load_k, k_at)
    _finish_scores(k, r.S, place, tile, share, share.top - i)
    values, scale = wgmma.rows_of(r.S), scores.softmax_scale(k.rule, plan.features.scaled)
    factors = softmax.advance(values, r.rows, scale, LANES, plan.hides_rows, plan.config.conditional)
    wgmma.wait(0)
    ring.release(k.load_v, v_at)
    softmax.rescale(wgmma.rows_of(r.O), factors, plan.config.conditional)
    wgmma.round_to(r.S, r.P)
    return ring.after(k_at, plan.config.kv_stages), ring.after(v_at, plan.config.kv_stages)


@cute.jit
def _first_weights(k: Kernel, r: Registers, S: cute.Tensor, place: Place, tile: Tile, share: Share) -> None:
    _finish_scores(k, S, place, tile, share, share.top)
    scale = scores.softmax_scale(k.rule, k.plan.features.scaled)
    softmax.begin(wgmma.rows_of(S), r.rows, scale, LANES, k.plan.hides_rows)


def _lower_half(S: cute.Tensor) -> cute.Tensor:
    """The accumulator of the first half of the columns."""
    (c, r, columns), m, n = S.shape
    return cute.make_tensor(S.iterator, cute.make_layout(((c, r, columns // 2), m, n)))


@cute.jit
def _finish_scores(k: Kernel, S: cute.Tensor, place: Place, tile: Tile, share: Share, n: Int32) -> None:
    """Scale and mask the scores of block n where need be."""
    plan = k.plan
    scores.change(S, k.rule, plan.features.softcap, plan.features.scaled)
    if cutlass.const_expr(plan.band.masks):
        band = tiles.band_of(k, tile)
        if bands.cuts(band, plan.band, n, share.first, share.last):
            rows = tuple(share.first + (place.row + 8 * e) // plan.pack for e in range(2))
            fragment = wgmma_fragment(S, rows, n * plan.keys, place.lane)
            bands.hide(band, plan.band, fragment)


@cute.jit
def _release_q(k: Kernel, at: Cursor) -> None:
    if cutlass.const_expr(not k.plan.config.o_over_q):
        ring.release(k.load_q, at)


def _own_q(k: Kernel, place: Place, at: Cursor) -> cute.Tensor:
    return k.sQ[None, None, at.stage * k.plan.warpgroups + place.warpgroup]


@cute.jit
def _pass(k: Kernel, place: Place, count: Int32, at: Cursor) -> Cursor:
    """Let `count` blocks of K go by: a stage is released only after it was seen full, or phases would mix."""
    if cutlass.const_expr(k.plan.band.hides):
        for _ in cutlass.range(count, unroll=1):
            ring.wait_full(k.load_k, at)
            _wait_turn(k, place)
            _pass_turn(k, place)
            ring.release(k.load_k, at)
            at = ring.after(at, k.load_k.stages)
    return at


@cute.jit
def _pass_quietly(k: Kernel, edge: ring.Ring, count: Int32, at: Cursor) -> Cursor:
    """Let `count` blocks of V go by."""
    for _ in cutlass.range(count, unroll=1):
        ring.wait_full(edge, at)
        ring.release(edge, at)
        at = ring.after(at, edge.stages)
    return at


@cute.jit
def _pass_both(k: Kernel, place: Place, count: Int32, k_at: Cursor, v_at: Cursor):
    """Let `count` blocks of K and V go by."""
    for _ in cutlass.range(count, unroll=1):
        k_at = _pass(k, place, Int32(1), k_at)
        v_at = _pass_quietly(k, k.load_v, Int32(1), v_at)
    return k_at, v_at


@cute.jit
def _wait_turn(k: Kernel, place: Place) -> None:
    if cutlass.const_expr(k.plan.config.pingpong):
        cute.arch.barrier(barrier_id=TURN + place.warpgroup, number_of_threads=2 * GROUP)


@cute.jit
def _pass_turn(k: Kernel, place: Place) -> None:
    if cutlass.const_expr(k.plan.config.pingpong):
        after = place.warpgroup + 1
        after = Int32(0) if after == k.plan.warpgroups else after
        cute.arch.barrier_arrive(barrier_id=TURN + after, number_of_threads=2 * GROUP)
