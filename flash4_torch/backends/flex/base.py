"""The interface of a backend for programmable attention."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...flex_problem import FlexGradients, FlexInputs, FlexProblem, FlexSaved


class FlexBackend(Protocol):
    """Serves calls whose scores a program changes or masks."""

    name: str

    def why_not(self, problem: FlexProblem) -> list[str]:
        """Sentences why this backend cannot serve the problem; empty if it can. No tensor is examined."""
        ...

    def forward(self, inputs: FlexInputs, problem: FlexProblem) -> tuple[Tensor, Tensor, Tensor]:
        """out (B, Sq, Hq, Dv), lse (B, Hq, Sq), natural, and its rounding error, freshly allocated."""
        ...

    def backward(self, saved: FlexSaved, inputs: FlexInputs, problem: FlexProblem) -> FlexGradients: ...
