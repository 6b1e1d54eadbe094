"""Attention weights in compiled graphs: what is written in torch's own operators there, so that it is fused.

A compiled graph that returns the weights computes their gradient whether anybody uses it or not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._guards import TracingContext

from .. import env
from ..masks import Band
from ..problem import CallOptions
from ..reference import sinks as sinks_of
from ..reference.scoring import working_dtype
from . import decomposition, schema

_ON_CPU = 1 << 26
"""Weights of all heads that a graph for the CPU holds at once, at most."""
_IN_BACKWARD = 1 << 28
"""Weights of all heads that the backward of a graph holds at once, at most."""


def serves_forward(q: Tensor, k: Tensor, options: CallOptions) -> bool:
    """Whether output and weights are best computed together, as stock attention does: on the CPU, at sizes
    that fit. Elsewhere the output's kernel and that of the weights are faster than the fused graph."""
    return (
        torch.compiler.is_dynamo_compiling()
        and q.device.type == "cpu"
        and not options.dropout_p
        and not env.BACKEND.get()
        and 0 < _elements(q, k) <= _ON_CPU
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    options: CallOptions,
    average_heads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights), as `ops.attention_and_weights` returns them."""
    scale, softcap = options.scale, options.softcap
    scores = decomposition.scores(q, k, scale, None, None, softcap, 0.0, products=q.dtype)
    added, is_alone = _added(attn_mask, Band(options.window_left, options.window_right), scores)
    if added is not None:
        scores = scores + added
    if sinks is not None:
        weights, lse, _ = decomposition.softmax(scores, sinks)
    else:
        weights, lse = torch.softmax(scores, -1), torch.logsumexp(scores, -1)
    weights = weights.to(q.dtype)
    out = weights @ decomposition.heads_first(v, q)
    if is_alone is not None:
        # Both after the product, which then reads what the softmax saved for its gradient.
        out, weights = out.masked_fill(is_alone, 0.0), weights.masked_fill(is_alone, 0.0)
        of_sinks = -torch.inf if sinks is None else sinks.to(lse.dtype)[:, None]
        lse = torch.where(is_alone.squeeze(-1), of_sinks, lse)
    return out.transpose(1, 2).contiguous(), lse, weights.mean(1) if average_heads else weights


def _added(attn_mask: Tensor | None, band: Band, scores: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """What mask and band add to the scores, and the rows (..., Sq, 1) that see nothing, which are added 0.

    Both have the shape of the mask, which is mostly smaller than the scores': less to read, and no gradient
    that has to be masked again.
    """
    Sq, Sk = scores.shape[-2:]
    added = None if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(scores.dtype)
    seen = attn_mask if added is None else None
    if not band.is_full:
        i, j = torch.arange(Sq, device=scores.device)[:, None], torch.arange(Sk, device=scores.device)
        inside = torch.as_tensor(band.visible(i, j, Sq, Sk))
        seen = inside if seen is None else seen & inside
    if seen is not None:
        zeros = scores.new_zeros(()) if added is None else added
        added = torch.where(seen, zeros, -torch.inf)
    if added is None:
        return None, None
    is_alone = (added == -torch.inf).all(-1, keepdim=True)
    return added.masked_fill(is_alone, 0.0), is_alone


def serves_backward(q: Tensor, k: Tensor, softcap: float) -> bool:
    """Whether a backward is being traced for a compiled graph, and of a size and kind to be written out."""
    return TracingContext.try_get() is not None and not softcap and 0 < _elements(q, k) <= _IN_BACKWARD


def backward(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    dropout_p: float,
    average_heads: bool,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, attn_mask and sinks; the weights of each head come from their operator.

    ds = w * (dw - rowsum(w * dw));   dq = scale * ds k;   dk = scale * ds^T q
    """

    def each_head(p: float) -> Tensor:
        scored_by = attn_mask, sinks, rng_state if p else None, scale, window_left, window_right, softcap, p
        weights: Tensor = schema.attention_weights(q, k, lse, lse_low, *scored_by, False)
        return weights

    work = working_dtype(q.dtype)
    weights = each_head(0.0).to(work)
    dw = (dweights[:, None] / q.shape[2] if average_heads else dweights).to(work)
    if dropout_p:
        # A weight that was dropped has no gradient, whatever becomes of dw.
        dw = torch.where(each_head(dropout_p) != 0, dw / (1.0 - dropout_p), 0.0)
    ds = weights * dw
    delta = ds.sum(-1, keepdim=True)
    ds = ds - weights * delta
    dmask = dsinks = None
    if mask_grad and attn_mask is not None:
        dmask = ds.sum_to_size(attn_mask.shape).to(attn_mask.dtype)
    if sinks is not None:
        dsinks = sinks_of.gradient(delta.squeeze(-1), lse, sinks)
    (B, Sq, Hq, D), (_, Sk, Hk, _) = q.shape, k.shape
    # The query heads of a KV head are rows of one matrix.
    rows = ds.to(q.dtype).reshape(B, Hk, Hq // Hk * Sq, Sk)
    dq = (rows @ k.transpose(1, 2)).view(B, Hq, Sq, D) * scale
    dk = rows.transpose(2, 3) @ q.transpose(1, 2).reshape(B, Hk, Hq // Hk * Sq, D) * scale
    return dq.transpose(1, 2), dk.transpose(1, 2), dmask, dsinks


def _elements(q: Tensor, k: Tensor) -> int:
    B, Sq, Hq, _ = q.shape
    return B * Hq * Sq * k.shape[1]
