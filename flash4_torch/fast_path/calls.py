"""Prepared calls without gradients, and the doors that lead to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ..backends.base import SEQUENCE_FIRST, Launch, Order, Views, WeightsLaunch
from ..ops import draw_rng_state
from ..problem import CallOptions, Inputs, SavedWeights

Run = Callable[..., Any]
"""Serves a call of q, k, v, attn_mask and sinks; a varlen door has both cu_seqlens instead of the mask."""


@dataclass(frozen=True, eq=False, slots=True)
class Door:
    """A function that takes the fast path, and how it lays out tensors. Each is equal to itself alone."""

    name: str
    order: Order = SEQUENCE_FIRST
    varlen: bool = False
    """q, k and v are packed, and the other tensors are both cu_seqlens and the sinks."""


class Returned(NamedTuple):
    """What a call returns besides out."""

    lse: bool = True
    average_heads: bool | None = None
    """None if the call does not return weights."""


class FastCall:
    """The calls of one signature: `run` returns out, (out, lse), or (out, lse, weights)."""

    __slots__ = ("draw", "launch", "run")
    is_recorded = False
    """Whether autograd records the call."""

    def __init__(self, door: Door, launch: Launch, options: CallOptions, inputs: Inputs, returned: Returned):
        self.launch = launch
        self.draw = partial(draw_rng_state, inputs.q.device) if options.dropout_p > 0.0 else _no_state
        self.run = (_varlen_run if door.varlen else _dense_run)(launch, self.draw, returned)


def _no_state() -> None:
    return None


def _dense_run(launch: Launch, draw: Callable[[], Tensor | None], returned: Returned) -> Run:
    has_lse, has_weights = returned.lse, returned.average_heads is not None

    def run(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, sinks: Tensor | None) -> Any:
        out, lse, _, weights = launch(q, k, v, attn_mask, sinks, draw())
        if not has_lse:
            return out
        lse = lse.contiguous()  # torch's kernel for CPUs leaves it as (B, S, H)
        return (out, lse, weights) if has_weights else (out, lse)

    return run


def _varlen_run(launch: Launch, draw: Callable[[], Tensor | None], returned: Returned) -> Run:
    has_lse = returned.lse

    def run(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, sinks: Tensor | None
    ) -> Any:
        out, lse, *_ = launch(q, k, v, None, sinks, draw(), cu_seqlens_q, cu_seqlens_k)
        return (out, lse) if has_lse else out

    return run


def forward_then_weights(
    forward: Launch, weights: WeightsLaunch, inputs: Inputs, average_heads: bool
) -> Launch:
    """A launch of output and weights, one after the other."""
    seen = Views.of(inputs, SEQUENCE_FIRST)

    def launch(*tensors: Any) -> tuple[Any, ...]:
        out, lse, low, _ = forward(*tensors)
        return out, lse, low, weights(SavedWeights(lse, low, average_heads), seen(*tensors))

    return launch
