"""Attention of rows whose keys come in several calls, and dq: a backend adds the calls up in float32."""

from __future__ import annotations

from torch import Tensor

from .. import backends
from ..problem import CallOptions, Inputs, Problem, Saved
from .impl import backward_of, dense_extent, describe, with_state


class RunningOut:
    """(out, lse) of rows q (B, S, Hq, D), over calls that have some of the rows, and keys of their own."""

    def __init__(self, q: Tensor, Dv: int):
        self._q, self._Dv = q, Dv
        self._served_by = ""
        self._results: backends.RunningOut | None = None

    def add(self, rows: range, k: Tensor, v: Tensor, rng_state: Tensor | None, options: CallOptions) -> bool:
        """Add a call's keys to the results of `rows`.

        False if the backend that serves the call cannot add it; then nothing has happened.
        """
        inputs, problem = _call(self._q, rows, k, v, rng_state, options)
        backend = backends.choose(problem)
        if self._results is None and isinstance(backend, backends.AddsParts):
            self._results, self._served_by = backend.running_out(self._q, self._Dv), backend.name
        if self._results is None or backend.name != self._served_by or self._results.why_not(rows, problem):
            return False
        self._results.add(rows, inputs, problem)
        return True

    def finished(self) -> tuple[Tensor, Tensor] | None:
        """out (B, S, Hq, Dv) and lse (B, Hq, S) in float32, 0 and -inf in rows of no call; None if none
        was added."""
        return None if self._results is None else self._results.finished()


class QueryGradient:
    """dq of rows q (B, S, Hq, D), over calls that have some of the rows, and keys of their own.

    saved: of all rows; out and lse are those of all keys.
    """

    def __init__(self, q: Tensor, saved: Saved):
        self._q, self._saved = q, saved
        self._served_by = ""
        self._sums: backends.DqSums | None = None

    def add(
        self, rows: range, k: Tensor, v: Tensor, rng_state: Tensor | None, options: CallOptions
    ) -> tuple[Tensor, Tensor] | None:
        """Add the share of a call's keys to dq of `rows`, and return (dk, dv).

        None if the backend that serves the call cannot add it; then nothing has happened.
        """
        inputs, forward = _call(self._q, rows, k, v, rng_state, options)
        problem = backward_of(forward, self._saved.dlse)
        backend = backends.choose(problem)
        if self._sums is None and isinstance(backend, backends.AddsParts):
            self._sums, self._served_by = backend.dq_sums(self._q, self._saved, options.scale), backend.name
        if self._sums is None or backend.name != self._served_by or self._sums.why_not(rows, problem):
            return None
        return self._sums.add(rows, inputs, problem)

    def finished(self) -> Tensor | None:
        """dq in q's dtype, of all calls that were added; None if there was none."""
        return None if self._sums is None else self._sums.finished()


def _call(
    q: Tensor, rows: range, k: Tensor, v: Tensor, rng_state: Tensor | None, options: CallOptions
) -> tuple[Inputs, Problem]:
    """A call's tensors and its forward problem."""
    q = q[:, rows.start : rows.stop]
    problem = with_state(describe(q, v.shape[-1], dense_extent(q, k), None, None, options), rng_state)
    return Inputs(q, k, v, rng_state=rng_state), problem
