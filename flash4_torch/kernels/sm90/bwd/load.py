"""The loading warp: draws tiles and keeps K, V, Q and dO coming."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...common import ring
from ...common.ring import Cursor, Ring
from .. import persistent
from ..warps import WARP
from . import tile as tiles
from .plan import MESSAGE
from .tile import Tile

if TYPE_CHECKING:
    from .kernel import Kernel


class Cursors(NamedTuple):
    ticket: Cursor
    kv: Cursor
    q: Cursor
    do: Cursor
    end: Cursor


@cute.jit
def load(k: Kernel) -> None:
    """Every tile's K, V and number, then its blocks of rows from the first to the last, head after head."""
    shape = tiles.shape(k)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start(), ring.start())
    ticket = persistent.first_ticket(k)
    while ticket < shape.tiles:
        number = persistent.request_ticket(k, shape.tiles)
        tile = tiles.decode(k, shape, ticket)
        if tiles.first_key(k, tile) < tile.Sk:
            at = _load_tile(k, at, tile)
        ticket, ticket_at = persistent.receive_ticket(k, number, at.ticket)
        at = at._replace(ticket=ticket_at)
    _say_that_all_is_done(k, at.kv)


@cute.jit
def _load_tile(k: Kernel, at: Cursors, tile: Tile) -> Cursors:
    end_at = _load_keys(k, k.load_k, at.kv, at.end, k.maps.load_k, k.maps.mK, k.sK, tile, True)
    end_at = _load_keys(k, k.load_v, at.kv, end_at, k.maps.load_v, k.maps.mV, k.sV, tile, False)
    q_at, do_at = at.q, at.do
    span, heads = tiles.span_of(k, tile), tiles.group(k)
    q = k.maps.load_q, k.maps.mQ, k.sQ, k.plan.q_share, k.sLse, 0
    do = k.maps.load_do, k.maps.mdO, k.sdO, k.plan.do_share, k.sDelta, 1
    for h in cutlass.range(heads, unroll=1):
        head = tile.key_head * heads + h
        blocks = tiles.blocks_of(k, tile, span, head)
        for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
            n, _ = tiles.block_at(k, blocks, position)
            end_at = _load_rows(k, k.load_q, q_at, end_at, q, tile, head, n)
            end_at = _load_rows(k, k.load_do, do_at, end_at, do, tile, head, n)
            q_at, do_at = ring.after(q_at, k.load_q.stages), ring.after(do_at, k.load_do.stages)
    return Cursors(at.ticket, ring.after(at.kv, k.plan.config.kv_stages), q_at, do_at, end_at)


@cute.jit
def _load_keys(
    k: Kernel,
    edge: Ring,
    at: Cursor,
    end_at: Cursor,
    atom,
    source: cute.Tensor,
    target: cute.Tensor,
    tile: Tile,
    tells: cutlass.Constexpr,
) -> Cursor:
    """K or V of the tile; rows beyond the end are zeros. `tells`: which tile it is comes with it."""
    ring.wait_empty(edge, at)
    left = tile.Sk - tile.block * k.plan.keys
    full = _barrier(k, edge, at, left, k.plan.keys)
    others = _bytes(k.sOtherK) if tells and k.sOtherK is not None else 0
    with cute.arch.elect_one():
        if cutlass.const_expr(tells):
            tiles.write(k, at, tile)
        cute.arch.mbarrier_arrive_and_expect_tx(full, _bytes(target) + others)
    rows = cute.domain_offset((tile.first_k, 0), source[None, None, tile.key_head, _batch(k, tile.batch)])
    stage = target[None, None, at.stage]
    _copy(atom, _box(rows, stage, tile.block), stage, full)
    if cutlass.const_expr(others):
        columns, box = k.sOtherK[None, None, at.stage], (k.plan.keys, k.plan.D // k.plan.ctas)
        place = tile.block ^ 1, k.pair.rank
        _copy(k.maps.load_other_k, cute.local_tile(rows, box, place), columns, full)
    return _finish_end(k, edge, at, end_at, stage, left, k.plan.keys)


@cute.jit
def _load_rows(
    k: Kernel, edge: Ring, at: Cursor, end_at: Cursor, what: tuple, tile: Tile, head: Int32, n: Int32
) -> Cursor:
    """Block n of Q or dO, and of lse or delta."""
    atom, source, target, share, statistics, which = what
    ring.wait_empty(edge, at)
    left = tile.Sq - n * k.plan.queries
    full = _barrier(k, edge, at, left, k.plan.queries)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, _bytes(target) + 4 * k.plan.queries)
        _copy_statistics(k, statistics[None, at.stage], which, tile, head, n, full)
    rows = cute.domain_offset((tile.first_q, 0), source[None, None, head, _batch(k, tile.batch)])
    stage = target[None, None, at.stage]
    rows = _box(rows, stage, n)
    if cutlass.const_expr(k.plan.ctas == 1):
        _copy(atom, rows, stage, full)
    else:
        # Half of it for both CTAs; it arrives at the barriers `full` of both.
        half = (0, k.pair.rank) if share[0] == k.plan.queries else (k.pair.rank, 0)
        part, place = (cute.local_tile(x, share, half) for x in (rows, stage))
        _copy(atom, part, place, full, mcast_mask=Int16((1 << k.plan.ctas) - 1))
    return _finish_end(k, edge, at, end_at, stage, left, k.plan.queries)


