"""Attention weights in compiled graphs: what is written in torch's own operators there, so that it is fused.

A compiled graph that returns the weights computes their gradient whether anybody uses it or not. So it is
made together with that of the output, as in stock attention, and not beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext

from .. import env
from ..masks import Band
from ..problem import CallOptions
from ..reference import dropout
from ..reference import sinks as sinks_of
from ..reference.scoring import working_dtype
from . import decomposition, schema

_ON_CPU = 1 << 26
"""Weights of all heads that a graph for the CPU holds at once, at most."""
_DROPPED_ON_CPU = 1 << 16
"""The same with dropout; at twice as many the operator, which the graph calls, was as fast."""
_ON_GPU = 1 << 20
"""The same for a GPU, in the forward of a step: a Hopper reads and writes so many float32 in 3 us, less than
the launch of a kernel takes."""
_MASKED_ON_GPU = 1 << 18
"""The same without gradients, where there is a mask. Without one our kernels lead stock at any size."""
_SAVED = 1 << 26
"""Weights of all heads in 16 bits that a graph saves for its backward, at most: 128 MiB, twice that with
dropout; stock attention saves as many. Up to there a step may be the host's time: each operator counts.
Those in float32 are saved up to `_IN_BACKWARD`: to make them again takes as long as one of the backward's
products."""
_IN_BACKWARD = 1 << 30
"""Weights of all heads that the backward of a graph holds at once, at most."""


def serves(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    rng_state: Tensor | None,
    options: CallOptions,
    trains: bool,
) -> bool:
    """Whether output and weights of a graph are best computed together, as stock attention does: on the CPU
    at sizes that fit (with dropout at small ones), on a GPU as long as all is the host's time. Elsewhere the
    kernels are faster.

    The operator asks below Dynamo, which would guard each function of ours that it sees, in every call.
    """
    on_gpu = _ON_GPU if trains else _MASKED_ON_GPU if attn_mask is not None else 0
    most = {"cpu": _DROPPED_ON_CPU if options.dropout_p else _ON_CPU, "cuda": on_gpu}
    return (
        TracingContext.try_get() is not None
        and (rng_state is None or len(rng_state) == dropout.STATE)
        and not env.BACKEND.get()
        and fit(q, k, most.get(q.device.type, 0))
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    options: CallOptions,
    average_heads: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights), as `ops.attention_and_weights` returns them."""
    q, k, v = laid_out(q, k, v)
    scores, is_masked = all_scores(q, k, attn_mask, sinks, options)
    # Dropout's factor is applied before the weights are rounded.
    weights, lse = _softmax(scores, q.dtype if rng_state is None else scores.dtype, is_masked)
    if sinks is not None:
        weights = weights[..., :-1]
    if rng_state is not None:
        kept = dropout.keep_each(rng_state, options.dropout_p, *weights.shape)
        weights = torch.where(kept, weights * dropout.scale(options.dropout_p), 0.0)
    weights = weights.to(q.dtype)
    out = weights @ decomposition.heads_first(v, q)
    return out.transpose(1, 2).contiguous(), lse, weights.mean(1) if average_heads else weights


def all_scores(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, options: CallOptions
) -> tuple[Tensor, bool]:
    """The scores (B, Hq, Sq, Sk), with sinks one more for each row, and whether mask or band changed them."""
    scores = decomposition.scores(q, k, options.scale, None, None, options.softcap, 0.0, products=q.dtype)
    added = _added(attn_mask, Band(options.window_left, options.window_right), scores)
    if added is not None:
        scores = scores + added
    if sinks is not None:
        scores = torch.cat([scores, decomposition.column(sinks, scores)], -1)
    return scores, added is not None


