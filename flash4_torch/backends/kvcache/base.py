"""The interface of a backend for attention over a KV cache."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...kvcache_problem import CacheInputs, CacheProblem


class CacheBackend(Protocol):
    """Serves attention calls over KV caches."""

    name: str

    def why_not(self, problem: CacheProblem) -> list[str]:
        """Sentences why this backend cannot serve the problem; empty if it can. No tensor is examined."""
        ...

    def attend(self, inputs: CacheInputs, problem: CacheProblem, out: Tensor, lse: Tensor) -> None:
        """Write out (T, Hq, Dv), any strides, and lse (Hq, T), contiguous, float32.

        Rows of no sequence keep what they have or get anything. No host waits for a GPU's lengths.
        """
        ...
