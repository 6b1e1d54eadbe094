"""What a backend is: a name, the reasons why it cannot serve a problem, and the two directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..problem import Inputs, Problem, Saved

OutAndLse = tuple[Tensor, Tensor]


class Results(NamedTuple):
    """What a forward computes."""

    out: Tensor
    lse: Tensor
    lse_low: Tensor | None = None
    """With a floating attn_mask, what rounding has taken from lse: their sum is exact to twice the digits."""


Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""(dq, dk, dv, dmask); dmask only when `Saved.mask_grad` asks for it."""


class Launch(Protocol):
    """A forward with everything decided but the tensors."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rng_state: Tensor | None = None, /) -> OutAndLse: ...


BackwardLaunch = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]
]
"""A backward with everything decided but the tensors: (dout, q, k, v, out, lse, rng_state) to dq, dk, dv."""


ALIGNMENT = 16
"""Bytes; what is prepared serves tensors that lie at multiples of them."""


class Backend(Protocol):
    """Serves attention calls. All results are freshly allocated and contiguous in (B, S, H, D)."""

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences why this backend cannot serve the problem; empty if it can. Looks at no tensor."""
        ...

    def forward(self, inputs: Inputs, problem: Problem) -> Results: ...

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads: ...


@runtime_checkable
class Prepares(Backend, Protocol):
    """A backend that can decide everything about a call once, for `flash4_torch.fast_path`."""

    def prepare(self, inputs: Inputs, problem: Problem) -> Launch | None:
        """What `forward` does for these inputs and all others of their sizes, strides, dtype and device that
        lie at multiples of 16 bytes; None where it depends on more than that."""
        ...

    def prepare_backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> BackwardLaunch | None:
        """The same of `backward`, without a gradient of lse."""
        ...
