"""Attention sinks: what one more score per head, of a key without a value, makes of results without it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class WithSinks(NamedTuple):
    """Results that count the sinks; see `join`."""

    out: Tensor
    lse: Tensor
    lse_low: Tensor | None


def join(out: Tensor, lse: Tensor, lse_low: Tensor | None, sinks: Tensor) -> WithSinks:
    """out (..., Sq, Hq, Dv), lse and lse_low (..., Hq, Sq) of a softmax without sinks (Hq,), with them.

    A row's weights are multiplied by the share of the denominator that is not the sink's.
    """
    sink = sinks.to(lse.dtype)[:, None]
    ahead = lse - sink if lse_low is None else (lse - sink) + lse_low
    # Neither a visible key nor a sink: -inf - -inf.
    ahead = ahead.masked_fill((lse == -torch.inf) & (sink == -torch.inf), torch.inf)
    is_ahead = ahead >= 0
    higher, log_sum = torch.where(is_ahead, lse, sink), torch.log1p(torch.exp(-ahead.abs()))
    joined, low = higher + log_sum, None
    if lse_low is not None:
        # The error of the sum (Knuth's TwoSum), and that of its larger term.
        part = joined - higher
        low = (higher - (joined - part)) + (log_sum - part)
        low = (low + torch.where(is_ahead, lse_low, 0.0)).masked_fill(joined.isinf(), 0.0)
    share = torch.sigmoid(ahead).transpose(-1, -2)[..., None]
    return WithSinks((out * share).to(out.dtype), joined, low)


def gradient(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """dsinks (Hq,), in the sinks' dtype, from lse, which counts the sinks, and delta, both (..., Hq, Sq).

    delta is rowsum(dout * out) - dlse. A sink's weight is exp(sink - lse), and its value is 0.
    """
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    # A row that sees neither a key nor a sink: exp(-inf - -inf).
    terms = (weights * delta).masked_fill(lse == -torch.inf, 0.0).sum(-1)
    return -terms.reshape(-1, sinks.shape[0]).sum(0).to(sinks.dtype)


def delta(dout: Tensor, out: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """rowsum(dout * out) - dlse, (..., Hq, Sq) in `dtype`, of dout and out (..., Sq, Hq, Dv)."""
    rows = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(-1, -2)
    return rows if dlse is None else rows - dlse
