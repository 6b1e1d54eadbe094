"""The attention weights themselves, for callers who want to see them, computed a block of rows at a time.

Memory is the output (averaged over heads (B, Sq, Sk), else (B, Hq, Sq, Sk)) plus one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .scoring import Scoring, mask_tile, working_dtype
from .sinks import gradient
from .tiled import GPU_ELEMENTS, Scores, Tiles, below, blocks, exp_

_CPU_ELEMENTS = 1 << 20
"""Scores held at once."""
_AT_ONCE = 1 << 22
"""Scores held at once where all of them are."""


class WeightsGradients(NamedTuple):
    """Gradients in the inputs' dtypes and shapes; `dmask` and `dsinks` only if they were requested."""

    dq: Tensor
    dk: Tensor
    dmask: Tensor | None
    dsinks: Tensor | None


def forward(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    scoring: Scoring,
    average_heads: bool,
    signed: bool = False,
) -> Tensor:
    """exp(scores - lse - lse_low) after dropout, in q's dtype: averaged (B, Sq, Sk), else (B, Hq, Sq, Sk).

    lse, lse_low: (B, Hq, Sq), of `attention` with the same arguments. signed: dropout makes the weights of
    each head negative that it takes, and leaves the others.
    """
    (B, Sq, Hq, _), Sk = q.shape, k.shape[1]
    if _is_small(q, k, scoring):
        return _at_once(q, k, lse, lse_low, scoring, average_heads)
    weights = q.new_empty((B, Sq, Sk) if average_heads else (B, Hq, Sq, Sk))
    for block in _Block.of(q, k, lse, lse_low, scoring):
        applied = block.weights
        if block.kept is not None:
            applied = torch.where(block.kept > 0, applied, -applied) if signed else applied * block.kept
        if average_heads:
            applied = applied.mean(1)
        weights[block.batch.start : block.batch.stop, ..., block.rows.start : block.rows.stop, :] = applied
    return weights


def _is_small(q: Tensor, k: Tensor, scoring: Scoring) -> bool:
    """Whether a plain call has so few scores that blocks would be nothing but overhead."""
    (B, Sq, Hq, _), (_, Sk, Hk, _) = q.shape, k.shape
    plain = scoring.band.is_full and not scoring.softcap and scoring.dropout is None and Hq == Hk
    return plain and q.device.type == "cpu" and 0 < B * Hq * Sq * Sk <= _AT_ONCE


def _at_once(
    q: Tensor, k: Tensor, lse: Tensor, lse_low: Tensor | None, scoring: Scoring, average_heads: bool
) -> Tensor:
    work = working_dtype(q.dtype)
    scores = q.to(work).transpose(1, 2) @ k.to(work).permute(0, 2, 3, 1)
    scores.mul_(scoring.scale)
    mask = scoring.attn_mask
    if mask is not None:
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        else:
            scores += mask
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    scores.sub_(lse[..., None])
    if lse_low is not None:
        scores.sub_(lse_low[..., None])
    weights = exp_(scores) if mask is not None else scores.exp_()
    return (weights.mean(1) if average_heads else weights).to(q.dtype)


def backward(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    scoring: Scoring,
    average_heads: bool,
    mask_grad: bool = False,
    sinks: Tensor | None = None,
) -> WeightsGradients:
    """Gradients of q, k, sinks and, with `mask_grad`, of a floating attn_mask.

    ds = w * (dw - rowsum(w * dw));   dq = scale * ds k;   dk = scale * ds^T q
    """
    Hq, Sk = q.shape[2], k.shape[1]
    work = working_dtype(q.dtype)
    dq = q.new_zeros(q.shape)
    dk = k.new_zeros(k.shape, dtype=work)
    mask = scoring.attn_mask
    dmask = mask.new_zeros(mask.shape, dtype=work) if mask_grad and mask is not None else None
    delta = torch.zeros_like(lse)
    for block in _Block.of(q, k, lse, lse_low, scoring):
        at, span = slice(block.batch.start, block.batch.stop), slice(block.rows.start, block.rows.stop)
        dw = dweights[at, ..., span, :].to(work)
        dw = dw.unsqueeze(1) / Hq if average_heads else dw
        if block.kept is not None:
            dw = dw * block.kept
        ds = block.weights * dw
        total = ds.sum(-1, keepdim=True)
        delta[at, :, span] = total.squeeze(-1)
        ds -= block.weights * total
        if dmask is not None:
            tile = mask_tile(dmask, block.batch, block.rows, range(Sk))
            tile += ds.sum_to_size(tile.shape)
        ds = block.tiles.folded(ds)
        if block.scores.tanh is not None:
            ds -= block.scores.tanh.square_().mul_(ds)
        dq_rows = block.tiles.per_head(ds @ block.k_keys, len(block.rows)) * scoring.scale
        dq[at, span] = dq_rows.transpose(1, 2).to(q.dtype)
        dk_block = ds.transpose(1, 2) @ block.q_rows
        dk[at] += dk_block.unflatten(0, (len(block.batch), -1)).transpose(1, 2)
    return WeightsGradients(
        dq,
        dk.to(k.dtype),
        None if dmask is None or mask is None else dmask.to(mask.dtype),
        None if sinks is None else gradient(delta, lse, sinks),
    )


class _Block:
    """One block of rows against all keys: its scores and weights, and the tensors they were made from."""

    def __init__(self, tiles: Tiles, lse: Tensor, lse_low: Tensor | None, batch: range, rows: range):
        keys = range(tiles.k.shape[1])
        self.tiles, self.batch, self.rows = tiles, batch, rows
        self.q_rows = tiles.scaled_rows(batch, rows)
        self.k_keys = tiles.keys_of(tiles.k, batch, keys)
        self.scores: Scores = tiles.scores(self.q_rows, self.k_keys, batch, rows, keys)
        at, span = slice(batch.start, batch.stop), slice(rows.start, rows.stop)
        logs = below(self.scores.masked, tiles, lse, lse_low, at, span)
        self.weights = tiles.per_head(exp_(logs), len(rows))
        kept = tiles.kept(batch, rows, keys)
        self.kept = None if kept is None else tiles.per_head(kept, len(rows))

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, lse: Tensor, lse_low: Tensor | None, scoring: Scoring
    ) -> Iterator[_Block]:
        (B, Sq, Hq, _), Sk = q.shape, k.shape[1]
        if Sk == 0:
            return
        elements = _CPU_ELEMENTS if q.device.type == "cpu" else GPU_ELEMENTS
        row_elements = Hq * Sk
        rows = min(Sq, max(1, elements // row_elements))
        batches = max(1, elements // max(1, rows * row_elements))
        tiles = Tiles(q, k, scoring)
        # A row without keys has lse = -inf; +inf makes its weights exp2(-inf) = 0 instead of NaN.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        for batch in blocks(range(B), batches):
            for span in blocks(range(Sq), max(1, rows)):
                yield cls(tiles, lse, lse_low, batch, span)
