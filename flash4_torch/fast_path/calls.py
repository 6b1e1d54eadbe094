"""Prepared calls without gradients, and the doors that lead to them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backends.base import Launch, Results, WeightsLaunch
from ..backends.views import Layout
from ..ops import draw_rng_state
from ..problem import CallOptions, Inputs, SavedWeights


class Door(NamedTuple):
    """A function that takes the fast path: how it lays out tensors, and what it returns."""

    name: str
    heads_first: bool = False
    """q, k and v are (B, H, S, D)."""
    out_heads_first: bool = False
    """The output is (B, Hq, Sq, Dv)."""
    varlen: bool = False
    """q, k and v are packed, and the other tensors are both cu_seqlens and the sinks."""


class FastCall:
    """The calls of one signature.

    It is called with q, k, v, an attn_mask and sinks, or for a varlen door with q, k, v, both cu_seqlens and
    sinks; it returns (out, lse), or (out, lse, weights).

    inputs: tensors of such a call, as backends take them.
    """

    __slots__ = ("device", "door", "has_dropout", "k", "launch", "mask", "q", "v")
    is_recorded = False
    """Whether autograd records the call."""

    def __init__(self, door: Door, launch: Launch, options: CallOptions, inputs: Inputs):
        self.door = door
        self.launch = launch
        self.has_dropout = options.dropout_p > 0.0
        self.device = inputs.q.device
        self.q, self.k, self.v = map(Layout.of, inputs[:3])
        self.mask = None if inputs.attn_mask is None else Layout.of(inputs.attn_mask)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        out, lse, _, weights = self.launch(self.inputs(self.rng_state(), q, k, v, *others))
        if self.door.out_heads_first:
            out = out.transpose(1, 2)
        return (out, lse) if weights is None else (out, lse, weights)

    def rng_state(self) -> Tensor | None:
        """A fresh RNG state, if the call needs one."""
        return draw_rng_state(self.device) if self.has_dropout else None

    def inputs(
        self, rng_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None
    ) -> Inputs:
        """The call's tensors as backends take them."""
        door = self.door
        if door.varlen:
            cu_seqlens_q, cu_seqlens_k, sinks = others
            return Inputs(q, k, v, None, sinks, rng_state, cu_seqlens_q, cu_seqlens_k)
        mask, sinks = others
        if mask is not None and self.mask is not None:
            mask = self.mask.view(mask)
        if door.heads_first:
            q, k, v = self.q.view(q), self.k.view(k), self.v.view(v)
        return Inputs(q, k, v, mask, sinks, rng_state)


class HeadsFirstCall(FastCall):
    """The calls of one signature, whose launch takes q, k and v (B, H, S, D), and returns out as such."""

    __slots__ = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        mask, sinks = others
        if mask is not None and self.mask is not None:
            mask = self.mask.view(mask)
        out, lse, *_ = self.launch(Inputs(q, k, v, mask, sinks, self.rng_state()))
        return out, lse


def in_turn(forward: Launch, weigh: WeightsLaunch, average_heads: bool) -> Launch:
    """A launch of output and weights, one after the other."""

    def launch(inputs: Inputs) -> Results:
        out, lse, low, _ = forward(inputs)
        return Results(out, lse, low, weigh(SavedWeights(lse, low, average_heads), inputs))

    return launch
