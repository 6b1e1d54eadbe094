"""The fallback: `reference.tiled` in plain torch. Any device, dtype and feature, O(S) memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ..problem import Inputs, Problem, Saved, SavedWeights, has_float_mask
from ..reference import at_once, sinks, tiled, weights
from ..reference.weights import WeightsGradients
from . import sequences
from .base import SEQUENCE_FIRST, CallsTorch, Grads, Launch, Results, Views, WeightsLaunch
from .scoring import scoring


class Tiled(CallsTorch):
    name = "tiled"

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def forward(self, inputs: Inputs, problem: Problem) -> Results:
        if problem.spec.varlen:
            return sequences.forward(inputs, problem, lambda dense: self)
        scores = scoring(inputs, problem)
        if inputs.sinks is None and at_once.is_small(inputs.q, inputs.k, scores):
            return Results(*at_once.forward(inputs.q, inputs.k, inputs.v, scores))
        out, lse, low = tiled.forward(inputs.q, inputs.k, inputs.v, scores, sinks=inputs.sinks)
        return Results(out, lse, low if has_float_mask(inputs.attn_mask) else None)

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads:
        if problem.spec.varlen:
            return sequences.backward(saved, inputs, problem, lambda dense: self)
        given = saved.dout, saved.dlse, inputs.q, inputs.k, inputs.v, saved.out, saved.lse
        scores = scoring(inputs, problem)
        mask_grad, low = saved.mask_grad, saved.lse_low
        if inputs.sinks is None and at_once.is_small(inputs.q, inputs.k, scores):
            grads = at_once.backward(*given, low, scores, mask_grad=mask_grad)
        else:
            grads = tiled.backward(*given, scores, mask_grad=mask_grad, lse_low=low)
        return Grads(grads.dq, grads.dk, grads.dv, grads.dmask, sinks_gradient(saved, inputs))

    def weights(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> Tensor:
        return weights.forward(
            inputs.q,
            inputs.k,
            saved.lse,
            saved.lse_low,
            scoring(inputs, problem),
            saved.average_heads,
            problem.spec.signed,
        )

    def prepare_both(self, inputs: Inputs, problem: Problem, average_heads: bool) -> Launch | None:
        return prepare_both(inputs, problem, average_heads)

    def prepare_weights(self, inputs: Inputs, problem: Problem, average_heads: bool) -> WeightsLaunch:
        return partial(self.weights, problem=problem)

    def weights_backward(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> WeightsGradients:
        if saved.dweights is None:
            raise AssertionError("a backward carries dweights")
        return weights.backward(
            saved.dweights,
            inputs.q,
            inputs.k,
            saved.lse,
            saved.lse_low,
            scoring(inputs, problem),
            saved.average_heads,
            saved.mask_grad,
            inputs.sinks,
        )


def prepare_both(inputs: Inputs, problem: Problem, average_heads: bool) -> Launch | None:
    """Output and weights of small calls on a CPU."""
    is_small = at_once.is_small(inputs.q, inputs.k, scoring(inputs, problem))
    if problem.spec.varlen or inputs.sinks is not None or not is_small:
        return None

    seen = Views.of(inputs, SEQUENCE_FIRST)

    def launch(*tensors: Any) -> tuple[Any, ...]:
        inputs = seen(*tensors)
        q, k, v, *_ = inputs
        return Results(*at_once.forward(q, k, v, scoring(inputs, problem), average_heads))

    return launch


def backward_of_both(saved: Saved, dweights: Tensor, inputs: Inputs, problem: Problem) -> Grads | None:
    """Gradients of small calls on a CPU that returned output and weights, whose gradient is `dweights`; None
    of other calls.
    """
    q, k, v, *_ = inputs
    scores = scoring(inputs, problem)
    if problem.spec.varlen or inputs.sinks is not None or not q.dtype == k.dtype == v.dtype:
        return None
    if not at_once.is_small(q, k, scores):
        return None
    dout, dlse, out, lse, mask_grad, low = saved
    grads = at_once.backward(dout, dlse, q, k, v, out, lse, low, scores, dweights, mask_grad)
    return Grads(grads.dq, grads.dk, grads.dv, grads.dmask)


def sinks_gradient(saved: Saved, inputs: Inputs) -> Tensor | None:
    """The gradient of the sinks, if there are any."""
    if inputs.sinks is None:
        return None
    delta = sinks.delta(saved.dout, saved.out, saved.dlse, saved.lse.dtype)
    return sinks.gradient(delta, saved.lse, inputs.sinks)
