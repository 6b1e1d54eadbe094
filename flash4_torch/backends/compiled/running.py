"""Running results: float32 out and lse of some rows, to which calls on further keys add in their epilogue."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from ...problem import Inputs, Problem
from ..base import Results
from . import backward, forward
from .tensors import padded, readable

_WIDEST = 256


class HasKernels(Protocol):
    """What calls on parts of the keys need of a backend."""

    def limits(self, problem: Problem) -> tuple[str, ...]: ...

    def kernel(self, problem: Problem, index: int) -> forward.Kernel: ...

    def backward_kernels(self, problem: Problem, index: int) -> backward.Kernels: ...

    def counter(self, index: int) -> Tensor: ...


class CompiledRunningOut:
    """`base.RunningOut` by the kernels of a backend.

    Rows that no call has had yet are not initialised; the first call on them writes them.
    """

    def __init__(self, backend: HasKernels, q: Tensor, Dv: int):
        self._backend, self._Dv, self._q = backend, Dv, readable(q)
        self._fresh = [range(q.shape[1])]
        self._results: Results | None = None

    def why_not(self, rows: range, problem: Problem) -> list[str]:
        why, spec = why_not_of_part(problem), problem.spec
        if max(spec.D, spec.Dv) > _WIDEST:
            why.append(f"D is {spec.D} and Dv is {spec.Dv}, and running results have up to {_WIDEST}")
        return why or list(self._backend.limits(_with_running(problem, "add")))

    def add(self, rows: range, inputs: Inputs, problem: Problem) -> None:
        if self._results is None:
            self._results = self._new_results()
        fresh = [common for span in self._fresh if (common := _common(span, rows))]
        is_first = fresh == [rows]
        if not is_first:
            _clear(self._results, fresh)
        self._fresh = _without(self._fresh, rows)
        problem = _with_running(problem, "begin" if is_first else "add")
        index, at = self._q.get_device(), slice(rows.start, rows.stop)
        kernel = self._backend.kernel(problem, index)
        inputs = inputs._replace(q=self._q[:, at], k=readable(inputs.k), v=readable(inputs.v))
        results = Results(self._results.out[:, at], from_offset(self._results.lse, rows.start))
        forward.run(kernel.function, inputs, results, self._backend.counter(index), None, kernel.params)

    def finished(self) -> tuple[Tensor, Tensor] | None:
        if self._results is None:
            return None
        _clear(self._results, self._fresh)
        return self._results.out[..., : self._Dv], self._results.lse

    def _new_results(self) -> Results:
        B, S, Hq, _ = self._q.shape
        out = self._q.new_empty((B, S, Hq, padded(self._Dv)), dtype=torch.float32)
        return Results(out, with_room(self._q, (B, Hq, S), torch.float32, 1))


def _clear(results: Results, parts: list[range]) -> None:
    """Write what rows are that see nothing."""
    for part in parts:
        results.out[:, part.start : part.stop] = 0.0
        results.lse[..., part.start : part.stop] = -math.inf


def why_not_of_part(problem: Problem) -> list[str]:
    """The reasons why a call cannot be one of several on the same rows."""
    spec = problem.spec
    if spec.varlen or spec.mask or spec.sinks or 0 in problem.extent:
        return ["parts are dense calls that have keys, without attn_mask and sinks"]
    return []


def with_room(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, dims: int) -> Tensor:
    """A new tensor, in a storage that has room behind it for once more its last `dims` dimensions."""
    count, room = math.prod(shape), math.prod(shape[-dims:])
    return like.new_empty(count + room, dtype=dtype)[:count].view(shape)


def from_offset(x: Tensor, offset: int) -> Tensor:
    """The tensor `offset` elements on, in the same shape: kernels find rows by the whole tensor's sizes."""
    return x if not offset else x.as_strided(x.shape, x.stride(), x.storage_offset() + offset)


def _with_running(problem: Problem, running: str) -> Problem:
    return problem._replace(spec=problem.spec._replace(running=running))


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _without(spans: list[range], rows: range) -> list[range]:
    """What is left of disjoint spans without some rows."""
    left = [
        piece
        for span in spans
        for piece in (
            range(span.start, min(span.stop, rows.start)),
            range(max(span.start, rows.stop), span.stop),
        )
    ]
    return [piece for piece in left if piece]
