"""The loading warp of each CTA of a pair: its own K and V, half of the columns of both K, shares of blocks.

Every product of a pair takes half of the rows of its second factor from each CTA. So Q is loaded twice, half
of a block's rows for S and half of its columns for dK, and dO likewise for dP and dV: shares of the same
bytes, in one ring, in the order of the products. All but lse and delta arrive at the barriers of CTA 0, whose
thread issues the products.

CTA 0 expects the bytes of both. Of packed sequences each expects its own, as the end of a sequence is another
matter: its copy arrives at a barrier here, what follows the end is zeroed, then this warp arrives in CTA 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import nvvm

from ...common import key_tiles as tiles
from ...common import persistent, ring
from ...common.copies import copy, stage_bytes
from ...common.key_loads import batch_of, copy_statistics, say_that_all_is_done, zero_rows
from ...common.key_tiles import Tile
from ...common.ring import Cursor

if TYPE_CHECKING:
    from .kernel import Kernel


class Cursors(NamedTuple):
    ticket: Cursor
    kv: Cursor
    numbers: Cursor
    share: Cursor
    end: Cursor


class Source(NamedTuple):
    """What a copy takes, and how."""

    atom: Any
    to_here: Any
    """The same for the end of a packed sequence, which arrives in this CTA."""
    matrix: cute.Tensor


class Block(NamedTuple):
    """Of a query head."""

    head: Int32
    n: Int32


@cute.jit
def load_pair(k: Kernel) -> None:
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
    say_that_all_is_done(k, at.kv)


@cute.jit
def _load_tile(k: Kernel, at: Cursors, tile: Tile) -> Cursors:
    """Q by columns comes one block later: dK follows S of the next block."""
    at = _load_keys(k, at, tile)
    span, heads = tiles.span_of(k, tile), tiles.group(k)
    before, started = Block(Int32(0), Int32(0)), Boolean(False)
    for h in cutlass.range(heads, unroll=1):
        head = tile.key_head * heads + h
        blocks = tiles.blocks_of(k, tile, span, head)
        for position in cutlass.range(blocks.span.first, blocks.span.last, unroll=1):
            n, _ = tiles.block_at(k, blocks, position)
            block = Block(head, n)
            at = _load_numbers(k, at, tile, block)
            at = _load_q_rows(k, at, tile, block)
            if started:
                at = _load_q_columns(k, at, tile, before)
            at = _load_do(k, at, tile, block)
            before, started = block, Boolean(True)
    at = _load_q_columns(k, at, tile, before)
    return at._replace(kv=ring.after(at.kv, k.plan.config.kv_stages))


@cute.jit
def _load_keys(k: Kernel, at: Cursors, tile: Tile) -> Cursors:
    """K, half of the columns of both K, and which tile it is; then V."""
    maps, kv, head, end = k.maps, at.kv, tile.key_head, at.end
    ring.wait_empty(k.load_k, kv)
    with cute.arch.elect_one():
        tiles.write(k, kv, tile)
        cute.arch.mbarrier_arrive(k.load_k.full + kv.stage)
    full, own = k.signals.load_pair, (tile.block, 0)
    _expect(k, full, stage_bytes(k.sK) + stage_bytes(k.sKt))
    source = Source(maps.load_k, maps.end_k, maps.mK)
    end = _copy(k, source, tile, head, k.sK[None, None, kv.stage], own, tile.first_k, tile.Sk, full, end)
    source = Source(maps.load_k_columns, maps.end_k_columns, maps.mK)
    place = tile.block // k.plan.ctas, k.pair.rank
    end = _copy(k, source, tile, head, k.sKt, place, tile.first_k, tile.Sk, full, end)
    ring.wait_empty(k.load_v, kv)
    full = k.load_v.full + kv.stage
    _expect(k, full, stage_bytes(k.sV))
    source = Source(maps.load_v, maps.end_v, maps.mV)
    end = _copy(k, source, tile, head, k.sV[None, None, kv.stage], own, tile.first_k, tile.Sk, full, end)
    return at._replace(end=end)


@cute.jit
def _load_numbers(k: Kernel, at: Cursors, tile: Tile, block: Block) -> Cursors:
    """lse and delta of all of a block's rows, for the warps of this CTA."""
    edge, here = k.load_q, at.numbers
    ring.wait_empty(edge, here)
    full = edge.full + here.stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * 4 * k.plan.queries)
        for which, numbers in enumerate((k.sLse, k.sDelta)):
            copy_statistics(k, numbers[None, here.stage], which, tile, block.head, block.n, full)
    return at._replace(numbers=ring.after(here, edge.stages))


