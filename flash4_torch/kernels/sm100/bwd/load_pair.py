"""The loading warp of each CTA of a pair: its own K and V, half of the columns of both K, shares of blocks.

Every product of a pair takes half of the rows of its second factor from each CTA. So Q is loaded twice, half
of a block's rows for S and half of its columns for dK, and dO likewise for dP and dV: shares of the same
bytes, in one ring, in the order of the products. All but lse and delta arrive at the barriers of CTA 0, whose
thread issues the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common import key_tiles as tiles
from ...common import persistent, ring
from ...common.copies import copy, stage_bytes
from ...common.key_loads import copy_statistics, say_that_all_is_done
from ...common.key_tiles import Tile
from ...common.ring import Cursor

if TYPE_CHECKING:
    from .kernel import Kernel


class Cursors(NamedTuple):
    ticket: Cursor
    kv: Cursor
    numbers: Cursor
    share: Cursor


class Block(NamedTuple):
    """Of a query head."""

    head: Int32
    n: Int32


@cute.jit
def load_pair(k: Kernel) -> None:
    shape = tiles.shape(k)
    at = Cursors(ring.start(), ring.start(), ring.start(), ring.start())
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
    _load_keys(k, at.kv, tile)
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
def _load_keys(k: Kernel, at: Cursor, tile: Tile) -> None:
    """K, half of the columns of both K, and which tile it is; then V."""
    maps = k.maps
    ring.wait_empty(k.load_k, at)
    with cute.arch.elect_one():
        tiles.write(k, at, tile)
        cute.arch.mbarrier_arrive(k.load_k.full + at.stage)
    _expect(k, k.signals.load_pair, stage_bytes(k.sK) + stage_bytes(k.sKt))
    stage = k.sK[None, None, at.stage]
    own = _box(k, maps.mK, tile, tile.key_head, stage, (tile.block, 0))
    copy(maps.load_k, own, stage, k.signals.load_pair)
    place = tile.block // k.plan.ctas, k.pair.rank
    both = _box(k, maps.mK, tile, tile.key_head, k.sKt, place)
    copy(maps.load_k_columns, both, k.sKt, k.signals.load_pair)
    ring.wait_empty(k.load_v, at)
    full = k.load_v.full + at.stage
    _expect(k, full, stage_bytes(k.sV))
    stage = k.sV[None, None, at.stage]
    copy(maps.load_v, _box(k, maps.mV, tile, tile.key_head, stage, (tile.block, 0)), stage, full)


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
    place = block.n * k.plan.ctas + k.pair.rank, 0
    return _load_share(k, at, tile, block, k.maps.load_q, k.maps.mQ, k.shares.q, place)


@cute.jit
def _load_q_columns(k: Kernel, at: Cursors, tile: Tile, block: Block) -> Cursors:
    place = block.n, k.pair.rank
    return _load_share(k, at, tile, block, k.maps.load_q_columns, k.maps.mQ, k.shares.q_columns, place)


@cute.jit
def _load_do(k: Kernel, at: Cursors, tile: Tile, block: Block) -> Cursors:
    """For dV, then for dP."""
    maps, shares = k.maps, k.shares
    place = block.n, k.pair.rank
    at = _load_share(k, at, tile, block, maps.load_do_columns, maps.mdO, shares.do_columns, place)
    place = block.n * k.plan.ctas + k.pair.rank, 0
    return _load_share(k, at, tile, block, maps.load_do, maps.mdO, shares.do, place)


@cute.jit
def _load_share(
    k: Kernel, at: Cursors, tile: Tile, block: Block, atom, source: cute.Tensor, layout, place: tuple
) -> Cursors:
    edge, here = k.shares.ring, at.share
    ring.wait_empty(edge, here)
    start = cute.recast_ptr(k.shares.stages[None, here.stage].iterator, layout.inner, k.plan.dtype)
    stage = cute.make_tensor(start, cute.select(layout.outer, mode=[0, 1]))
    full = edge.full + here.stage
    _expect(k, full, cute.size(stage) * 2)
    copy(atom, _box(k, source, tile, block.head, stage, place), stage, full)
    return at._replace(share=ring.after(here, edge.stages))


@cute.jit
def _expect(k: Kernel, full: cute.Pointer, size: cutlass.Constexpr) -> None:
    """What both CTAs load arrives in the first one."""
    if k.pair.rank == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size * k.plan.ctas)


def _box(
    k: Kernel, source: cute.Tensor, tile: Tile, head: Int32, stage: cute.Tensor, place: tuple
) -> cute.Tensor:
    size = tuple(cute.size(stage, mode=[i]) for i in range(2))
    return cute.local_tile(source[None, None, head, tile.batch], size, place)
