"""CTAs that stay for the whole launch, and the tickets by which they, or pairs of them, draw tiles.

`ctx` is what every role of a kernel may use: its plan, rule, tickets and pair.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from . import ring
from .cta_pair import hand_over
from .ring import Cursor


def launch(kernel: Any, plan: Any, tickets: Int32, multiprocessors: Int32, stream: cuda.CUstream) -> None:
    """As many CTAs, or clusters of them, as the GPU has room for, or as there are tickets."""
    block, shared = (plan.threads, 1, 1), {"min_blocks_per_mp": 1, "stream": stream}
    if plan.ctas == 1:
        kernel.launch(grid=(cutlass.min(tickets, multiprocessors), 1, 1), block=block, **shared)
    else:
        clusters = cutlass.max(cutlass.min(tickets, multiprocessors // plan.ctas), 1)
        grid, cluster = (clusters * plan.ctas, 1, 1), (plan.ctas, 1, 1)
        kernel.launch(grid=grid, block=block, cluster=cluster, **shared)


@cute.jit
def first_ticket(ctx: Any) -> Uint32:
    """The first tickets, one for each CTA or cluster, are not drawn."""
    own, _, _ = cute.arch.block_idx()
    return Uint32(own // ctx.plan.ctas)


@cute.jit
def request_ticket(ctx: Any, tickets: Uint32) -> Uint32:
    """Ask for the next ticket: a number in lane 0 that takes a microsecond to arrive, so use it late.

    The counter is back at 0 after the launch: it runs from 0 to `tickets` - 1, and as many are drawn, of
    which the last one of every CTA, or cluster, is too high.
    """
    number = Uint32(0)
    draws = cute.arch.lane_idx() == 0
    if cutlass.const_expr(ctx.plan.ctas > 1):
        draws = draws & (ctx.pair.rank == 0)
    if draws:
        number = cute.arch.inline_ptx(
            "atom.global.inc.u32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Uint32],
            read_only_args=[ctx.tickets.iterator.toint(), tickets - 1],
        )
    return number


@cute.jit
def receive_ticket(ctx: Any, number: Uint32, at: Cursor):
    """The ticket in all lanes, of both CTAs of a cluster, and the place of the next one's hand-over."""
    grid, _, _ = cute.arch.grid_dim()
    if cutlass.const_expr(ctx.plan.ctas == 1):
        return cute.arch.shuffle_sync(number, 0) + Uint32(grid), at
    return hand_over(ctx.pair, number, at) + Uint32(grid // ctx.plan.ctas), ring.after(at, 1)


@cute.jit
def step_and_head(ctx: Any, blocks: Uint32, tickets: Uint32, ticket: Uint32):
    """Which of a head's `blocks` tiles a ticket is, and of which head.

    Sections of heads follow one another; within one, the first tile of every head comes before the second.
    """
    section = Uint32(ctx.rule.section)
    size = section * blocks
    number = ticket // size
    rest = ticket - number * size
    in_section = cutlass.min(section, tickets // blocks - number * section)
    step = rest // in_section
    return step, number * section + rest - step * in_section
