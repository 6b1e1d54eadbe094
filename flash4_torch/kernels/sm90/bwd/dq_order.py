"""The order in which tiles add to dQ, as a store command carries it, and the blocks of the tile before."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...common.bwd import dq_semaphore, tiles
from ...common.bwd.dq_semaphore import Step
from .context import Context
from .state import TileState


@cute.jit
def was_visited(ctx: Context, work: TileState, n: Int32) -> Boolean:
    """Whether the tile before, which was another tile of the same head, has visited block n."""
    before = tiles.read_order(ctx, work.kv).before
    return (before.first <= n) & (n < before.last)


@cute.jit
def step_of(ctx: Context, piece: Int32, work: TileState, block: Int64, n: Int32) -> Step:
    """The step in the dQ order of a piece of block n, which is number `block` in the workspaces."""
    order = tiles.read_order(ctx, work.kv) if ctx.plan.load_warp_sends_order else work.order
    return dq_semaphore.step_of(ctx, order, n, block, piece == 0)
