"""The semaphore by which tiles add to dQ in a fixed order: an int32 for each block of query rows.

A block's semaphore counts the pieces of all tiles up to the last one that has added to it. The tiles that
visit a block are neighbours, and the first of them also counts for the tiles before it, which do not visit
the block.

No fence stands between the end of a bulk copy and the release: `cp.async.bulk.wait_group` makes the writes of
the async proxy visible to the thread that waited, and the release is that thread's. The thread that acquires
is about to write through the async proxy, so it fences between (PTX ISA, Memory Consistency Model: Proxies).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from .context import BackwardContext
from .tiles import DqOrder


class Step(NamedTuple):
    """A piece's place in the order."""

    address: Int64
    """Address of the block's semaphore."""
    awaited: Int32
    """The semaphore's least value at which the piece may be added."""
    count: Int32
    """How far adding the piece advances the semaphore."""


@cute.jit
def step_of(ctx: BackwardContext, order: DqOrder, n: Int32, block: Int64, is_first: Any) -> Step:
    """The step of a piece of block n, after the previous tile in dQ order.

    block: number of the block in the workspaces. is_first: whether it is the piece that counts for tiles
    which do not visit the block.
    """
    follows = (order.before.first <= n) & (n < order.before.last)
    earlier = order.number * ctx.plan.config.dq_pieces
    count = Int32(1) + (earlier if is_first & ~follows else Int32(0))
    return Step((ctx.dq_semaphore.iterator + block).toint(), earlier if follows else Int32(0), count)


@cute.jit
def wait(address: Int64, awaited: Int32) -> None:
    """Spin, in one thread, until all earlier pieces have been added."""
    spin(address, awaited)
    cute.arch.inline_ptx("fence.proxy.async;")


@cute.jit
def spin(address: Int64, awaited: Int32) -> None:
    """`wait`, before sums that threads add themselves."""
    seen = _load(address)
    while seen < awaited:
        seen = _load(address)


@cute.jit
def advance(address: Int64, count: Int32) -> None:
    """Wait, in the thread that issued them, until the bulk copies are in global memory, and count them."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    release(address, count)


@cute.jit
def release(address: Int64, count: Int32) -> None:
    """Count, in one thread, sums that were added before a barrier of all that added."""
    cute.arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], {$r1};", read_only_args=[address, count])


def _load(address: Int64) -> Int32:
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )
