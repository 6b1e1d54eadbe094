"""The gradient of queries whose keys come in several backward calls, summed up by a backend in float32."""

from __future__ import annotations

from torch import Tensor

from .. import backends
from ..problem import CallOptions, Inputs, Saved
from .impl import backward_of, dense_extent, describe, with_state


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

        None if the backend that serves the call adds to no sums; then nothing has happened.
        """
        q = self._q[:, rows.start : rows.stop]
        forward = describe(q, v.shape[-1], dense_extent(q, k), None, None, options)
        problem = backward_of(with_state(forward, rng_state), self._saved.dlse)
        backend = backends.choose(problem)
        if self._sums is None and isinstance(backend, backends.SumsDq):
            self._sums = backend.dq_sums(self._q, self._saved, options.scale)
            self._served_by = backend.name
        if self._sums is None or backend.name != self._served_by or self._sums.why_not(rows, problem):
            return None
        return self._sums.add(rows, Inputs(q, k, v, rng_state=rng_state), problem)

    def finished(self) -> Tensor | None:
        """dq in q's dtype, of all calls that were added; None if there was none."""
        return None if self._sums is None else self._sums.finished()
