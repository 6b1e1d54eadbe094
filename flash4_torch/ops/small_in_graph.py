"""Small attention calls of compiled graphs on a CPU, written in torch's own operators.

They are those that torch's fused operator does not serve (`cpu_in_graph`). Our operator would call back into
Python, which takes longer than so few weights do. Forward and backward make the same weights, so that the
joint graph of a step makes them once. A hidden key whose score is infinite or NaN makes NaN, as in stock
attention, which adds masks, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import env
from ..problem import CallOptions, has_float_mask
from ..reference import dropout
from ..reference.scoring import working_dtype
from . import decomposition, weights_in_graph
from .weights_in_graph import OfOutput

MOST = 1 << 16
"""Weights of all heads, at most, without dropout; at 2^21 the operator was up to twice as fast."""
MOST_DROPPED = 1 << 21
"""The same with dropout, as many as eager steps of the module hold; the operator took 1.4 times as long."""


def serves(q: Tensor, k: Tensor, rng_state: Tensor | None, options: CallOptions) -> bool:
    """Whether a call in a graph for Inductor is best written out."""
    return (
        q.device.type == "cpu"
        and not options.softcap
        and (rng_state is None or len(rng_state) == dropout.STATE)
        and not env.BACKEND.get()
        and weights_in_graph.fit(q, k, MOST_DROPPED if options.dropout_p else MOST)
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    options: CallOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, lse_low), as `flash4::attention` returns them."""
    dtype = q.dtype
    q, k, v = weights_in_graph.laid_out(*_working(q, k, v))
    weights, lse, low = _weights(q, k, attn_mask, sinks, options)
    if rng_state is not None:
        kept = dropout.keep_each(rng_state, options.dropout_p, *weights.shape)
        weights = torch.where(kept, weights * dropout.scale(options.dropout_p), 0.0)
    out = weights @ decomposition.heads_first(v, q)
    if not has_float_mask(attn_mask):
        low = lse.new_empty(*lse.shape[:2], 0)
    return out.transpose(1, 2).to(dtype).contiguous(), lse, low


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    options: CallOptions,
    mask_grad: bool,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dmask, dsinks), as `flash4::attention_backward` returns them."""
    dtypes = q.dtype, k.dtype, v.dtype
    q, k, v, dout = _working(q, k, v, dout)
    rows, columns, _ = weights_in_graph.laid_out(q, k, v)
    weights, _, _ = _weights(rows, columns, attn_mask, sinks, options)
    if rng_state is not None:
        kept = dropout.keep_each(rng_state, options.dropout_p, *weights.shape)
        weights = torch.where(kept, weights, -weights)
    options_and_flags: tuple[Any, ...] = *options[:-1], False, mask_grad
    given = q, k, lse, None, attn_mask, sinks, rng_state, *options_and_flags
    grads = weights_in_graph.backward(None, *given, output=OfOutput(dout, dlse, v), saved=weights)
    dq, dk, dv, *others = (q.new_empty(0) if x is None else x for x in grads)
    grads_of_qkv = zip((dq, dk, dv), dtypes, strict=True)
    return *(x.to(dtype).contiguous() for x, dtype in grads_of_qkv), *(x.contiguous() for x in others)


def _working(*tensors: Tensor) -> list[Tensor]:
    """Copies in the working dtype. Stock attention makes products of 16 bits in float32, too: many CPUs
    are several times as slow in 16."""
    return [x.to(working_dtype(x.dtype)) for x in tensors]


def _weights(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, options: CallOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Each head's weights before dropout, not rounded, lse, and its rounding error."""
    scores, _ = weights_in_graph.all_scores(q, k, attn_mask, sinks, options)
    weights, lse, low = decomposition.softmax(scores, None)
    return weights if sinks is None else weights[..., :-1], lse, low
