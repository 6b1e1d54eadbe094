"""The interface of a backend for programmable attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ...flex_problem import FlexGradients, FlexInputs, FlexProblem, FlexSaved
from ..base import Order

FlexLaunch = Callable[..., tuple[Any, ...]]
"""A prepared forward: (out, lse, low) of q, k, v and the captured tensors. low, the rounding error of lse, is
None where the backward does not need it."""
FlexBackwardLaunch = Callable[..., tuple[Any, ...]]
"""A prepared backward: (dq, dk, dv, dcaptured) of dout, out, lse, low, q, k, v and the captured tensors."""


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


@runtime_checkable
class PreparesFlex(FlexBackend, Protocol):
    """A backend that can decide everything about a call in advance, for `flash4_torch.fast_path`."""

    def prepare(self, inputs: FlexInputs, problem: FlexProblem, order: Order) -> FlexLaunch | None:
        """`forward`, prepared for calls with the block mask and the scalars of `inputs`; None if it
        depends on more.

        Their tensors have the sizes, strides, dtypes and device of these, and q, k and v lie at multiples of
        16 bytes; with a block mask, mask_mod's tensors also have the values of these. `order` is that of the
        launch's tensors; `inputs` has views (B, S, H, D) of such."""
        ...

    def prepare_backward(
        self, saved: FlexSaved, inputs: FlexInputs, problem: FlexProblem, order: Order
    ) -> FlexBackwardLaunch | None:
        """`backward`, prepared in the same way, without a gradient of lse, after prepared forwards."""
        ...
