"""The fallback: `reference.tiled` in plain torch. Any device, dtype and feature, O(S) memory."""

from __future__ import annotations

from ..problem import Inputs, Problem, Saved, has_float_mask
from ..reference import tiled
from ..reference.dropout import Dropout
from ..reference.scoring import Scoring
from . import sequences
from .base import Grads, Results


class Tiled:
    name = "tiled"

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        if problem.spec.varlen:
            return sequences.forward(inputs, problem, lambda dense: self)
        out, lse, low = tiled.forward(inputs.q, inputs.k, inputs.v, scoring(inputs, problem))
        return Results(out, lse, low if has_float_mask(inputs.attn_mask) else None)

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if problem.spec.varlen:
            return sequences.backward(saved, inputs, problem, lambda dense: self)
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
            lse_low=saved.lse_low,
        )
        return grads.dq, grads.dk, grads.dv, grads.dmask


def scoring(inputs: Inputs, problem: Problem) -> Scoring:
    """The problem's scoring, with its tensors."""
    dropout = None
    if inputs.rng_state is not None:
        dropout = Dropout(inputs.rng_state, problem.dropout_p, inputs.first_batch)
    return Scoring(problem.scale, problem.band, problem.softcap, inputs.attn_mask, dropout)