@cute.jit
def _load_q_rows(k: Kernel, at: Cursors, tile: Tile, block: Block) -> Cursors:
    source = Source(k.maps.load_q, k.maps.end_q, k.maps.mQ)
    return _load_share(k, at, tile, block, source, k.shares.q, _half_of_rows(k, block))


@cute.jit
def _load_q_columns(k: Kernel, at: Cursors, tile: Tile, block: Block) -> Cursors:
    source = Source(k.maps.load_q_columns, k.maps.end_q_columns, k.maps.mQ)
    return _load_share(k, at, tile, block, source, k.shares.q_columns, (block.n, k.pair.rank))


@cute.jit
def _load_do(k: Kernel, at: Cursors, tile: Tile, block: Block) -> Cursors:
    """For dV, then for dP."""
    maps, shares = k.maps, k.shares
    source = Source(maps.load_do_columns, maps.end_do_columns, maps.mdO)
    at = _load_share(k, at, tile, block, source, shares.do_columns, (block.n, k.pair.rank))
    source = Source(maps.load_do, maps.end_do, maps.mdO)
    return _load_share(k, at, tile, block, source, shares.do, _half_of_rows(k, block))


def _half_of_rows(k: Kernel, block: Block) -> tuple:
    return block.n * k.plan.ctas + k.pair.rank, 0


@cute.jit
def _load_share(
    k: Kernel, at: Cursors, tile: Tile, block: Block, source: Source, layout, place: tuple
) -> Cursors:
    edge, here = k.shares.ring, at.share
    ring.wait_empty(edge, here)
    start = cute.recast_ptr(k.shares.stages[None, here.stage].iterator, layout.inner, k.plan.dtype)
    stage = cute.make_tensor(start, cute.select(layout.outer, mode=[0, 1]))
    full = edge.full + here.stage
    _expect(k, full, cute.size(stage) * 2)
    end = _copy(k, source, tile, block.head, stage, place, tile.first_q, tile.Sq, full, at.end)
    return at._replace(share=ring.after(here, edge.stages), end=end)


@cute.jit
def _expect(k: Kernel, full: cute.Pointer, size: cutlass.Constexpr) -> None:
    """What both CTAs load arrives in the first one."""
    if cutlass.const_expr(not k.plan.features.varlen):
        if k.pair.rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size * k.plan.ctas)


@cute.jit
def _copy(
    k: Kernel,
    source: Source,
    tile: Tile,
    head: Int32,
    stage: cute.Tensor,
    place: tuple,
    first: Int32,
    count: Int32,
    full: cute.Pointer,
    end_at: Cursor,
) -> Cursor:
    """The box at `place` of the sequence's rows, which are `count` from the `first` on."""
    box = tuple(cute.size(stage, mode=[i]) for i in range(2))
    rows = source.matrix[None, None, head, batch_of(k, tile.batch)]
    if cutlass.const_expr(not k.plan.features.varlen):
        copy(source.atom, cute.local_tile(rows, box, place), stage, full)
    else:
        rows, size = cute.domain_offset((first, 0), rows), cute.size(stage) * 2
        left, wanted = count - place[0] * box[0], cute.local_tile(rows, box, place)
        if left >= box[0]:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size, 0)
            copy(source.atom, wanted, stage, full)
        else:
            end_at = _copy_end(k, source.to_here, wanted, stage, left, full, end_at)
    return end_at


@cute.jit
def _copy_end(
    k: Kernel, atom, box: cute.Tensor, stage: cute.Tensor, left: Int32, full: cute.Pointer, at: Cursor
) -> Cursor:
    """Zero what follows the end: weights there are 0, but 0 times infinity or NaN is not."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(k.sequence_end.full, cute.size(stage) * 2)
    copy(atom, box, stage, k.sequence_end.full)
    ring.wait_full(k.sequence_end, at)
    zero_rows(stage, left)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(full, 0, scope=nvvm.MemScopeKind.CLUSTER)
    return ring.after(at, 1)
