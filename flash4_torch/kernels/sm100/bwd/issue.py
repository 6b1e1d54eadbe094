"""The five products of a block, each issued by one thread, of a pair for both CTAs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...common.ring import Cursor
from .. import tmem, umma
from ..umma import Matrix, Product

if TYPE_CHECKING:
    from .kernel import Kernel


@cute.jit
def issue_s(k: Kernel, kv: Cursor, q: Int32) -> None:
    """S^T = K Q^T, over P^T of the block before, behind its dV."""
    product = k.plan.product_s
    umma.issue(product, Int32(k.plan.s_at), word(product.a, k.sK, kv), q, False)
    commit(k, k.signals.mma_s)


@cute.jit
def issue_dp(k: Kernel, kv: Cursor, do: Int32) -> None:
    """dP^T = V dO^T."""
    product = k.plan.product_dp
    umma.issue(product, Int32(k.plan.dp_at), word(product.a, k.sV, kv), do, False)
    commit(k, k.signals.mma_dp)


@cute.jit
def issue_dv(k: Kernel, do: Int32, add: Boolean) -> None:
    """dV += P^T dO."""
    plan = k.plan
    _issue_of_weights(k, plan.product_dv, plan.dv_at, plan.s_at, k.sP, do, add)


@cute.jit
def issue_dk(k: Kernel, q: Int32, add: Boolean) -> None:
    """dK += dS^T Q."""
    plan = k.plan
    _issue_of_weights(k, plan.product_dk, plan.dk_at, plan.dp_at, k.sOwndS, q, add)


@cute.jit
def issue_dq(k: Kernel, keys: Int32) -> None:
    """dQ = dS K."""
    product = k.plan.product_dq
    umma.issue(product, Int32(k.plan.dq_at), umma.word(product.a, k.sdS.iterator), keys, False)
    commit(k, k.signals.mma_dq)


def _issue_of_weights(
    k: Kernel, product: Product, at: int, weights_at: int, staged: cute.Tensor | None, b: Int32, add: Boolean
) -> None:
    if product.a is None:
        a = Int32(weights_at)
        umma.issue(product, Int32(at), a, b, add, a_step=k.plan.weights_at)
    else:
        umma.issue(product, Int32(at), umma.word(product.a, staged.iterator), b, add)


def commit(k: Kernel, barrier: cute.Pointer) -> None:
    """All products issued so far arrive there when they are done."""
    umma.commit(barrier, k.plan.ctas)


def word(matrix: Matrix, staged: cute.Tensor, at: Cursor) -> Int32:
    """The descriptor's low word of a stage."""
    return umma.word(matrix, staged.iterator) + at.stage * matrix.units


def wait(signal: cute.Pointer, turn: Int32) -> None:
    """For other warps, to go on with what they have done to tensor memory."""
    cute.arch.mbarrier_wait(signal, turn)
    tmem.fence_after()
