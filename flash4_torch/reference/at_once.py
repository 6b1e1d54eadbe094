"""Attention of few scores, which are all held at once: output, lse and weights from one softmax.

What `tiled` and `weights` compute tile by tile and one after the other is here a matmul, a softmax and one
more matmul, as in a textbook. The 'tiled' and 'cpu' backends run this file for small calls on a CPU, where
calls into torch cost more than memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import Band
from ..problem import has_float_mask
from .dropout import Dropout
from .host import bias_of
from .scoring import Scoring, mask_tile, working_dtype
from .tiled import Gradients, blocks, exp_, is_faithful

_MOST = 1 << 21
"""Scores held at once, in float32 8 MiB."""
_MOST_OF_WINDOW = 1 << 15
"""Scores of a head up to which tiles that a window hides are not worth leaving out."""
_MOST_IN_BACKWARD = 1 << 19
"""The same in a backward without dropout, unless one head has more."""


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
    skips_tiles = left is not None and right is not None and Sq * Sk > _MOST_OF_WINDOW
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
    dtype, products = q.dtype, _products(q, k)
    scores, biased = _scores(q, k, scoring, batch)
    highest = scores.amax(-1)
    weights = torch.softmax(scores, -1)
    log_sum = weights.amax(-1).log_()
    lse, low = highest - log_sum, None
    # A row that sees nothing makes it NaN.
    if biased and not is_faithful(lse):
        nothing = highest == -torch.inf
        weights.masked_fill_(nothing[..., None], 0.0)
        lse.masked_fill_(nothing, -torch.inf)
        if has_float_mask(scoring.attn_mask):
            # Knuth's TwoSum: exact, whichever of the two is larger.
            part = lse - highest
            low = ((highest - (lse - part)) - (log_sum + part)).masked_fill_(nothing, 0.0)
    elif has_float_mask(scoring.attn_mask):
        low = torch.zeros_like(lse)
    if scoring.dropout is not None:
        weights *= _factors(scoring.dropout, weights, B, batch)
    out = (weights.to(products) @ v.transpose(1, 2).to(products)).transpose(1, 2).contiguous().to(dtype)
    shown = None
    if average_heads is not None:
        shown = (weights.mean(1) if average_heads else weights).to(dtype)
    return Everything(out, lse, low, shown)


FEW = 1 << 13
"""Weights up to which 16 bits are multiplied in float32: the calls that multiply in 16 take longer."""
_IN_16_BITS = {
    dtype: getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", bool)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
}


@lru_cache
def products_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix products: that of the tensors, if this CPU multiplies in it."""
    multiplies = _IN_16_BITS.get(dtype)
    return dtype if multiplies is not None and multiplies() else working_dtype(dtype)


def _products(q: Tensor, k: Tensor) -> torch.dtype:
    """The dtype of products with weights and their gradients. Scores, and gradients of weights, of which
    large parts may cancel, are not rounded to 16 bits.
    """
    B, Sq, Hq, _ = q.shape
    few = B * Hq * Sq * k.shape[1] < FEW
    return working_dtype(q.dtype) if few else products_dtype(q.dtype)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask adds to scores of `dtype`."""
    return bias_of(mask, dtype) if mask.dtype == torch.bool else mask


def _scores(q: Tensor, k: Tensor, scoring: Scoring, batch: range) -> tuple[Tensor, bool]:
    """The masked scores in the working dtype, and whether there is a mask or a band."""
    work = working_dtype(q.dtype)
    scores = (q.to(work).transpose(1, 2) @ k.to(work).permute(0, 2, 3, 1)).mul_(scoring.scale)
    mask, biased = scoring.attn_mask, False
    Sq, Sk = scores.shape[-2:]
    if mask is not None:
        if len(batch) < mask.shape[0]:
            mask = mask_tile(mask, batch, range(Sq), range(Sk))
        scores += _bias(mask, scores.dtype)
        biased = True
    if not scoring.band.hides_nothing(Sq, Sk):
        scores += outside(scoring.band, Sq, Sk, scores.dtype)
        biased = True
    return scores, biased


def outside(band: Band, Sq: int, Sk: int, dtype: torch.dtype) -> Tensor:
    """What a band adds to scores on the CPU, (Sq, Sk): 0, or -inf where it hides a key."""
    left, right = band
    found = None
    if left is not None:
        found = torch.full((Sq, Sk), -torch.inf, dtype=dtype, device="cpu").tril_(Sk - Sq - left - 1)
    if right is not None:
        above = torch.full((Sq, Sk), -torch.inf, dtype=dtype, device="cpu").triu_(Sk - Sq + right + 1)
        found = above if found is None else found.add_(above)
    return torch.zeros((Sq, Sk), dtype=dtype, device="cpu") if found is None else found


def _factors(dropout: Dropout, weights: Tensor, B: int, batch: range) -> Tensor:
    """What dropout multiplies the weights of some of B batch entries by."""
    _, Hq, Sq, Sk = weights.shape
    keep = dropout.tile((B, Hq, Sq, Sk), batch, range(Sq), range(Sk))
    return dropout.factors(keep, weights.dtype)


class _Given(NamedTuple):
    """What a backward is given, of some batch entries and heads."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    lse_low: Tensor | None
    dweights: Tensor | None
    """Gradient of the weights, (B, H or 1, Sq, Sk)."""
    mask: Tensor | None
    dmask: Tensor | None
    """Sums to which the mask's gradient is added, in its shape."""

    def of_entries(self, at: slice) -> _Given:
        return self._map(lambda x: x[at], lambda x: x if len(x) == 1 else x[at])

    def of_heads(self, at: slice) -> _Given:
        def of_scores(x: Tensor) -> Tensor:
            return x if x.shape[1] == 1 else x[:, at]

        return self._map(lambda x: x[:, :, at], of_scores, of_scores)

    def _map(
        self,
        of_rows: Callable[[Tensor], Tensor],
        of_masks: Callable[[Tensor], Tensor],
        of_scores: Callable[[Tensor], Tensor] | None = None,
    ) -> _Given:
        """The tensors (B, S, H, D) by one function, those of masks by another, and those of scores."""
        dout, dlse, q, k, v, out, *scored, mask, dmask = self
        made: Any = [of_rows(x) for x in (dout, q, k, v, out)]
        others: Any = [None if x is None else (of_scores or of_rows)(x) for x in (dlse, *scored)]
        masks: Any = [None if x is None else of_masks(x) for x in (mask, dmask)]
        return _Given(made[0], others[0], *made[1:], *others[1:], *masks)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    scoring: Scoring,
    dweights: Tensor | None = None,
    mask_grad: bool = False,
) -> Gradients:
    """`tiled.backward`, and of the weights that `forward` returned at the same time.

    dweights: the gradient of the weights, (B, Hq, Sq, Sk), or (B, Sq, Sk) if they are averaged.
    """
    (B, Sq, Hq, _), Sk, work = q.shape, k.shape[1], working_dtype(q.dtype)
    size, mask = _MOST // (Hq * Sq * Sk), scoring.attn_mask
    dmask = torch.zeros_like(mask, dtype=work) if mask_grad and mask is not None else None
    if mask is not None and mask.numel() <= _MOST_IN_BACKWARD:
        mask = _bias(mask, work)  # once, and not for each part
    if dweights is not None:
        is_average = dweights.dim() == 3
        dweights = dweights[:, None].to(work) / Hq if is_average else dweights.to(work)
    given = _Given(dout, dlse, q, k, v, out, lse, lse_low, dweights, mask, dmask)
    if B <= size:
        dq, dk, dv = _backward(given, scoring, B, range(B))
    else:
        parts = (
            _backward(given.of_entries(slice(batch.start, batch.stop)), scoring, B, batch)
            for batch in blocks(range(B), size)
        )
        dq, dk, dv = (torch.cat(x) for x in zip(*parts, strict=True))
    return Gradients(dq, dk, dv, None if dmask is None or mask is None else dmask.to(mask.dtype))


