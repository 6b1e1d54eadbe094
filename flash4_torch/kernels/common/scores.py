"""What becomes of the product q k^T before it is masked."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .args import Rule

LOG2E = math.log2(math.e)


def softmax_scale(rule: Rule, scaled: bool) -> Float32:
    """What the softmax still has to multiply scores by to have them in base 2."""
    return Float32(1.0) if scaled else rule.scale * LOG2E


@cute.jit
def change(scores: cute.Tensor, rule: Rule, softcap: cutlass.Constexpr, scaled: cutlass.Constexpr) -> None:
    """Scale, and cap, products in place; without `scaled` that is left to the softmax."""
    if cutlass.const_expr(softcap):
        # tanh(x) = 1 - 2 / (exp(2 x) + 1): right at both ends, where exp gives 0 and inf.
        inner = rule.scale * (2.0 * LOG2E) / rule.softcap
        cap = rule.softcap * LOG2E
        for i in cutlass.range_constexpr(cute.size(scores)):
            e = cute.math.exp2(scores[i] * inner, fastmath=True)
            scores[i] = cap - (2.0 * cap) * cute.arch.rcp_approx(e + 1.0)
    elif cutlass.const_expr(scaled):
        factor = rule.scale * LOG2E
        for i in cutlass.range_constexpr(cute.size(scores)):
            scores[i] = scores[i] * factor
