"""flash-attn's attention, from its documentation: whole score matrices and torch's softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, flags: dict[str, Any], learnable_sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) from flash-attn's documentation, with whole score matrices and torch's softmax."""
    Sq, Sk = q.shape[1], k.shape[1]
    group, scale = q.shape[2] // k.shape[2], flags["softmax_scale"] or q.shape[3] ** -0.5
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if flags["softcap"]:
        scores = flags["softcap"] * torch.tanh(scores / flags["softcap"])
    distance = torch.arange(Sq)[:, None] + Sk - Sq - torch.arange(Sk)
    if flags["alibi_slopes"] is not None:
        scores = scores - flags["alibi_slopes"].double().view(-1, q.shape[2], 1, 1) * distance.abs()
    left, right = flags["window_size"]
    right = 0 if flags["causal"] else right
    hidden = torch.zeros(Sq, Sk, dtype=torch.bool)
    hidden |= distance > left if left not in (None, -1) else False
    hidden |= -distance > right if right not in (None, -1) else False
    scores = scores.masked_fill(hidden, -torch.inf)
    if learnable_sink is not None:
        column = learnable_sink[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v), scores.logsumexp(-1)
    weights = scores.masked_fill(hidden.all(1)[:, None], 0.0).softmax(-1).masked_fill(hidden, 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), scores.logsumexp(-1)
