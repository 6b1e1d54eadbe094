"""The attention weights: the kernel that serves a call, and gradients made of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compile
from ...configs.sections import Section
from ...configs.types import Features
from ...configs.weights import MASK_BLOCK
from ...kernels.common.mask_tables import MaskPlan
from ...problem import Inputs, Problem, SavedWeights
from ...reference import sinks
from ...reference.weights import WeightsGradients
from ..base import WeightsLaunch
from .forward import features_of
from .masks import Read
from .params import LaunchParams, launch_params
from .targets import WEIGHTS, Find, Target
from .tensors import Allocator

_MAX_D = 256
_ELEMENTS = 1 << 28
"""Weights held at once by the backward, in q's dtype."""


class Kernel(NamedTuple):
    """A compiled kernel, and its parameters besides tensors."""

    function: compile.Function
    mask_plan: MaskPlan
    params: LaunchParams


def limits(target: Target, problem: Problem) -> list[str]:
    """The reasons why the kernel cannot serve the problem."""
    spec, why = problem.spec, []
    if spec.D > _MAX_D:
        why.append(f"D is {spec.D}, and its kernel for weights serves up to {_MAX_D}")
    if spec.backward and spec.softcap:
        why.append(f"softcap is {problem.softcap}, and its gradient of weights has none")
    return why


def decide(target: Target, problem: Problem, average_heads: bool, find: Find) -> Kernel:
    features = features_of_weights(features_of(problem))
    params = launch_params(problem, problem.extent.Sq, Section(1), 1)
    static = statics(target, features, average_heads, signed=problem.spec.signed and features.dropout)
    return Kernel(find(WEIGHTS, static), mask_plan(features.mask), params)


def statics(
    target: Target, features: Features, average_heads: bool, signed: bool = False
) -> tuple[object, ...]:
    """What the kernel is compiled for, the arguments of its entry."""
    static = features, average_heads, target.has_tma
    return (*static, True) if signed else static


def features_of_weights(features: Features) -> Features:
    """Features without what the weights do not depend on, so that one kernel serves all of it."""
    return features._replace(Dv=0, sinks="", varlen=False)


def mask_plan(dtype: str) -> MaskPlan:
    """How a mask of that dtype is divided into blocks."""
    return MaskPlan(dtype, *MASK_BLOCK)


def shape_of(problem: Problem, average_heads: bool) -> tuple[int, ...]:
    """The shape of the weights."""
    B, Sq, Sk, Hq, _ = problem.extent
    return (B, Sq, Sk) if average_heads else (B, Hq, Sq, Sk)


def sequence(
    kernel: Kernel,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    params: Any,
    read_mask: Read,
    allocator: Allocator,
) -> WeightsLaunch:
    """The launches, with everything decided but the tensors, which are readable; see `forward.sequence`."""
    function, new_weights = kernel.function, allocator(shape, dtype)

    def launch(saved: SavedWeights, x: Inputs) -> Tensor:
        weights = new_weights()
        read = read_mask(x.attn_mask)
        function(x.q, x.k, saved.lse, saved.lse_low, weights, read, x.rng_state, params)
        return weights

    return launch


WeightsKernelLaunch = Callable[[SavedWeights, Inputs, Problem], Tensor]
"""Function that launches the kernel of each head's weights, (B, Hq, Sq, Sk)."""


def backward(
    saved: SavedWeights, inputs: Inputs, problem: Problem, launch_weights: WeightsKernelLaunch
) -> WeightsGradients:
    """Gradients of the weights, in q's dtype as stock attention computes them, some batch entries at a time.

    ds = w * (dw - rowsum(w * dw));   dq = scale * ds k;   dk = scale * ds^T q
    """
    B, Sq, Sk, Hq, _ = problem.extent
    q, k, mask = inputs.q, inputs.k, inputs.attn_mask
    if saved.dweights is None:
        raise AssertionError("a backward carries dweights")
    dq, dk, delta = torch.empty_like(q), torch.empty_like(k), torch.zeros_like(saved.lse)
    dmask = mask.new_zeros(mask.shape, dtype=torch.float32) if saved.mask_grad and mask is not None else None
    # Dropout counts batch entries from the first one of a call.
    step = B if problem.spec.dropout else max(1, _ELEMENTS // max(1, Hq * Sq * Sk))
    for start in range(0, B, step):
        at = slice(start, min(start + step, B))
        part = inputs._replace(q=q[at], k=k[at], v=k[at], attn_mask=_entries(mask, at))
        lse_low = None if saved.lse_low is None else saved.lse_low[at]
        own = saved._replace(lse=saved.lse[at], lse_low=lse_low)
        of_part = problem._replace(extent=problem.extent._replace(B=at.stop - at.start))
        weights = launch_weights(own, part, _without_dropout(of_part))
        dw = saved.dweights[at]
        dw = (dw[:, None] / Hq if saved.average_heads else dw).expand_as(weights)
        if problem.spec.dropout:
            kept = launch_weights(own, part, of_part)
            # A kept weight of 0 has no gradient, whatever becomes of dw.
            dw = torch.where(kept != 0, dw / (1.0 - problem.dropout_p), 0.0)
        if inputs.sinks is not None:
            delta[at] = (weights * dw).sum(-1, dtype=delta.dtype)
        ds = torch._softmax_backward_data(dw, weights, -1, weights.dtype)
        if dmask is not None:
            tile = _entries(dmask, at)
            tile += ds.float().sum_to_size(tile.shape)
        dq[at], dk[at] = _products(ds, part, problem.scale)
    return WeightsGradients(
        dq,
        dk,
        None if dmask is None or mask is None else dmask.to(mask.dtype),
        None if inputs.sinks is None else sinks.gradient(delta, saved.lse, inputs.sinks),
    )


def _products(ds: Tensor, inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
    """dq and dk from ds (B, Hq, Sq, Sk); query heads of a KV head are rows of one matrix."""
    q, k = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2)
    (B, Hq, Sq, Sk), Hk = ds.shape, k.shape[1]
    ds = ds.view(B, Hk, Hq // Hk * Sq, Sk)
    dq = (ds @ k).view(B, Hq, Sq, -1) * scale
    dk = ds.transpose(2, 3) @ q.reshape(B, Hk, Hq // Hk * Sq, -1) * scale
    return dq.transpose(1, 2), dk.transpose(1, 2)


def _entries(x: Tensor | None, at: slice) -> Any:
    """Batch entries of a mask, which may have one for all."""
    return x if x is None or x.shape[0] == 1 else x[at]


def _without_dropout(problem: Problem) -> Problem:
    return problem._replace(spec=problem.spec._replace(dropout=False), dropout_p=0.0)
