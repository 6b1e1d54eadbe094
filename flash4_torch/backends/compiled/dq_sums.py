"""dQ of some rows, summed up over several backward calls: each has some of the rows, and keys of its own.

The calls share the workspace of one backward over all rows: the preprocess kernel runs once before the first
of them, the main kernels add to the same float32 sums, and the postprocess kernel rounds once, at the end. A
call on some of the rows gets the workspace from their first block on; its kernel finds a head's blocks by
their number in all rows, which the tensors' shapes tell.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...configs.types import Scope
from ...problem import Inputs, Problem, Saved, new_gradient
from . import backward
from .backward import Kernels, Shapes, Workspace
from .running import HasKernels, from_offset, why_not_of_part, with_room
from .tensors import allocator_like, readable, unpad


class _Begun(NamedTuple):
    """The workspace, and the kernels that cleared it and will round dQ."""

    work: Workspace
    kernels: Kernels
    scale: float
    """Scale of the scores: the sums are multiplied by it at last."""


class CompiledDqSums:
    """`base.DqSums` by the kernels of a backend."""

    def __init__(self, backend: HasKernels, q: Tensor, saved: Saved):
        self._backend, self._D = backend, q.shape[-1]
        self._q, self._dout, out = (readable(x) for x in (q, saved.dout, saved.out))
        dlse = None if saved.dlse is None else saved.dlse.contiguous()
        self._saved = saved._replace(dout=self._dout, out=out, lse=saved.lse.contiguous(), dlse=dlse)
        self._begun: _Begun | None = None

    def why_not(self, rows: range, problem: Problem) -> list[str]:
        why = [*why_not_of_part(problem), *self._backend.limits(problem)]
        if why:
            return why
        kernels = self._kernels(problem)
        block = kernels.blocks.queries
        if kernels.config.scope == Scope.KV_HEAD:
            why.append(f"the config has scope {Scope.KV_HEAD}: CTAs round dQ themselves")
        if rows.start % block or (rows.stop % block and rows.stop != self._q.shape[1]):
            limit = f"the kernels' blocks have {block} rows"
            why.append(f"the call's rows are {rows.start} to {rows.stop}, and {limit}")
        if self._begun is not None:
            if problem.scale != self._begun.scale:
                why.append(f"its scale is {problem.scale}, and that of the calls before {self._begun.scale}")
            if _layout(kernels) != _layout(self._begun.kernels):
                why.append("the config sums up dQ in another order than that of the calls before")
        return why

    def add(self, rows: range, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        at, spec, kernels = slice(rows.start, rows.stop), problem.spec, self._kernels(problem)
        inputs = inputs._replace(q=self._q[:, at], k=readable(inputs.k), v=readable(inputs.v))
        shapes = backward.shapes_of(*inputs[:3], None, kernels)
        work = self._work_from(rows.start, inputs, kernels, problem.scale)
        main = backward.main_launch(
            kernels, shapes, spec.dtype, kernels.params, lambda mask: None, allocator_like(self._q)
        )
        saved = self._saved._replace(dout=self._dout[:, at])
        dk, dv = main(inputs, saved, work, None, None, self._backend.counter(self._index))
        return unpad(dk, spec.D), unpad(dv, spec.Dv)

    def finished(self) -> Tensor | None:
        if self._begun is None:
            return None
        work, kernels, scale = self._begun
        if kernels.postprocess is None:
            raise AssertionError("these kernels round dQ themselves")
        dq = new_gradient(self._q)
        kernels.postprocess(work.dq_acc, dq, None, scale, 0)
        return unpad(dq, self._D)

    @property
    def _index(self) -> int:
        return self._q.get_device()

    def _kernels(self, problem: Problem) -> Kernels:
        return self._backend.backward_kernels(problem, self._index)

    def _work_from(self, row: int, inputs: Inputs, kernels: Kernels, scale: float) -> Workspace:
        """The workspace from that row's block on."""
        if self._begun is None:
            shapes = backward.shapes_of(self._q, *inputs[1:3], None, kernels)
            begun = _Begun(_new_workspace(self._q, kernels, shapes), kernels, scale)
            backward.preprocess(kernels, self._saved, None, begun.work)
            self._begun = begun
        elif self._begun.work.dq_semaphore is not None:
            self._begun.work.dq_semaphore.zero_()
        stats, dq_acc, semaphore = self._begun.work
        block = row // kernels.blocks.queries
        return Workspace(
            from_offset(stats, block * kernels.blocks.queries),
            from_offset(dq_acc, block * kernels.blocks.floats),
            None if semaphore is None else from_offset(semaphore, block),
        )


def _layout(kernels: Kernels) -> tuple[object, ...]:
    return kernels.blocks, kernels.is_ordered, kernels.row_stats


def _new_workspace(like: Tensor, kernels: Kernels, shapes: Shapes) -> Workspace:
    """A workspace whose tensors can be taken from any of a head's blocks on."""
    semaphore = with_room(like, shapes.dq_semaphore, torch.int32, 1) if kernels.is_ordered else None
    stats = with_room(like, shapes.stats, torch.float32, 1)
    return Workspace(stats, with_room(like, shapes.dq_acc, torch.float32, 2), semaphore)
