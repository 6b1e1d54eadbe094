"""The attention weights themselves, for callers who want to look at them: a block of rows at a time.

Memory is the output plus one block: averaged over heads (B, Sq, Sk), else (B, Hq, Sq, Sk).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .scoring import Scoring, mask_tile, working_dtype
from .tiled import Gradients, Scores, Tiles, blocks

_ELEMENTS = 1 << 20
"""Scores held at once."""


def forward(q: Tensor, k: Tensor, scoring: Scoring, average_heads: bool) -> Tensor:
    """softmax(scores) after dropout, in q's dtype: averaged (B, Sq, Sk), else (B, Hq, Sq, Sk)."""
    (B, Sq, Hq, _), Sk = q.shape, k.shape[1]
    weights = q.new_empty((B, Sq, Sk) if average_heads else (B, Hq, Sq, Sk))
    for block in _Block.of(q, k, scoring):
        applied = block.weights if block.kept is None else block.weights * block.kept
        if average_heads:
            applied = applied.mean(1)
        weights[block.batch.start : block.batch.stop, ..., block.rows.start : block.rows.stop, :] = applied
    return weights


def backward(
    dweights: Tensor, q: Tensor, k: Tensor, scoring: Scoring, average_heads: bool, mask_grad: bool
) -> Gradients:
    """Gradients of q, k and, with `mask_grad`, of a floating attn_mask; `dv` is empty."""
    Hq, Sk = q.shape[2], k.shape[1]
    work = working_dtype(q.dtype)
    dq = q.new_zeros(q.shape)
    dk = k.new_zeros(k.shape, dtype=work)
    mask = scoring.attn_mask
    dmask = mask.new_zeros(mask.shape, dtype=work) if mask_grad and mask is not None else None
    for block in _Block.of(q, k, scoring):
        at, span = slice(block.batch.start, block.batch.stop), slice(block.rows.start, block.rows.stop)
        dw = dweights[at, ..., span, :].to(work)
        dw = dw.unsqueeze(1) / Hq if average_heads else dw
        if block.kept is not None:
            dw = dw * block.kept
        weighted = block.weights * dw
        ds = weighted - block.weights * weighted.sum(-1, keepdim=True)
        if dmask is not None:
            tile = mask_tile(dmask, block.batch, block.rows, range(Sk))
            tile += ds.sum_to_size(tile.shape)
        if scoring.softcap:
            ds = ds * (1.0 - (block.scores.capped / scoring.softcap) ** 2)
        ds = block.tiles.folded(ds)
        dq_rows = block.tiles.per_head(ds @ block.k_keys, len(block.rows)) * scoring.scale
        dq[at, span] = dq_rows.transpose(1, 2).to(q.dtype)
        dk[at] += (ds.transpose(2, 3) @ block.q_rows).transpose(1, 2)
    return Gradients(
        dq, dk.to(k.dtype), q.new_empty(0), None if dmask is None or mask is None else dmask.to(mask.dtype)
    )


class _Block:
    """One block of rows against all keys: its scores and softmax, and what they were made of."""

    def __init__(self, tiles: Tiles, batch: range, rows: range):
        keys = range(tiles.k.shape[1])
        self.tiles, self.batch, self.rows = tiles, batch, rows
        self.q_rows = tiles.scaled_rows(batch, rows)
        self.k_keys = tiles.keys_of(tiles.k, batch, keys)
        self.scores: Scores = tiles.scores(self.q_rows, self.k_keys, batch, rows, keys)
        self.weights = _softmax_base2(self.scores.base2)
        self.kept = tiles.kept(batch, rows, keys)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, scoring: Scoring) -> Iterator[_Block]:
        (B, Sq, Hq, _), Sk = q.shape, k.shape[1]
        if Sk == 0:
            return
        row_elements = Hq * Sk
        rows = min(Sq, max(1, _ELEMENTS // row_elements))
        batches = max(1, _ELEMENTS // max(1, rows * row_elements))
        tiles = Tiles(q, k, scoring)
        for batch in blocks(range(B), batches):
            for span in blocks(range(Sq), max(1, rows)):
                yield cls(tiles, batch, span)


def _softmax_base2(scores: Tensor) -> Tensor:
    """Softmax of base-2 scores; rows of only -inf give 0."""
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp2(scores - torch.where(highest == -torch.inf, 0.0, highest))
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)
