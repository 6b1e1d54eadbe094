"""The interface of a backend: a name, the reasons why it cannot serve a problem, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..problem import Inputs, Problem, Saved, SavedWeights
from ..reference.weights import WeightsGradients
from .scoring import known_low
from .views import Layout


class Results(NamedTuple):
    """Results of a forward."""

    out: Tensor
    lse: Tensor
    lse_low: Tensor | None = None
    """Rounding error of lse, with a floating attn_mask: lse + lse_low is exact to twice the digits. From a
    launch it may be None; `scoring.known_low` knows what that says."""
    weights: Tensor | None = None
    """Attention weights, if the launch was prepared with them."""


class Grads(NamedTuple):
    """Results of a backward."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dmask: Tensor | None = None
    """Only if `Saved.mask_grad` requests it."""
    dsinks: Tensor | None = None
    """Only with sinks."""


Launch = Callable[..., tuple[Any, ...]]
"""A prepared forward: everything is decided except the tensors. It takes those of `Inputs` one by one, of
which those after v may be left out, and returns the fields of `Results` in a plain tuple.

attn_mask comes as the caller has it, with up to four dimensions."""
BackwardLaunch = Callable[..., tuple[Any, ...]]
"""A prepared backward: (dq, dk, dv, dsinks) of dout, out, lse, lse_low and those of `Inputs`, one by one."""
WeightsLaunch = Callable[[SavedWeights, Inputs], Tensor]
"""Prepared attention weights."""


class Order(NamedTuple):
    """The order of dimensions of a launch's tensors."""

    heads_first: bool = False
    """q, k, v and their gradients are (B, H, S, D)."""
    out_heads_first: bool = False
    """out and its gradient are (B, Hq, Sq, Dv)."""


SEQUENCE_FIRST = Order()

ALIGNMENT = 16
"""Bytes; prepared launches serve tensors whose addresses are multiples of it."""


