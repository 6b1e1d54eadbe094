"""The operators' implementations, the same for every device: describe the problem, let a backend serve it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import backends
from ..backends.tiled import scoring
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
from ..reference import tiled
from .check import cu_seqlens_values
from .schema import LIBRARY


def describe(
    q: Tensor,
    Dv: int,
    extent: Extent,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    options: CallOptions,
    varlen: bool = False,
) -> Problem:
    """The forward problem of a call."""
    device = q.device
    band = options.band
    spec = Spec(
        device=device.type,
        dtype=q.dtype,
        D=q.shape[-1],
        Dv=Dv,
        group=extent.Hq // extent.Hk,
        varlen=varlen,
        left=band.left is not None,
        right=band.right is not None,
        softcap=options.softcap != 0.0,
        mask=mask_key(attn_mask),
        dropout=options.dropout_p > 0.0,
        deterministic=options.deterministic,
        sinks=dtype_key(sinks),
        capability=capability_of(device),
        tf32=allows_tf32(q.dtype),
    )
    return Problem(spec, extent, options.scale, band, options.softcap, options.dropout_p)


def describe_inputs(
    inputs: Inputs, options: CallOptions, max_seqlens: tuple[int, int] | None = None
) -> Problem:
    """The forward problem of a call's tensors; `max_seqlens` of queries and keys make it varlen."""
    q, k, v, mask, sinks = inputs[:5]
    extent = dense_extent(q, k) if max_seqlens is None else _packed_extent(inputs, max_seqlens)
    return describe(q, v.shape[-1], extent, mask, sinks, options, max_seqlens is not None)


def _packed_extent(inputs: Inputs, max_seqlens: tuple[int, int]) -> Extent:
    if inputs.cu_seqlens_q is None:
        raise AssertionError("a varlen call carries cu_seqlens")
    return _varlen_extent(inputs.q, inputs.k, inputs.cu_seqlens_q, *max_seqlens)


def with_state(problem: Problem, rng_state: Tensor | None) -> Problem:
    """The problem with what dropout's state says of it."""
    if rng_state is None or rng_state.shape[0] == 2:
        return problem
    return problem._replace(spec=problem.spec._replace(dropout_of_part=True))


def weights_of(problem: Problem) -> Problem:
    """The problem of the weights of a call; what is made of v does not matter to it."""
    spec = problem.spec._replace(weights=True, Dv=problem.spec.D, deterministic=False)
    return problem._replace(spec=spec)


def signed_weights_of(problem: Problem) -> Problem:
    """The problem of weights whose signs say what dropout takes, given that of weights."""
    return problem._replace(spec=problem.spec._replace(signed=True))


def dense_extent(q: Tensor, k: Tensor) -> Extent:
    return Extent(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def _varlen_extent(q: Tensor, k: Tensor, cu_seqlens: Tensor, longest_q: int, longest_k: int) -> Extent:
    return Extent(cu_seqlens.shape[0] - 1, longest_q, longest_k, q.shape[1], k.shape[1])


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
    problem = describe(q, v.shape[-1], dense_extent(q, k), attn_mask, sinks, CallOptions(*options))
    problem = with_state(problem, rng_state)
    inputs = Inputs(q, k, v, attn_mask, sinks, rng_state)
    out, lse, low, _ = backends.choose(problem).forward(inputs, problem)
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
    sinks: Tensor | None,
    rng_state: Tensor | None,
    *options_and_mask_grad: Any,
) -> tuple[Tensor, ...]:
    *options, mask_grad = options_and_mask_grad
    forward = describe(q, v.shape[-1], dense_extent(q, k), attn_mask, sinks, CallOptions(*options))
    problem = backward_of(with_state(forward, rng_state), dlse, mask_grad)
    inputs = Inputs(q, k, v, attn_mask, sinks, rng_state)
    if lse_low is None:
        lse_low = low_of(lse, inputs, problem)
    saved = Saved(dout, dlse, out, lse, mask_grad, lse_low)
    dq, dk, dv, *others = backends.choose(problem).backward(saved, inputs, problem)
    return (
        *map(as_gradient, (dq, dk, dv), (q, k, v)),
        *(q.new_empty(0) if x is None else x for x in others),
    )


def low_of(lse: Tensor, inputs: Inputs, problem: Problem) -> Tensor | None:
    """The rounding error of a forward's lse, None if it does not matter to the backward."""
    if not has_float_mask(inputs.attn_mask):
        return None
    # Kernels for a GPU read it in any case.
    if lse.device.type == "cpu" and tiled.is_faithful(lse):
        return None
    return tiled.lse_low(inputs.q, inputs.k, lse, scoring(inputs, problem))


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
    extent = _varlen_extent(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    problem = describe(q, v.shape[-1], extent, None, sinks, CallOptions(*options), varlen=True)
    problem = with_state(problem, rng_state)
    inputs = Inputs(q, k, v, None, sinks, rng_state, cu_seqlens_q, cu_seqlens_k)
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
    extent = _varlen_extent(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    forward = describe(q, v.shape[-1], extent, None, sinks, CallOptions(*options), varlen=True)
    problem = backward_of(with_state(forward, rng_state), dlse)
    inputs = Inputs(q, k, v, None, sinks, rng_state, cu_seqlens_q, cu_seqlens_k)
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
    problem = _weights_problem(q, k, attn_mask, sinks, list(scores))
    problem = signed_weights_of(problem) if signed else problem
    inputs = Inputs(q, k, k, attn_mask, sinks, rng_state)
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
    problem = backward_of(_weights_problem(q, k, attn_mask, sinks, scores), None, mask_grad)
    inputs = Inputs(q, k, k, attn_mask, sinks, rng_state)
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


def _weights_problem(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, scores: list[Any]
) -> Problem:
    return weights_of(describe(q, q.shape[-1], dense_extent(q, k), attn_mask, sinks, CallOptions(*scores)))


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