def _added(attn_mask: Tensor | None, band: Band, scores: Tensor) -> Tensor | None:
    """What mask and band add to the scores. Its shape is mostly smaller than theirs: less to read, and no
    gradient that has to be masked again."""
    Sq, Sk = scores.shape[-2:]
    added = None if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(scores.dtype)
    seen = attn_mask if added is None else None
    if not band.is_full:
        i, j = torch.arange(Sq, device=scores.device)[:, None], torch.arange(Sk, device=scores.device)
        inside = torch.as_tensor(band.visible(i, j, Sq, Sk))
        seen = inside if seen is None else seen & inside
    if seen is None:
        return added
    added = torch.where(seen, scores.new_zeros(()) if added is None else added, -torch.inf)
    # A strided view is of memory: on a CPU, the loops over all scores would convert bool for each of them.
    return added.as_strided(added.shape, added.stride()) if added.device.type == "cpu" else added


def _softmax(scores: Tensor, dtype: torch.dtype, may_see_nothing: bool) -> tuple[Tensor, Tensor]:
    """Weights in `dtype`, 0 in rows of only -inf, and lse."""
    # Below an operator's dispatch, torch.func knows no autograd.Function. Graphs of a GPU were timed without.
    if scores.device.type == "cpu" and not torch._C._are_functorch_transforms_active():
        found: tuple[Tensor, Tensor] = _Softmax.apply(scores, dtype)
        return found
    # The safe one gives 0 to rows that see nothing, and so are their gradients.
    softmax = torch.ops.aten._safe_softmax.default if may_see_nothing else torch.softmax
    return softmax(scores, -1).to(dtype), _lse(scores)


def _lse(scores: Tensor) -> Tensor:
    """-inf without a gradient in rows of only -inf."""
    is_alone = (scores == -torch.inf).all(-1)
    lse = torch.logsumexp(scores.masked_fill(is_alone[..., None], 0.0), -1)
    return lse.masked_fill(is_alone, -torch.inf)


class _Softmax(torch.autograd.Function):
    """(weights, lse) of scores; neither has a gradient in rows that see nothing.

    The backward takes the weights as they are returned, so that a graph saves them once. That of torch's own
    softmax takes what was not rounded yet, which the graph would compute again, masks included.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        weights, lse, _ = decomposition.softmax(scores, None)
        weights = weights.to(dtype)
        ctx.save_for_backward(weights)
        ctx.dtype = scores.dtype
        ctx.set_materialize_grads(False)
        return weights, lse

    @staticmethod
    def backward(ctx: Any, dweights: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, None]:
        weights: Tensor = ctx.saved_tensors[0].to(ctx.dtype)
        ds = None
        if dweights is not None:
            ds = weights * dweights.to(ctx.dtype)
            ds = ds - weights * ds.sum(-1, keepdim=True)
        if dlse is not None:
            of_lse = weights * dlse[..., None]
            ds = of_lse if ds is None else ds + of_lse
        return ds, None


def serves_backward(q: Tensor, k: Tensor, softcap: float) -> bool:
    """Whether a backward is being traced for a compiled graph, and of a size and kind to be written out."""
    return TracingContext.try_get() is not None and not softcap and fit(q, k, _IN_BACKWARD)


def saves_weights(q: Tensor, k: Tensor, softcap: float) -> bool:
    """Whether the forward of a compiled graph makes each head's weights, and saves them for its backward."""
    most = _IN_BACKWARD if q.dtype == torch.float32 else _SAVED
    return serves_backward(q, k, softcap) and fit(q, k, most)


def each_head(*scored_by: Any) -> Tensor:
    """The weights of each head by their operator, negative where dropout takes them; takes its arguments."""
    dropout_p = scored_by[-1]
    weights: Tensor
    if dropout_p:
        weights = schema.attention_weights_signed(*scored_by)
    else:
        weights = schema.attention_weights(*scored_by, False)
    return weights


def applied(signed: Tensor, dropout_p: float, average_heads: bool) -> Tensor:
    """What `attention_weights` returns, made of each head's weights."""
    weights = signed
    if dropout_p:
        weights = (signed.relu().to(working_dtype(signed.dtype)) * dropout.scale(dropout_p)).to(signed.dtype)
    return weights.mean(1) if average_heads else weights


class OfOutput(NamedTuple):
    """What the gradients of output and weights together need more than those of the weights."""

    dout: Tensor
    dlse: Tensor | None
    v: Tensor


