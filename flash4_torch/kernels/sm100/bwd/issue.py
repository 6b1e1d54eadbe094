"""The five MMAs of a block, each issued by one thread; in a CTA pair, for both CTAs."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.ring import Cursor
from .. import tmem, umma
from ..umma import Matrix, MmaOp
from .context import Context


@cute.jit
def issue_s(ctx: Context, kv: Cursor, q: Int32) -> None:
    """S^T = K Q^T, over P^T of the block before, after its dV."""
    op = ctx.plan.op_s
    umma.issue(op, Int32(ctx.plan.s_at), word(op.a, ctx.sK, kv), q, False)
    commit(ctx, ctx.signals.mma_s)


@cute.jit
def issue_dp(ctx: Context, kv: Cursor, do: Int32) -> None:
    """dP^T = V dO^T."""
    op = ctx.plan.op_dp
    umma.issue(op, Int32(ctx.plan.dp_at), word(op.a, ctx.sV, kv), do, False)
    commit(ctx, ctx.signals.mma_dp)


@cute.jit
def issue_dv(ctx: Context, do: Int32, add: Boolean) -> None:
    """dV += P^T dO."""
    plan = ctx.plan
    _issue_of_weights(ctx, plan.op_dv, plan.dv_at, plan.s_at, ctx.sP, do, add)


@cute.jit
def issue_dk(ctx: Context, q: Int32, add: Boolean) -> None:
    """dK += dS^T Q."""
    plan = ctx.plan
    _issue_of_weights(ctx, plan.op_dk, plan.dk_at, plan.dp_at, ctx.sOwndS, q, add)


@cute.jit
def issue_dq(ctx: Context, keys: Int32) -> None:
    """dQ = dS K."""
    op = ctx.plan.op_dq
    umma.issue(op, Int32(ctx.plan.dq_at), umma.word(op.a, ctx.sdS.iterator), keys, False)
    commit(ctx, ctx.signals.mma_dq)


def _issue_of_weights(
    ctx: Context,
    op: MmaOp,
    at: int,
    weights_at: int,
    staged: cute.Tensor | None,
    b: Int32,
    add: Boolean,
) -> None:
    if op.a is None:
        a = Int32(weights_at)
        umma.issue(op, Int32(at), a, b, add, a_step=ctx.plan.weights_at)
    else:
        umma.issue(op, Int32(at), umma.word(op.a, staged.iterator), b, add)


def commit(ctx: Context, barrier: cute.Pointer) -> None:
    """All MMAs issued so far arrive at the barrier when they are done."""
    umma.commit(barrier, ctx.plan.cluster_size)


def word(matrix: Matrix, staged: cute.Tensor, at: Cursor) -> Int32:
    """Low word of a stage's descriptor."""
    return umma.word(matrix, staged.iterator) + at.stage * matrix.units


def wait(signal: cute.Pointer, phase: Int32) -> None:
    """Wait for other warps, to go on with what they have done to TMEM."""
    cute.arch.mbarrier_wait(signal, phase)
    tmem.fence_after()
