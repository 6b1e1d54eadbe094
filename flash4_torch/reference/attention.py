"""The definition of attention, in plain differentiable torch: O(Sq * Sk) memory, any floating dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .scoring import Scoring

Mod = Callable[..., Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    sinks: Tensor | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
) -> tuple[Tensor, Tensor]:
    """out = dropout(softmax(scores)) v and lse = logsumexp(scores), computed in the dtype of the inputs.

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) with Hk dividing Hq; returns out (B, Sq, Hq, Dv) and
    lse (B, Hq, Sq), natural log. A row that attends to nothing gives 0, lse = -inf and no gradient. sinks
    (Hq,) are the scores of one more key of every head, whose value is 0; lse counts it.
    score_mod(score, b, h, q_idx, kv_idx) changes capped scores, before the mask is added, and mask_mod(b, h,
    q_idx, kv_idx) says which are seen; both get all positions at once, as tensors that broadcast.
    Differentiable any number of times.
    """
    weights, lse = _softmax(_scores(q, k, scoring, score_mod, mask_mod), sinks)
    return _dropped(weights, scoring).matmul(_per_query_head(v, q)).transpose(1, 2), lse


def attention_weights(q: Tensor, k: Tensor, scoring: Scoring, sinks: Tensor | None = None) -> Tensor:
    """Weights that `attention` applies to v, after dropout: (B, Hq, Sq, Sk)."""
    return _dropped(_softmax(_scores(q, k, scoring), sinks)[0], scoring)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """(B, S, Hk, D) as (B, Hq, S, D): query head h reads KV head h // (Hq / Hk)."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)


def _scores(
    q: Tensor, k: Tensor, scoring: Scoring, score_mod: Mod | None = None, mask_mod: Mod | None = None
) -> Tensor:
    B, Sq, Sk = q.shape[0], q.shape[1], k.shape[1]
    products = q.transpose(1, 2) @ _per_query_head(k, q).transpose(2, 3) * scoring.scale
    scores = scoring.cap(products)
    positions = [
        torch.arange(n, device=q.device).view([-1 if dim == at else 1 for dim in range(4)])
        for at, n in enumerate(scores.shape)
    ]
    if score_mod is not None:
        scores = score_mod(scores, *positions)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*positions), scores, -torch.inf)
    for bias in scoring.biases(scores, Sq, Sk, range(B), range(Sq), range(Sk)):
        scores = scores + bias
    return scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        weights, lse = _softmax(torch.cat([scores, column.to(scores.dtype)], -1), None)
        return weights[..., :-1], lse
    # A row of only -inf would give NaN and poison gradients even if it were masked out afterwards.
    nothing = (scores == -torch.inf).all(-1)
    scores = scores.masked_fill(nothing[..., None], 0.0)
    weights = torch.softmax(scores, -1).masked_fill(nothing[..., None], 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(nothing, -torch.inf)
    return weights, lse


def _dropped(weights: Tensor, scoring: Scoring) -> Tensor:
    if scoring.dropout is None:
        return weights
    B, Hq, Sq, Sk = weights.shape
    keep = scoring.dropout.keep(range(B), Hq, range(Sq), range(Sk))
    return weights * keep * scoring.dropout.scale
