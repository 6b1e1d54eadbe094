"""The interface of a backend for attention over a KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from ...kvcache_problem import CacheInputs, CacheProblem

CacheLaunch = Callable[[CacheInputs, Tensor | None], tuple[Tensor, Tensor]]
"""A prepared call: everything is decided except the tensors."""


class CacheBackend(Protocol):
    """Serves attention calls over KV caches."""

    name: str

    def why_not(self, problem: CacheProblem) -> list[str]:
        """Sentences why this backend cannot serve the problem; empty if it can. No tensor is examined."""
        ...

    def attend(self, inputs: CacheInputs, problem: CacheProblem, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """out (T, Hq, Dv) and lse (Hq, T), float32 or float64; `out` of any strides is written to if given.

        Rows of no sequence keep what `out` has there; without it, they may be anything. No host waits for a
        GPU's lengths.
        """
        ...


@runtime_checkable
class PreparesCache(CacheBackend, Protocol):
    """A backend that can decide everything about a call in advance, for `flash4_torch.fast_path.kvcache`."""

    def prepare(self, inputs: CacheInputs, problem: CacheProblem, out: Tensor | None) -> CacheLaunch | None:
        """`attend`, prepared for tensors of the sizes, strides, dtypes, device and remainder of the address
        by 16 of these; None if it depends on more. Of the sizes, tokens, columns of the table and their
        strides may be others."""
        ...