class Gradients(NamedTuple):
    """Gradients in the inputs' dtypes and shapes; `dv` exists if the output has a gradient."""

    dq: Tensor
    dk: Tensor
    dv: Tensor | None
    dmask: Tensor | None
    dsinks: Tensor | None


def backward(
    dweights: Tensor | None,
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
    *,
    output: OfOutput | None = None,
    saved: Tensor | None = None,
) -> Gradients:
    """Gradients of the weights (`dweights` may be None with `output`) and, with `output`, of out and lse; of
    each head's weights, which are what the forward saved, or come from their operator.

    dw = dout v^T + dweights;   ds = w * (dw - rowsum(w * dw) + dlse)
    dq = scale * ds k;   dk = scale * ds^T q;   dv = w^T dout
    """
    scored_by = attn_mask, sinks, rng_state, scale, window_left, window_right, softcap, dropout_p
    signed = each_head(q, k, lse, lse_low, *scored_by) if saved is None else saved
    Hq, Hk, work = q.shape[2], k.shape[2], working_dtype(q.dtype)
    # Without the factor of dropout, which would round them once more.
    weights, kept = (signed.abs(), signed.relu()) if dropout_p else (signed, signed)
    factor = dropout.scale(dropout_p)
    dw = 0.0 if dweights is None else (dweights[:, None] / Hq if average_heads else dweights).to(work)
    dv = None
    if output is not None:
        dout = _rows(output.dout, Hk)
        q, k, v = laid_out(q, k, output.v)
        dw = dw + (dout @ v.permute(0, 2, 3, 1)).view(weights.shape).to(work)
        dv = (_of_groups(kept.to(q.dtype), Hk).transpose(2, 3) @ dout * factor).transpose(1, 2)
    if dropout_p:
        # A weight that was dropped has no gradient, whatever becomes of dw.
        dw = torch.where(signed > 0, dw * factor, 0.0)
    weights = weights.to(work)
    ds = weights * dw
    delta = ds.sum(-1, keepdim=True)
    if output is not None and output.dlse is not None:
        delta = delta - output.dlse[..., None]
    ds = ds - weights * delta
    dmask = dsinks = None
    if mask_grad and attn_mask is not None:
        dmask = ds.sum_to_size(attn_mask.shape).to(attn_mask.dtype)
    if sinks is not None:
        dsinks = sinks_of.gradient(delta.squeeze(-1), lse, sinks)
    ds = _of_groups(ds.to(q.dtype), Hk)
    dq = (ds @ k.transpose(1, 2)).view(q.transpose(1, 2).shape) * scale
    dk = ds.transpose(2, 3) @ _rows(q, Hk) * scale
    return Gradients(dq.transpose(1, 2), dk.transpose(1, 2), dv, dmask, dsinks)


def laid_out(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors (B, S, H, D), each head's rows together, as products of more than one batch entry want
    them: tensors of one shape are copied at once, instead of each for itself."""
    # Loads sympy, as compiling does.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    first, *others = tensors
    same = [a == b for x in others for a, b in zip(x.shape, first.shape, strict=True)]
    # Without guards: other sizes must not compile anew.
    if statically_known_true(first.shape[0] == 1) or not all([statically_known_true(x) for x in same]):
        return tensors
    return tuple(x.transpose(1, 2) for x in torch.stack([x.transpose(1, 2) for x in tensors]))


def _rows(x: Tensor, Hk: int) -> Tensor:
    """(B, S, Hq, D) as (B, Hk, Hq / Hk * S, D): the query heads of a KV head are rows of one matrix."""
    return _of_groups(x.transpose(1, 2), Hk)


def _of_groups(x: Tensor, Hk: int) -> Tensor:
    """(B, Hq, S, n) as (B, Hk, Hq / Hk * S, n)."""
    B, Hq, S, n = x.shape
    return x.reshape(B, Hk, Hq // Hk * S, n)


def fit(q: Tensor, k: Tensor, most: int) -> bool:
    """Whether the weights of all heads are at least one, and not too many; not if a size is unknown."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    B, Sq, Hq, _ = q.shape
    elements = B * Hq * Sq * k.shape[1]
    return guard_or_false(elements > 0) and guard_or_false(elements <= most)