@cute.jit
def _barrier(k: Kernel, edge: Ring, at: Cursor, left: Int32, rows: cutlass.Constexpr) -> cute.Pointer:
    """Where the stage's copies arrive: of a packed sequence's end, at a barrier that this warp waits for."""
    if cutlass.const_expr(not k.plan.features.varlen):
        return edge.full + at.stage
    to_end = (k.sequence_end.full.toint() - edge.full.toint()) // 8
    return edge.full + (to_end if left < rows else at.stage)


@cute.jit
def _finish_end(
    k: Kernel,
    edge: Ring,
    at: Cursor,
    end_at: Cursor,
    stage: cute.Tensor,
    left: Int32,
    rows: cutlass.Constexpr,
) -> Cursor:
    """Zero what follows a packed sequence's end: weights there are 0, but 0 times infinity or NaN is not."""
    if cutlass.const_expr(k.plan.features.varlen):
        if left < rows:
            ring.wait_full(k.sequence_end, end_at)
            _zero_rows(stage, left)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(edge.full + at.stage)
            end_at = ring.after(end_at, 1)
    return end_at


@cute.jit
def _zero_rows(stage: cute.Tensor, first: Int32) -> None:
    """Zero the rows from `first` on, 16 bytes a lane."""
    rows, columns = (cute.size(stage, mode=[i]) for i in range(2))
    chunks = columns // 8
    zeros = cute.make_rmem_tensor((1, 8), stage.element_type)
    zeros.fill(0.0)
    first = cutlass.max(first, 0)
    for e in cutlass.range(cute.arch.lane_idx(), (rows - first) * chunks, WARP, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(stage, (1, 8), (first + e // chunks, e % chunks)))


@cute.jit
def _copy_statistics(
    k: Kernel,
    target: cute.Tensor,
    which: cutlass.Constexpr,
    tile: Tile,
    head: Int32,
    n: Int32,
    full: cute.Pointer,
) -> None:
    """By one lane."""
    shape = k.stats.shape
    row = Int64(tiles.row_of_workspace(k, tile, head))
    if cutlass.const_expr(which):
        for size in shape[1:-1]:
            which = which * Int64(size)
        row = row + which
    start = row * shape[-1] + (tiles.first_block(k, tile) + n) * k.plan.queries
    pointer = cute.make_ptr(
        cutlass.Float32, (k.stats.iterator + start).toint(), cute.AddressSpace.gmem, assumed_align=16
    )
    source = cute.make_tensor(pointer, cute.make_layout(k.plan.queries))
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32)
    cute.copy(atom, cute.group_modes(source, 0, 1), cute.group_modes(target, 0, 1), mbar_ptr=full)


@cute.jit
def _say_that_all_is_done(k: Kernel, at: Cursor) -> None:
    ring.wait_empty(k.load_k, at)
    with cute.arch.elect_one():
        cute.arch.store(k.message + at.stage * MESSAGE, Int32(-1))
        cute.arch.mbarrier_arrive(k.load_k.full + at.stage)


@cute.jit
def _copy(atom, source: cute.Tensor, target: cute.Tensor, full: cute.Pointer, **more) -> None:
    s, g = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
    )
    cute.copy(atom, g, s, tma_bar_ptr=full, **more)


def _box(rows: cute.Tensor, stage: cute.Tensor, n: Int32) -> cute.Tensor:
    """As many rows as fill a stage."""
    return cute.local_tile(rows, tuple(cute.size(stage, mode=[i]) for i in range(2)), (n, 0))


def _batch(k: Kernel, batch: Int32) -> Int32:
    """Packed sequences are a batch of one."""
    return Int32(0) if k.plan.features.varlen else batch


def _bytes(staged: cute.Tensor) -> int:
    return cute.size_in_bytes(staged.element_type, cute.select(staged.layout, mode=[0, 1]))