class Backend(Protocol):
    """Serves attention calls. All results are freshly allocated and contiguous in (B, S, H, D)."""

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """Sentences why this backend cannot serve the problem; empty if it can. No tensor is examined."""
        ...

    def forward(self, inputs: Inputs, problem: Problem) -> Results: ...

    def backward(self, saved: Saved, inputs: Inputs, problem: Problem) -> Grads: ...

    def weights(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> Tensor:
        """The attention weights after dropout, in q's dtype; v is not read."""
        ...

    def weights_backward(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> WeightsGradients: ...


class WithoutWeights:
    """Base of backends that compute no attention weights; their `why_not` says so."""

    def weights(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> Tensor:
        raise AssertionError("it is not chosen for weights")

    def weights_backward(self, saved: SavedWeights, inputs: Inputs, problem: Problem) -> WeightsGradients:
        raise AssertionError("it is not chosen for weights")


@runtime_checkable
class Explains(Protocol):
    """A backend that chooses among configs of kernels."""

    def explain(self, problem: Problem) -> list[str]:
        """Lines that say how it serves the problem."""
        ...


@runtime_checkable
class Prepares(Backend, Protocol):
    """A backend that can decide everything about a call in advance, for `flash4_torch.fast_path`."""

    def prepare(self, inputs: Inputs, problem: Problem, order: Order = SEQUENCE_FIRST) -> Launch | None:
        """`forward`, prepared for all inputs of the sizes, strides, dtype and device of these, if their q, k
        and v lie at multiples of 16 bytes; None if it depends on more.

        `order` is that of the launch's tensors; `inputs` has views (B, S, H, D) of such."""
        ...

    def prepare_backward(
        self, saved: Saved, inputs: Inputs, problem: Problem, order: Order = SEQUENCE_FIRST
    ) -> BackwardLaunch | None:
        """`backward`, prepared in the same way, without a gradient of lse or of the mask."""
        ...

    def prepare_weights(self, inputs: Inputs, problem: Problem, average_heads: bool) -> WeightsLaunch | None:
        """`weights`, prepared in the same way."""
        ...


@runtime_checkable
class Shares(Prepares, Protocol):
    """A backend that can compute output and weights in one go."""

    def prepare_both(self, inputs: Inputs, problem: Problem, average_heads: bool) -> Launch | None:
        """`forward` and `weights`, prepared in the same way; None if they take turns."""
        ...


class RunningOut(Protocol):
    """out and lse of q (B, S, Hq, D) in float32, over forward calls on keys of their own.

    Each call has some of the rows.
    """

    def why_not(self, rows: range, problem: Problem) -> list[str]:
        """Sentences why a call on `rows` of q cannot add to the results; empty if it can."""
        ...

    def add(self, rows: range, inputs: Inputs, problem: Problem) -> None:
        """Merge a call's results with those of calls before it. k and v are the call's; q is not read."""
        ...

    def finished(self) -> tuple[Tensor, Tensor] | None:
        """out (B, S, Hq, Dv) and lse (B, Hq, S), float32, 0 and -inf in rows of no call; None if nothing was
        added. The last method called."""
        ...


class DqSums(Protocol):
    """dQ of q (B, S, Hq, D), summed up in float32 over backward calls that each have some of the rows."""

    def why_not(self, rows: range, problem: Problem) -> list[str]:
        """Sentences why a call on `rows` of q cannot add to the sums; empty if it can."""
        ...

    def add(self, rows: range, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        """Add a call's share, and return its (dk, dv) in k's dtype. k and v are the call's; q is not read."""
        ...

    def finished(self) -> Tensor | None:
        """dq in q's dtype; None if nothing was added. The last method called."""
        ...


@runtime_checkable
class AddsParts(Backend, Protocol):
    """A backend whose kernels can add to results of calls before theirs, on the same rows and other keys."""

    def running_out(self, q: Tensor, Dv: int) -> RunningOut: ...

    def dq_sums(self, q: Tensor, saved: Saved) -> DqSums:
        """`saved` is of all rows and all keys."""
        ...


class Views(NamedTuple):
    """Makes the `Inputs` of a launch's tensors."""

    qkv: tuple[Layout, Layout, Layout] | None
    """None if q, k and v are as in `Inputs`."""
    mask: Layout | None

    @classmethod
    def of(cls, inputs: Inputs, order: Order) -> Views:
        q, k, v, mask, *_ = inputs
        qkv = (Layout.of(q), Layout.of(k), Layout.of(v)) if order.heads_first else None
        return cls(qkv, None if mask is None else Layout.of(mask))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *others: Any
    ) -> Inputs:
        if self.qkv is not None:
            q, k, v = (layout.view(x) for layout, x in zip(self.qkv, (q, k, v), strict=True))
        if attn_mask is not None and self.mask is not None:
            attn_mask = self.mask.view(attn_mask)
        return Inputs(q, k, v, attn_mask, *others)


class CallsTorch:
    """Base of backends made of calls into torch: nothing about a call can be decided in advance."""

    forward: Callable[..., Results]
    backward: Callable[..., Grads]

    def prepare(self, inputs: Inputs, problem: Problem, order: Order = SEQUENCE_FIRST) -> Launch | None:
        if problem.spec.varlen:
            # The values of cumulative lengths are checked in every call.
            return None
        seen = Views.of(inputs, order)

        def launch(*tensors: Any) -> tuple[Any, ...]:
            out, *others = self.forward(seen(*tensors), problem)
            return out.transpose(1, 2) if order.out_heads_first else out, *others

        return launch

    def prepare_backward(
        self, saved: Saved, inputs: Inputs, problem: Problem, order: Order = SEQUENCE_FIRST
    ) -> BackwardLaunch | None:
        seen = Views.of(inputs, order)

        def launch(
            dout: Tensor, out: Tensor, lse: Tensor, low: Tensor | None, *tensors: Any
        ) -> tuple[Any, ...]:
            if order.out_heads_first:
                dout, out = dout.transpose(1, 2), out.transpose(1, 2)
            inputs = seen(*tensors)
            low = known_low(low, lse, inputs, problem)
            found = self.backward(Saved(dout, None, out, lse, False, low), inputs, problem)
            dq, dk, dv = (x.transpose(1, 2) if order.heads_first else x for x in found[:3])
            return dq, dk, dv, found.dsinks

        return launch

    def prepare_weights(self, inputs: Inputs, problem: Problem, average_heads: bool) -> WeightsLaunch | None:
        return None
