"""What a backend is: a name, the reasons why it cannot serve a problem, and the two directions."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..problem import Inputs, Problem, Saved

Results = tuple[Tensor, Tensor]
"""(out, lse)"""

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""(dq, dk, dv, dmask); dmask only when `Saved.mask_grad` asks for it."""


class Backend(Protocol):
    """Serves attention calls. All results are freshly allocated and contiguous in (B, S, H, D)."""

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences why this backend cannot serve the problem; empty if it can. Looks at no tensor."""
        ...

    def forward(self, inputs: Inputs, problem: Problem) -> Results: ...

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads: ...
