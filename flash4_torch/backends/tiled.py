"""The last resort: `reference.tiled` in plain torch. Any device, dtype and feature, O(S) memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..problem import Inputs, Problem, Saved
from ..reference import tiled
from ..reference.dropout import Dropout
from ..reference.scoring import Scoring, working_dtype
from .base import Grads, Results


class Tiled:
    name = "tiled"

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        if problem.spec.varlen:
            return _forward_varlen(inputs, problem)
        return tiled.forward(inputs.q, inputs.k, inputs.v, scoring(inputs, problem))

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if problem.spec.varlen:
            return _backward_varlen(saved, inputs, problem)
        grads = tiled.backward(
            saved.dout,
            saved.dlse,
            inputs.q,
            inputs.k,
            inputs.v,
            saved.out,
            saved.lse,
            scoring(inputs, problem),
            mask_grad=saved.mask_grad,
        )
        return grads.dq, grads.dk, grads.dv, grads.dmask


def scoring(inputs: Inputs, problem: Problem, first_batch: int = 0) -> Scoring:
    """The problem's score rules with their tensors; dropout counts batch entries from `first_batch`."""
    dropout = None
    if inputs.rng_state is not None:
        dropout = Dropout(inputs.rng_state, problem.dropout_p, first_batch)
    return Scoring(problem.scale, problem.band, problem.softcap, inputs.attn_mask, dropout)


def _sequences(inputs: Inputs) -> Iterator[tuple[int, slice, slice]]:
    """Each sequence's index and its slices of the packed queries and keys. Waits for a GPU's lengths."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        raise AssertionError("a varlen problem carries cu_seqlens")
    q_ends, k_ends = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    for b in range(len(q_ends) - 1):
        yield b, slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])


def _forward_varlen(inputs: Inputs, problem: Problem) -> Results:
    q, k, v = inputs.q, inputs.k, inputs.v
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=working_dtype(q.dtype))
    for b, rows, keys in _sequences(inputs):
        results = tiled.forward(q[None, rows], k[None, keys], v[None, keys], scoring(inputs, problem, b))
        out[rows], lse[:, rows] = results[0][0], results[1][0]
    return out, lse


def _backward_varlen(saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
    q, k, v = inputs.q, inputs.k, inputs.v
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for b, rows, keys in _sequences(inputs):
        grads = tiled.backward(
            saved.dout[None, rows],
            _lse_rows(saved.dlse, rows),
            q[None, rows],
            k[None, keys],
            v[None, keys],
            saved.out[None, rows],
            saved.lse[None, :, rows],
            scoring(inputs, problem, b),
        )
        dq[rows], dk[keys], dv[keys] = grads.dq[0], grads.dk[0], grads.dv[0]
    return dq, dk, dv, None


def _lse_rows(dlse: Tensor | None, rows: slice) -> Tensor | None:
    return None if dlse is None else dlse[None, :, rows]
