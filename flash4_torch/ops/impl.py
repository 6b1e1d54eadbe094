"""The operators' implementations, the same for every device: describe the problem, let a backend serve it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import backends
from ..backends.scoring import low_of
from ..backends.views import no_view
from ..problem import (
    CallOptions,
    Extent,
    Inputs,
    Problem,
    Saved,
    SavedWeights,
    Spec,
    allows_tf32,
    as_gradient,
    capability_of,
    dtype_key,
    has_float_mask,
    mask_key,
)
from ..reference.dropout import STATE
from .check import cu_seqlens_values
from .schema import LIBRARY


def describe_inputs(
    inputs: Inputs, options: CallOptions, max_seqlens: tuple[int, int] | None = None
) -> Problem:
    """The forward problem of a call's tensors; `max_seqlens` of queries and keys make it varlen."""
    q, _, v, mask, sinks, rng_state, *_ = inputs
    extent, device, band = _extent(inputs, max_seqlens), q.device, options.band
    spec = Spec(
        device=device.type,
        dtype=q.dtype,
        D=q.shape[-1],
        Dv=v.shape[-1],
        group=extent.Hq // extent.Hk,
        varlen=max_seqlens is not None,
        left=band.left is not None,
        right=band.right is not None,
        softcap=options.softcap != 0.0,
        mask=mask_key(mask),
        dropout=options.dropout_p > 0.0,
        dropout_of_part=rng_state is not None and len(rng_state) != STATE,
        deterministic=options.deterministic,
        sinks=dtype_key(sinks),
        capability=capability_of(device),
        tf32=allows_tf32(q.dtype),
    )
    return Problem(spec, extent, options.scale, band, options.softcap, options.dropout_p)


def _extent(inputs: Inputs, max_seqlens: tuple[int, int] | None) -> Extent:
    q, k = inputs[:2]
    if max_seqlens is None:
        return Extent(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    if inputs.cu_seqlens_q is None:
        raise AssertionError("a varlen call carries cu_seqlens")
    return Extent(len(inputs.cu_seqlens_q) - 1, *max_seqlens, q.shape[1], k.shape[1])


def weights_of(problem: Problem) -> Problem:
    """The problem of the weights of a call; what is made of v does not matter to it."""
    spec = problem.spec._replace(weights=True, Dv=problem.spec.D, deterministic=False)
    return problem._replace(spec=spec)


def signed_weights_of(problem: Problem) -> Problem:
    """The problem of weights whose signs say what dropout takes, given that of weights."""
    return problem._replace(spec=problem.spec._replace(signed=True))


def backward_of(problem: Problem, dlse: Tensor | None, mask_grad: bool = False) -> Problem:
    return problem._replace(spec=problem.spec._replace(backward=True, dlse=dlse is not None, dmask=mask_grad))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, attn_mask, sinks, rng_state)
    problem = describe_inputs(inputs, CallOptions(*options))
    out, lse, low, _ = backends.choose(problem).forward(inputs, problem)
    return no_view(out), lse, lse.new_empty(*lse.shape[:2], 0) if low is None else low


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
    sinks: Tensor | None,
    rng_state: Tensor | None,
    *options_and_mask_grad: Any,
) -> tuple[Tensor, ...]:
    *options, mask_grad = options_and_mask_grad
    inputs = Inputs(q, k, v, attn_mask, sinks, rng_state)
    problem = backward_of(describe_inputs(inputs, CallOptions(*options)), dlse, mask_grad)
    if lse_low is None:
        lse_low = low_of(lse, inputs, problem)
    saved = Saved(dout, dlse, out, lse, mask_grad, lse_low)
    dq, dk, dv, *others = backends.choose(problem).backward(saved, inputs, problem)
    return (
        *map(as_gradient, (dq, dk, dv), (q, k, v)),
        *(q.new_empty(0) if x is None else x for x in others),
    )


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
    *options: Any,
) -> tuple[Tensor, Tensor]:
    cu_seqlens_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    cu_seqlens_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    inputs = Inputs(q, k, v, None, sinks, rng_state, cu_seqlens_q, cu_seqlens_k)
    problem = describe_inputs(inputs, CallOptions(*options), (max_seqlen_q, max_seqlen_k))
    out, lse, *_ = backends.choose(problem).forward(inputs, problem)
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
    sinks: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    inputs = Inputs(q, k, v, None, sinks, rng_state, cu_seqlens_q, cu_seqlens_k)
    forward = describe_inputs(inputs, CallOptions(*options), (max_seqlen_q, max_seqlen_k))
    problem = backward_of(forward, dlse)
    grads = backends.choose(problem).backward(Saved(dout, dlse, out, lse), inputs, problem)
    dsinks = q.new_empty(0) if grads.dsinks is None else grads.dsinks
    return *map(as_gradient, grads[:3], (q, k, v)), dsinks


def _attention_weights(*args: Any) -> Tensor:
    *each_head, average_heads = args
    return _weights(*each_head, average_heads=average_heads)


def _attention_weights_signed(*args: Any) -> Tensor:
    return _weights(*args, signed=True)


def _weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    *scores: Any,
    average_heads: bool = False,
    signed: bool = False,
) -> Tensor:
    inputs = Inputs(q, k, k, attn_mask, sinks, rng_state)
    problem = weights_of(describe_inputs(inputs, CallOptions(*scores)))
    problem = signed_weights_of(problem) if signed else problem
    saved = SavedWeights(lse, lse_low, average_heads)
    return backends.choose(problem).weights(saved, inputs, problem)


def _attention_weights_backward(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    *scores_and_flags: Any,
) -> tuple[Tensor, ...]:
    *scores, average_heads, mask_grad = scores_and_flags
    inputs = Inputs(q, k, k, attn_mask, sinks, rng_state)
    problem = weights_of(describe_inputs(inputs, CallOptions(*scores)))
    problem = backward_of(problem, None, mask_grad)
    saved = SavedWeights(lse, lse_low, average_heads, dweights, mask_grad)
    grads = backends.choose(problem).weights_backward(saved, inputs, problem)
    return (
        *map(as_gradient, (grads.dq, grads.dk), (q, k)),
        *(q.new_empty(0) if x is None else x for x in (grads.dmask, grads.dsinks)),
    )


def _attention_and_weights(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Below autograd nobody calls it; its own kernel there calls the two operators."""
    rng_state, *options, average_heads = rest
    scored_by = attn_mask, sinks, rng_state
    out, lse, low = _attention(q, k, v, *scored_by, *options)
    saved = lse, low if has_float_mask(attn_mask) else None
    return out, lse, _attention_weights(q, k, *saved, *scored_by, *options[:-1], average_heads)


for _name, _kernel in {
    "attention_and_weights": _attention_and_weights,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_varlen": _attention_varlen,
    "attention_varlen_backward": _attention_varlen_backward,
    "attention_weights": _attention_weights,
    "attention_weights_signed": _attention_weights_signed,
    "attention_weights_backward": _attention_weights_backward,
}.items():
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
