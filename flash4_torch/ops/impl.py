"""The operators' implementations, the same for every device: describe the problem, let a backend serve it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends.tiled import scoring
from ..masks import Band
from ..problem import CallOptions, Extent, Inputs, Problem, Saved, Spec, has_float_mask, mask_key
from ..reference import tiled, weights
from ..reference.dropout import Dropout
from ..reference.scoring import Scoring
from .check import cu_seqlens_values
from .schema import LIBRARY


def describe(
    q: Tensor, v: Tensor, extent: Extent, attn_mask: Tensor | None, options: CallOptions, varlen: bool = False
) -> Problem:
    """The forward problem of a call."""
    device = q.device
    band = options.band
    spec = Spec(
        device=device.type,
        dtype=q.dtype,
        D=q.shape[-1],
        Dv=v.shape[-1],
        group=extent.Hq // extent.Hk,
        varlen=varlen,
        left=band.left is not None,
        right=band.right is not None,
        softcap=options.softcap != 0.0,
        mask=mask_key(attn_mask),
        dropout=options.dropout_p > 0.0,
        deterministic=options.deterministic,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
    )
    return Problem(spec, extent, options.scale, band, options.softcap, options.dropout_p)


def dense_extent(q: Tensor, k: Tensor) -> Extent:
    return Extent(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def _varlen_extent(q: Tensor, k: Tensor, cu_seqlens: Tensor, longest_q: int, longest_k: int) -> Extent:
    return Extent(cu_seqlens.shape[0] - 1, longest_q, longest_k, q.shape[1], k.shape[1])


def backward_of(problem: Problem, dlse: Tensor | None, mask_grad: bool = False) -> Problem:
    return problem._replace(spec=problem.spec._replace(backward=True, dlse=dlse is not None, dmask=mask_grad))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, rng_state: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    problem = describe(q, v, dense_extent(q, k), attn_mask, CallOptions(*options))
    out, lse, low = backends.choose(problem).forward(Inputs(q, k, v, attn_mask, rng_state), problem)
    return out, lse, lse.new_empty(*lse.shape[:2], 0) if low is None else low


def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    attn_mask: Tensor | None,
    rng_state: Tensor | None,
    *options_and_mask_grad: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, mask_grad = options_and_mask_grad
    forward = describe(q, v, dense_extent(q, k), attn_mask, CallOptions(*options))
    problem = backward_of(forward, dlse, mask_grad)
    inputs = Inputs(q, k, v, attn_mask, rng_state)
    if lse_low is None and has_float_mask(attn_mask):
        lse_low = tiled.lse_low(q, k, lse, scoring(inputs, problem))
    saved = Saved(dout, dlse, out, lse, mask_grad, lse_low)
    dq, dk, dv, dmask = backends.choose(problem).backward(saved, inputs, problem)
    return dq, dk, dv, q.new_empty(0) if dmask is None else dmask


def _attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    cu_seqlens_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    cu_seqlens_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    extent = _varlen_extent(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    problem = describe(q, v, extent, None, CallOptions(*options), varlen=True)
    inputs = Inputs(q, k, v, None, rng_state, cu_seqlens_q, cu_seqlens_k)
    out, lse, _ = backends.choose(problem).forward(inputs, problem)
    return out, lse


def _attention_varlen_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    extent = _varlen_extent(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    problem = backward_of(describe(q, v, extent, None, CallOptions(*options), varlen=True), dlse)
    inputs = Inputs(q, k, v, None, rng_state, cu_seqlens_q, cu_seqlens_k)
    dq, dk, dv, _ = backends.choose(problem).backward(Saved(dout, dlse, out, lse), inputs, problem)
    return dq, dk, dv


def _weights_scoring(
    attn_mask: Tensor | None,
    rng_state: Tensor | None,
    scale: float,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    dropout_p: float,
) -> Scoring:
    dropout = None if rng_state is None else Dropout(rng_state, dropout_p)
    return Scoring(scale, Band(window_left, window_right), softcap, attn_mask, dropout)


def _attention_weights(q: Tensor, k: Tensor, *scores_and_average: Any) -> Tensor:
    *scores, average_heads = scores_and_average
    return weights.forward(q, k, _weights_scoring(*scores), average_heads)


def _attention_weights_backward(
    dweights: Tensor, q: Tensor, k: Tensor, *scores_and_flags: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *scores, average_heads, mask_grad = scores_and_flags
    grads = weights.backward(dweights, q, k, _weights_scoring(*scores), average_heads, mask_grad)
    return grads.dq, grads.dk, q.new_empty(0) if grads.dmask is None else grads.dmask


for _name, _kernel in {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_varlen": _attention_varlen,
    "attention_varlen_backward": _attention_varlen_backward,
    "attention_weights": _attention_weights,
    "attention_weights_backward": _attention_weights_backward,
}.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