def _backward(given: _Given, scoring: Scoring, B: int, batch: range) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` of some of B batch entries, some heads at a time: fresh memory of many MiB would cost its
    page faults in each call. Dropout counts all heads.
    """
    q, k, v = given.q, given.k, given.v
    heads, some = q.shape[2], max(1, _MOST_IN_BACKWARD // (len(batch) * q.shape[1] * k.shape[1]))
    if scoring.dropout is not None or some >= heads:
        return _backward_of_heads(given, scoring, B, batch)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for part in blocks(range(heads), some):
        at = slice(part.start, part.stop)
        dq[:, :, at], dk[:, :, at], dv[:, :, at] = _backward_of_heads(given.of_heads(at), scoring, B, batch)
    return dq, dk, dv


def _backward_of_heads(
    given: _Given, scoring: Scoring, B: int, batch: range
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of some heads.

    dv = w^T dout;   dq = scale * ds k;   dk = scale * ds^T q;   dmask = ds
    ds = w * (dout v^T + dweights - rowsum(dout * out) - rowsum(w * dweights) + dlse)
    """
    dout, dlse, q, k, v, out, lse, lse_low, dweights, mask, dmask = given
    dtype, products, work = q.dtype, _products(q, k), working_dtype(q.dtype)
    logs, biased = _scores(q, k, scoring._replace(attn_mask=mask), range(len(q)))
    ds = dout.to(work).transpose(1, 2) @ v.to(work).permute(0, 2, 3, 1)
    if dtype != products:
        dout, q, k = dout.to(products), q.to(products), k.to(products)
    # A row without keys has lse = -inf; +inf makes its weights exp(-inf) = 0 instead of NaN.
    logs -= (lse.nan_to_num(torch.nan, torch.inf, torch.inf) if biased else lse)[..., None]
    if lse_low is not None:
        logs -= lse_low[..., None]
    weights = exp_(logs) if biased else logs.exp_()
    dout_rows = dout.transpose(1, 2)
    applied = weights
    if dweights is not None:
        ds += dweights
    if scoring.dropout is not None:
        factors = _factors(scoring.dropout, weights, B, batch)
        ds *= factors
        applied = factors.mul_(weights)
    delta = (dout.to(work) * out).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    if dweights is not None:
        delta = delta + (applied * dweights).sum(-1)
    ds.sub_(delta[..., None]).mul_(weights)
    if dmask is not None:
        dmask += ds.sum_to_size(dmask.shape)
    ds.mul_(scoring.scale)
    ds, applied = ds.to(products), applied.to(products)
    dv = applied.transpose(2, 3) @ dout_rows
    dq, dk = ds @ k.transpose(1, 2), ds.transpose(2, 3) @ q.transpose(1, 2)
    dq, dk, dv = (x.transpose(1, 2).contiguous().to(dtype) for x in (dq, dk, dv))
    return dq, dk, dv
