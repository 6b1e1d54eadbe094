"""Attention of few scores, which are all held at once: output, lse and weights from one softmax.

What `tiled` and `weights` compute tile by tile and one after the other is here a matmul, a softmax and one
more matmul, as in a textbook. The 'tiled' and 'cpu' backends run this file for small calls on a CPU, where
calls into torch cost more than memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .scoring import Scoring, working_dtype
from .tiled import blocks

_MOST = 1 << 21
"""Scores held at once, in float32 8 MiB."""


class Everything(NamedTuple):
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), as of `tiled.forward`."""

    out: Tensor
    lse: Tensor
    lse_low: Tensor | None
    """The rounding error of lse, with a floating mask."""
    weights: Tensor | None
    """The weights of `weights.forward`, if they are wanted."""


def is_small(q: Tensor, k: Tensor, scoring: Scoring) -> bool:
    """Whether a call on a CPU is plain enough for this file, and has few scores in a batch entry.

    The number of entries does not matter, so that results do not depend on it.
    """
    (B, Sq, Hq, D), (_, Sk, Hk, _) = q.shape, k.shape
    left, right = scoring.band
    skips_tiles = left is not None and right is not None
    is_usual = Hq == Hk and not scoring.softcap and not skips_tiles
    return is_usual and q.device.type == "cpu" and B > 0 and D > 0 and 0 < Hq * Sq * Sk <= _MOST


def forward(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, average_heads: bool | None = None
) -> Everything:
    """`tiled.forward` without sinks, and the weights after dropout unless `average_heads` is None."""
    (B, Sq, Hq, _), Sk = q.shape, k.shape[1]
    size = _MOST // (Hq * Sq * Sk)
    if B <= size:
        return _of(q, k, v, scoring, B, range(B), average_heads)
    parts = []
    for batch in blocks(range(B), size):
        at = slice(batch.start, batch.stop)
        parts.append(_of(q[at], k[at], v[at], scoring, B, batch, average_heads))
    outs, lses, lows, weights = zip(*parts, strict=True)
    return Everything(torch.cat(outs), torch.cat(lses), _joined(lows), _joined(weights))


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """The parts of all batch entries, or None if they are None."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _of(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, B: int, batch: range, average_heads: bool | None
) -> Everything:
    """`forward` of some of B batch entries, whose tensors q, k and v are."""
    dtype, work = q.dtype, working_dtype(q.dtype)
    if dtype != work:
        q, k, v = q.to(work), k.to(work), v.to(work)
    (_, Sq, Hq, _), Sk = q.shape, k.shape[1]
    rows, keys, mask = range(Sq), range(Sk), scoring.attn_mask
    scores = (q * scoring.scale).transpose(1, 2) @ k.permute(0, 2, 3, 1)
    biased = False
    for bias in scoring.biases(scores, Sq, Sk, batch, rows, keys):
        scores += bias
        biased = True
    highest = scores.amax(-1)
    weights = torch.softmax(scores, -1)
    log_sum = weights.amax(-1).log_()
    lse, low = highest - log_sum, None
    if biased:
        nothing = highest == -torch.inf
        if nothing.any():
            weights.masked_fill_(nothing[..., None], 0.0)
            lse.masked_fill_(nothing, -torch.inf)
        if mask is not None and mask.is_floating_point():
            # Knuth's TwoSum: exact, whichever of the two is larger.
            part = lse - highest
            low = ((highest - (lse - part)) - (log_sum + part)).masked_fill_(nothing, 0.0)
    if scoring.dropout is not None:
        keep = scoring.dropout.tile((B, Hq, Sq, Sk), batch, rows, keys)
        weights *= scoring.dropout.factors(keep, work)
    out = (weights @ v.transpose(1, 2)).transpose(1, 2).contiguous()
    shown = None
    if average_heads is not None:
        shown = weights.mean(1) if average_heads else weights
    if dtype != work:
        out, shown = out.to(dtype), None if shown is None else shown.to(dtype)
    return Everything(out, lse, low, shown)
