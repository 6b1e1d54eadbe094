"""Attention for callers inside the package, whose options are complete: the fast path, or operators."""

from __future__ import annotations

from torch import Tensor

from . import fast_path, ops
from .fast_path import Door, FastCall
from .problem import CallOptions, Inputs


def known_call(
    door: Door,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    options: CallOptions,
    average_heads: bool | None = None,
) -> FastCall | None:
    """What `attend` would call now, if that is prepared."""
    return fast_path.lookup(door, q, k, v, (attn_mask, sinks), (*options, average_heads))[1]


def attend(
    door: Door,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    options: CallOptions,
    average_heads: bool | None = None,
) -> tuple[Tensor, ...]:
    """(out, lse), or with `average_heads` of True or False also the weights, averaged or of each head.

    q, k and v are laid out as the door says; the other arguments are those of `ops.attention_and_weights`.
    """
    others = attn_mask, sinks
    signature, call = fast_path.lookup(door, q, k, v, others, (*options, average_heads))
    if call is not None:
        return call(q, k, v, *others)
    q, k, v = ops.autocast_inputs(q, k, v)
    if door.heads_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rng_state = ops.draw_rng_state(q.device) if options.dropout_p > 0.0 else None
    results: tuple[Tensor, ...]
    if average_heads is None:
        results = ops.attention(q, k, v, *others, rng_state, options)
    else:
        results = ops.attention_and_weights(q, k, v, *others, rng_state, options, average_heads)
    fast_path.record(signature, door, Inputs(q, k, v, *others), options, average_heads=average_heads)
    return results
