"""A varlen problem as dense problems, one per sequence, for backends without varlen of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..problem import Extent, Inputs, Problem, Saved
from ..reference.scoring import working_dtype
from .base import Backend, Grads, Results

Serve = Callable[[Problem], Backend]
"""Choice of the backend for a dense problem."""


def forward(inputs: Inputs, problem: Problem, serve: Serve) -> Results:
    q, v = inputs.q, inputs.v
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=working_dtype(q.dtype))
    for b, rows, keys in _sequences(inputs):
        dense, sequence = _dense(inputs, problem, b, rows, keys)
        results = serve(dense).forward(sequence, dense)
        out[rows], lse[:, rows] = results[0][0], results[1][0]
    return Results(out, lse)


def backward(saved: Saved, inputs: Inputs, problem: Problem, serve: Serve) -> Grads:
    q, k, v = inputs.q, inputs.k, inputs.v
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dsinks = None if inputs.sinks is None else torch.zeros_like(inputs.sinks, dtype=saved.lse.dtype)
    for b, rows, keys in _sequences(inputs):
        dense, sequence = _dense(inputs, problem, b, rows, keys)
        dlse = None if saved.dlse is None else saved.dlse[None, :, rows]
        of_rows = Saved(saved.dout[None, rows], dlse, saved.out[None, rows], saved.lse[None, :, rows])
        grads = serve(dense).backward(of_rows, sequence, dense)
        dq[rows], dk[keys], dv[keys] = grads[0][0], grads[1][0], grads[2][0]
        if dsinks is not None and grads.dsinks is not None:
            dsinks += grads.dsinks
    if dsinks is not None and inputs.sinks is not None:
        dsinks = dsinks.to(inputs.sinks.dtype)
    return Grads(dq, dk, dv, None, dsinks)


def _sequences(inputs: Inputs) -> Iterator[tuple[int, slice, slice]]:
    """Each sequence's index and its slices of the packed queries and keys. Waits for a GPU's lengths."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        raise AssertionError("a varlen problem carries cu_seqlens")
    q_ends, k_ends = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    for b in range(len(q_ends) - 1):
        yield b, slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])


def _dense(inputs: Inputs, problem: Problem, b: int, rows: slice, keys: slice) -> tuple[Problem, Inputs]:
    """Sequence b as a batch of one."""
    extent = Extent(1, rows.stop - rows.start, keys.stop - keys.start, inputs.q.shape[1], inputs.k.shape[1])
    dense = problem._replace(spec=problem.spec._replace(varlen=False), extent=extent)
    q, k, v = inputs.q[None, rows], inputs.k[None, keys], inputs.v[None, keys]
    return dense, Inputs(q, k, v, None, inputs.sinks, inputs.rng_state, first_batch=b)
