"""A call of more batch entries than a kernel's grid has, as calls of fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..problem import Inputs, Problem, Saved
from .base import Grads, Results

MOST = 65535
"""Batch entries or heads in a dimension of a CUDA grid other than the first."""


def forward(inputs: Inputs, problem: Problem, serve: Callable[[Inputs, Problem], Results]) -> Results:
    parts = [serve(_inputs_at(inputs, at), _of_part(problem, at)) for at in _parts(problem)]
    out, lse, low = (_joined([part[i] for part in parts]) for i in range(3))
    if out is None or lse is None:
        raise AssertionError("every part has an output")
    return Results(out, lse, low)


def backward(
    saved: Saved, inputs: Inputs, problem: Problem, serve: Callable[[Saved, Inputs, Problem], Grads]
) -> Grads:
    parts: list[Grads] = []
    for at in _parts(problem):
        dlse, low = (None if x is None else x[at] for x in (saved.dlse, saved.lse_low))
        of_part = Saved(saved.dout[at], dlse, saved.out[at], saved.lse[at], saved.mask_grad, low)
        parts.append(serve(of_part, _inputs_at(inputs, at), _of_part(problem, at)))
    dq, dk, dv = (torch.cat(grads) for grads in zip(*(part[:3] for part in parts), strict=True))
    dmasks = [part.dmask for part in parts]
    is_shared = inputs.attn_mask is not None and inputs.attn_mask.shape[0] == 1
    dmask = _sum(dmasks) if is_shared else _joined(dmasks)
    return Grads(dq, dk, dv, dmask, _sum([part.dsinks for part in parts]))


def _parts(problem: Problem) -> Iterator[slice]:
    B = problem.extent.B
    for start in range(0, B, MOST):
        yield slice(start, min(start + MOST, B))


def _of_part(problem: Problem, at: slice) -> Problem:
    return problem._replace(extent=problem.extent._replace(B=at.stop - at.start))


def _inputs_at(inputs: Inputs, at: slice) -> Inputs:
    mask = inputs.attn_mask
    if mask is not None and mask.shape[0] != 1:
        mask = mask[at]
    q, k, v = (x[at] for x in inputs[:3])
    return Inputs(q, k, v, mask, inputs.sinks)


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    found = [x for x in parts if x is not None]
    return torch.cat(found) if found else None


def _sum(parts: list[Tensor | None]) -> Tensor | None:
    found = [x for x in parts if x is not None]
    return torch.stack(found).sum(0, dtype=torch.float32).to(found[0].dtype) if found else None
