"""Attention of rows whose keys come in several calls, and dq: a backend adds the calls up in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from .. import backends
from ..problem import CallOptions, Inputs, Problem, Saved
from .impl import backward_of, describe_inputs

Sums = TypeVar("Sums", backends.RunningOut, backends.DqSums)


class _Parts(Generic[Sums]):
    """Sums of the backend that serves the first call."""

    def __init__(self, begin: Callable[[backends.AddsParts], Sums]):
        self._begin: Callable[[backends.AddsParts], Sums] = begin
        self._backend: backends.Backend | None = None
        self._sums: Sums | None = None

    def of(self, rows: range, problem: Problem) -> tuple[Sums | None, list[str]]:
        """The sums that a call can be added to; else the reasons why not."""
        backend = backends.first(problem)
        if self._sums is None or self._backend is None:
            if not isinstance(backend, backends.AddsParts):
                return None, [f"{backend.name} serves the call, and adds no calls up"]
            self._sums, self._backend = self._begin(backend), backend
        if backend is not self._backend:
            return None, [f"{backend.name} serves the call, and {self._backend.name} those before it"]
        why = self._sums.why_not(rows, problem)
        return (None if why else self._sums), why

    def to_add(self, rows: range, problem: Problem) -> Sums | None:
        """The sums that a call is added to now, which is announced."""
        sums, _ = self.of(rows, problem)
        if sums is not None and self._backend is not None:
            backends.announce(problem, self._backend)
        return sums

    @property
    def begun(self) -> Sums | None:
        return self._sums


class RunningOut:
    """(out, lse) of rows q (B, S, Hq, D), over calls that have some of the rows, and keys of their own."""

    def __init__(self, q: Tensor, Dv: int):
        self._q = q
        self._parts = _Parts[backends.RunningOut](lambda backend: backend.running_out(q, Dv))

    def add(self, rows: range, k: Tensor, v: Tensor, rng_state: Tensor | None, options: CallOptions) -> bool:
        """Add a call's keys to the results of `rows`.

        False if the backend that serves the call cannot add it; then nothing has happened.
        """
        inputs, problem = _call(self._q, rows, k, v, rng_state, options)
        results = self._parts.to_add(rows, problem)
        if results is not None:
            results.add(rows, inputs, problem)
        return results is not None

    def why_not(
        self, rows: range, k: Tensor, v: Tensor, rng_state: Tensor | None, options: CallOptions
    ) -> list[str]:
        """Sentences why `add` would return False; empty if it would not."""
        return self._parts.of(rows, _call(self._q, rows, k, v, rng_state, options)[1])[1]

    def finished(self) -> tuple[Tensor, Tensor] | None:
        """out (B, S, Hq, Dv) and lse (B, Hq, S) in float32, 0 and -inf in rows of no call; None if none was
        added."""
        begun = self._parts.begun
        return None if begun is None else begun.finished()


class QueryGradient:
    """dq of rows q (B, S, Hq, D), over calls that have some of the rows, and keys of their own.

    saved: of all rows; out and lse are those of all keys.
    """

    def __init__(self, q: Tensor, saved: Saved):
        self._q, self._saved = q, saved
        self._parts = _Parts[backends.DqSums](lambda backend: backend.dq_sums(q, saved))

    def add(
        self, rows: range, k: Tensor, v: Tensor, rng_state: Tensor | None, options: CallOptions
    ) -> tuple[Tensor, Tensor] | None:
        """Add the share of a call's keys to dq of `rows`, and return (dk, dv).

        None if the backend that serves the call cannot add it; then nothing has happened.
        """
        inputs, problem = self._call(rows, k, v, rng_state, options)
        sums = self._parts.to_add(rows, problem)
        return None if sums is None else sums.add(rows, inputs, problem)

    def why_not(
        self, rows: range, k: Tensor, v: Tensor, rng_state: Tensor | None, options: CallOptions
    ) -> list[str]:
        """Sentences why `add` would return None; empty if it would not."""
        return self._parts.of(rows, self._call(rows, k, v, rng_state, options)[1])[1]

    def finished(self) -> Tensor | None:
        """dq in q's dtype, of all calls that were added; None if there was none."""
        begun = self._parts.begun
        return None if begun is None else begun.finished()

    def _call(
        self, rows: range, k: Tensor, v: Tensor, rng_state: Tensor | None, options: CallOptions
    ) -> tuple[Inputs, Problem]:
        inputs, forward = _call(self._q, rows, k, v, rng_state, options)
        return inputs, backward_of(forward, self._saved.dlse)


def _call(
    q: Tensor, rows: range, k: Tensor, v: Tensor, rng_state: Tensor | None, options: CallOptions
) -> tuple[Inputs, Problem]:
    """A call's tensors and its forward problem."""
    inputs = Inputs(q[:, rows.start : rows.stop], k, v, rng_state=rng_state)
    return inputs, describe_inputs(inputs, options)
