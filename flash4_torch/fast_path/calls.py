"""Prepared calls without gradients, and the doors that lead to them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backends import Launch, WeightsLaunch
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

    __slots__ = ("average_heads", "door", "has_dropout", "launch", "weigh")

    def __init__(
        self,
        door: Door,
        launch: Launch,
        weigh: WeightsLaunch | None,
        average_heads: bool,
        options: CallOptions,
    ):
        self.door = door
        self.launch = launch
        self.weigh = weigh
        self.average_heads = average_heads
        self.has_dropout = options.dropout_p > 0.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        out, lse, _, weights = self.run(self.inputs(q, k, v, *others))
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

    def run(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """out, lse, lse_low and the weights, as backends return them."""
        out, lse, low = self.launch(inputs)
        if self.weigh is None:
            return out, lse, low, None
        return out, lse, low, self.weigh(SavedWeights(lse, low, self.average_heads), inputs)
