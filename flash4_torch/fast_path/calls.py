"""Prepared calls without gradients, and the doors that lead to them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backends.base import Launch, Results, WeightsLaunch
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
    """

    __slots__ = ("door", "has_dropout", "launch")

    def __init__(self, door: Door, launch: Launch, options: CallOptions):
        self.door = door
        self.launch = launch
        self.has_dropout = options.dropout_p > 0.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        out, lse, _, weights = self.launch(self.inputs(q, k, v, *others))
        if self.door.out_heads_first:
            out = out.transpose(1, 2)
        return (out, lse) if weights is None else (out, lse, weights)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Inputs:
        """The tensors as backends take them, with a fresh RNG state."""
        rng_state = draw_rng_state(q.device) if self.has_dropout else None
        door = self.door
        if door.varlen:
            cu_seqlens_q, cu_seqlens_k, sinks = others
            return Inputs(q, k, v, None, sinks, rng_state, cu_seqlens_q, cu_seqlens_k)
        mask, sinks = others
        if mask is not None and mask.dim() < 4:
            mask = mask[(None,) * (4 - mask.dim())]
        if door.heads_first:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return Inputs(q, k, v, mask, sinks, rng_state)


def in_turn(forward: Launch, weigh: WeightsLaunch, average_heads: bool) -> Launch:
    """A launch of output and weights, one after the other."""

    def launch(inputs: Inputs) -> Results:
        out, lse, low, _ = forward(inputs)
        return Results(out, lse, low, weigh(SavedWeights(lse, low, average_heads), inputs))

    return launch
