"""FLOP counts of the two (forward) or five (backward) matmuls, over the visible pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..flex_problem import Mods
from ..masks import Band
from ..problem import CallOptions

Shape = tuple[int, ...]


def _products(Hq: int, pairs: int, D: int, Dv: int) -> tuple[int, int]:
    """FLOPs of one matmul over D (q k^T) and of one over Dv (weights v)."""
    return 2 * Hq * pairs * D, 2 * Hq * pairs * Dv


def _dense(q: Shape, k: Shape, v: Shape, left: int | None, right: int | None) -> tuple[int, int]:
    pairs = q[0] * Band(left, right).pairs(q[1], k[1])
    return _products(q[2], pairs, q[3], v[3])


def attention(
    q: Shape,
    k: Shape,
    v: Shape,
    attn_mask: Any,
    sinks: Any,
    rng_state: Any,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """Forward: q k^T and weights v over the pairs inside the band; an attn_mask does not reduce the count."""
    over_D, over_Dv = _dense(q, k, v, window_left, window_right)
    return over_D + over_Dv


def attention_backward(
    dout: Any,
    dlse: Any,
    q: Shape,
    k: Shape,
    v: Shape,
    out: Any,
    lse: Any,
    lse_low: Any,
    attn_mask: Any,
    sinks: Any,
    rng_state: Any,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """Backward: q k^T again, dq and dk over D; dv and dout v^T over Dv."""
    over_D, over_Dv = _dense(q, k, v, window_left, window_right)
    return 3 * over_D + 2 * over_Dv


def attention_weights(
    q: Shape,
    k: Shape,
    lse: Any,
    lse_low: Any,
    attn_mask: Any,
    sinks: Any,
    rng_state: Any,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """q k^T over the pairs inside the band."""
    return _dense(q, k, k, window_left, window_right)[0]


def attention_weights_backward(dweights: Any, *args: Any, **kwargs: Any) -> int:
    """q k^T again, dq and dk."""
    q, k, _, _, _, _, _, _, window_left, window_right, *_ = args
    return 3 * _dense(q, k, k, window_left, window_right)[0]


def attention_varlen(q: Shape, k: Shape, v: Shape, *rest: Any, **kwargs: Any) -> int:
    """Forward; lengths are data, so sequences count as equally long and the band as unbounded."""
    over_D, over_Dv = _packed(q, k, v, rest[0])
    return over_D + over_Dv


def attention_varlen_backward(
    dout: Any, dlse: Any, q: Shape, k: Shape, v: Shape, out: Any, lse: Any, *rest: Any, **kwargs: Any
) -> int:
    """Backward, under the same assumption as the forward."""
    over_D, over_Dv = _packed(q, k, v, rest[0])
    return 3 * over_D + 2 * over_Dv


def flex_attention(q: Shape, k: Shape, v: Shape, *rest: Any, **kwargs: Any) -> int:
    """Forward; blocks and masks are data, so all pairs inside the band count; score_mod's FLOPs do not."""
    over_D, over_Dv = _flex(q, k, v, rest)
    return over_D + over_Dv


def flex_attention_backward(
    dout: Any,
    dlse: Any,
    q: Shape,
    k: Shape,
    v: Shape,
    out: Any,
    lse: Any,
    low: Any,
    *rest: Any,
    **kwargs: Any,
) -> int:
    """Backward, under the same assumption as the forward."""
    *given, _ = rest
    over_D, over_Dv = _flex(q, k, v, given)
    return 3 * over_D + 2 * over_Dv


def _flex(q: Shape, k: Shape, v: Shape, given: Sequence[Any]) -> tuple[int, int]:
    """given: what follows v, shapes of `Mods` and a call's options."""
    mods, options = Mods(*given[: len(Mods._fields)]), CallOptions(*given[len(Mods._fields) :])
    if mods.cu_seqlens_q is not None:
        return _packed(q, k, v, mods.cu_seqlens_q)  # type: ignore[arg-type]
    return _dense(q, k, v, options.window_left, options.window_right)


def _packed(q: Shape, k: Shape, v: Shape, cu_seqlens: Shape) -> tuple[int, int]:
    sequences = max(1, cu_seqlens[0] - 1)
    return _products(q[1], q[0] * k[0] // sequences, q[2], v[2])


PLAIN = (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_weights,
    attention_weights_backward,
)
FLEX = (flex_attention, flex_attention_backward)


def register(formulas: Sequence[Callable[..., int]] = PLAIN) -> None:
    """Registers formulas with torch.utils.flop_counter, which this imports; each operator has its name."""
    from torch.utils.flop_counter import register_flop_formula

    for formula in formulas:
        register_flop_formula(getattr(torch.ops.flash4, formula.__name__))(formula)
