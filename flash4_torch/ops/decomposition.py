"""The operators written in torch's own, for exporters to formats without such an operator, such as ONNX.

Sizes may be symbolic. Memory is O(Sq * Sk). The functions are in torch's table of decompositions, where
torch.onnx.export looks. `ExportedProgram.run_decompositions()` does not look there, so graphs for torch keep
the operators; `run_decompositions(flash4_torch.ops.decompositions)` decomposes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..masks import Band
from ..problem import has_float_mask
from ..reference.scoring import working_dtype
from . import fake, schema


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    *scoring, _ = options
    weights, lse, lse_low = softmax(masked(scores(q, k, *scoring), attn_mask), sinks)
    out = weights @ heads_first(v, q).to(weights.dtype)
    if not has_float_mask(attn_mask):
        lse_low = lse.new_empty(*lse.shape[:2], 0)
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse, lse_low


def _attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """All sequences as one, with a mask so that queries see only the keys of their own sequence."""
    sequence_q, i, lengths_q = _places(q, cu_seqlens_q)
    sequence_k, j, lengths_k = _places(k, cu_seqlens_k)
    seen = sequence_q[:, None] == sequence_k
    band = Band(window_left, window_right)
    if not band.is_full:
        # Only the difference of the lengths matters to the band.
        longer = (lengths_k - lengths_q)[sequence_q]
        seen = seen & band.visible((i + longer)[:, None], j, 0, 0)
    dense = q[None], k[None], v[None], seen[None, None], sinks, rng_state
    out, lse, _ = _attention(*dense, scale, None, None, *rest)
    return out[0], lse[0]


def _attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    *scoring_and_average: Any,
) -> Tensor:
    *scoring, average_heads = scoring_and_average
    weights, _, _ = softmax(masked(scores(q, k, *scoring), attn_mask), sinks)
    return (weights.mean(1) if average_heads else weights).to(q.dtype).contiguous()


def scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    dropout_p: float,
    products: torch.dtype | None = None,
) -> Tensor:
    """Scores (B, Hq, Sq, Sk) in the working dtype, -inf outside the band; the matmul is in `products`."""
    if dropout_p > 0.0:
        raise ArgumentError(
            "dropout_p",
            dropout_p,
            "in a graph of torch's own operators it must be 0: export the model in eval()",
        )
    work = working_dtype(q.dtype)
    products = products or work
    rows, columns = q.transpose(1, 2).to(products), heads_first(k, q).to(products)
    scores = (rows @ columns.transpose(2, 3)).to(work) * scale
    if softcap != 0.0:
        scores = torch.tanh(scores / softcap) * softcap
    band = Band(window_left, window_right)
    if band.is_full:
        return scores
    Sq, Sk = q.shape[1], k.shape[1]
    i, j = torch.arange(Sq, device=q.device)[:, None], torch.arange(Sk, device=q.device)
    return masked(scores, torch.as_tensor(band.visible(i, j, Sq, Sk)))


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask.to(scores.dtype)


def softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (0 in rows of only -inf), lse, and lse_low, the rounding error of lse."""
    if sinks is not None:
        # One more key, whose weight is left out in the end.
        weights, lse, low = softmax(torch.cat([scores, column(sinks, scores)], -1), None)
        return weights[..., :-1], lse, low
    highest = scores.amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    lse = highest + torch.log(total)
    low = (highest - lse) + torch.log(total)
    weights = weights / total.masked_fill(total == 0.0, 1.0)
    return weights, lse.squeeze(-1), low.masked_fill(total == 0.0, 0.0).squeeze(-1)


def lse_low(q: Tensor, k: Tensor, attn_mask: Tensor | None, *scoring: Any) -> Tensor:
    """The rounding error of lse, of all scores at once."""
    return softmax(masked(scores(q, k, *scoring), attn_mask), None)[2]


def column(sinks: Tensor, scores: Tensor) -> Tensor:
    """The sinks as the scores of one more key, (B, Hq, Sq, 1)."""
    return sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)


def heads_first(x: Tensor, q: Tensor) -> Tensor:
    """(B, S, Hk, D) as (B, Hq, S, D): query head h reads KV head h // (Hq / Hk)."""
    group = q.shape[2] // x.shape[2]
    x = x.transpose(1, 2)
    return x if group == 1 else x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


def _places(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each packed token's sequence and its position in it, and the sequences' lengths."""
    token = torch.arange(x.shape[0], device=x.device)
    sequence = (token[:, None] >= cu_seqlens[1:]).sum(1)
    return sequence, token - cu_seqlens[sequence], cu_seqlens[1:] - cu_seqlens[:-1]


by_name: dict[str, Callable[..., Any]] = {
    "attention": _attention,
    "attention_varlen": _attention_varlen,
    "attention_weights": _attention_weights,
}
decompositions: dict[Any, Callable[..., Any]] = {}
for _name, _function in by_name.items():
    _op = getattr(schema, _name)
    decompositions[_op] = _function
    # The meta function keeps fake tensors from using the decomposition for the operator.
    torch._decomp.register_decomposition(_op, type="meta")(fake.by_name[_name])
    torch._decomp.register_decomposition(_op)(_function)
