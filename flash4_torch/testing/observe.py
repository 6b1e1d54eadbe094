"""Observers of calls: which backend served them, and whether they wrote everything they allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from .. import backends
from ..flex_problem import FlexProblem
from ..problem import Problem

# A module whose attributes are properties, which a type checker cannot see.
_deterministic: Any = torch.utils.deterministic


@contextmanager
def backends_used() -> Iterator[Counter[tuple[str, str]]]:
    """Counts, while open, every served call as (operator, backend name), autograd's threads included.

    Operators are 'attention', 'attention_varlen', 'flex_attention' and these with '_backward'.
    Calls around KV caches are not counted. Compiled graphs for a CPU may hold torch's own operator, for which
    nobody chooses a backend: it is not counted.
    """
    used: Counter[tuple[str, str]] = Counter()

    def observe(problem: Problem | FlexProblem, name: str) -> None:
        operator = "flex_attention"
        if isinstance(problem, Problem):
            operator = "attention_varlen" if problem.spec.varlen else "attention"
        used[operator + ("_backward" if problem.spec.backward else ""), name] += 1

    backends.observers.append(observe)
    try:
        yield used
    finally:
        backends.observers.remove(observe)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """While open, fresh uninitialised tensors hold NaN (integers: their maximum), so unwritten results show.

    Torch does this as part of deterministic algorithms, which are therefore on inside, as warnings only; pass
    `deterministic=False` to test the default gradients.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = _deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    _deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        _deterministic.fill_uninitialized_memory = filled
