"""The mbarrier that says that all warps have used a block: its Q, dO, P and dS in SMEM.

A warp waits for it after a block's S, before it copies the next block and stores P. A barrier of the CTA at
the beginning of a block would let no warp begin S before the last one has added its dQ. Copies come before
the barrier that says that dS of the block before is written.

Warps ask again and again, since `mbarrier.try_wait`, which suspends them, begins with sm_90.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from .context import Context
from .plan import Plan


def allocate(memory: SmemAllocator, plan: Plan) -> cute.Pointer | None:
    """The mbarrier, not yet initialised; None if a barrier of the CTA stands in for it."""
    return memory.allocate_array(Int64, 1) if plan.overlaps_blocks else None


@cute.jit
def init(ctx: Context) -> None:
    """Initialise it, ahead of a barrier of the CTA."""
    if (ctx.warp == 0) & (ctx.lane == 0):
        cute.arch.mbarrier_init(ctx.empty, ctx.plan.warps)


@cute.jit
def wait(ctx: Context, i: Int32) -> None:
    """Wait until all warps have used the tile's block before the i-th; the first one has none before it."""
    address, parity = Int32(ctx.empty.toint()), (i & 1) ^ 1
    is_used = _test(address, parity)
    while is_used == 0:
        is_used = _test(address, parity)


@cute.jit
def release(ctx: Context) -> None:
    """Say that the warp has used a block."""
    cute.arch.sync_warp()
    if ctx.lane == 0:
        cute.arch.inline_ptx(
            "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [{$r0}]; }",
            read_only_args=[Int32(ctx.empty.toint())],
        )


def _test(address: Int32, parity: Int32) -> Int32:
    return cute.arch.inline_ptx(
        "{ .reg .pred used; mbarrier.test_wait.parity.shared.b64 used, [{$r0}], {$r1};"
        " selp.s32 {$w0}, 1, 0, used; }",
        write_only_types=[Int32],
        read_only_args=[address, parity],
    )
