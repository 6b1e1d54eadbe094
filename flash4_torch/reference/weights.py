"""The attention weights themselves, for callers who want to see them, computed a block of rows at a time.

Memory is the output (averaged over heads (B, Sq, Sk), else (B, Hq, Sq, Sk)) plus one block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .scoring import Scoring, mask_tile, working_dtype
from .tiled import GPU_ELEMENTS, LOG2E, Gradients, Scores, Tiles, blocks

_CPU_ELEMENTS = 1 << 20
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
        ds = block.weights * dw
        ds -= block.weights * ds.sum(-1, keepdim=True)
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
    return Gradients(
        dq, dk.to(k.dtype), q.new_empty(0), None if dmask is None or mask is None else dmask.to(mask.dtype)
    )


class _Block:
    """One block of rows against all keys: its scores and softmax, and the tensors they were made from."""

    def __init__(self, tiles: Tiles, batch: range, rows: range):
        keys = range(tiles.k.shape[1])
        self.tiles, self.batch, self.rows = tiles, batch, rows
        self.q_rows = tiles.scaled_rows(batch, rows)
        self.k_keys = tiles.keys_of(tiles.k, batch, keys)
        self.scores: Scores = tiles.scores(self.q_rows, self.k_keys, batch, rows, keys)
        self.weights = tiles.per_head(_softmax_(self.scores.masked), len(rows))
        kept = tiles.kept(batch, rows, keys)
        self.kept = None if kept is None else tiles.per_head(kept, len(rows))

    @classmethod
    def of(cls, q: Tensor, k: Tensor, scoring: Scoring) -> Iterator[_Block]:
        (B, Sq, Hq, _), Sk = q.shape, k.shape[1]
        if Sk == 0:
            return
        elements = _CPU_ELEMENTS if q.device.type == "cpu" else GPU_ELEMENTS
        row_elements = Hq * Sk
        rows = min(Sq, max(1, elements // row_elements))
        batches = max(1, elements // max(1, rows * row_elements))
        tiles = Tiles(q, k, scoring)
        for batch in blocks(range(B), batches):
            for span in blocks(range(Sq), max(1, rows)):
                yield cls(tiles, batch, span)


def _softmax_(scores: Tensor) -> Tensor:
    """Softmax, in place of the scores; rows of only -inf give 0."""
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest.masked_fill_(highest == -torch.inf, 0.0)).mul_(LOG2E).exp2_()
    total = weights.sum(-1, keepdim=True)
    return weights.div_(total.masked_fill_(total == 0, 1.0))
