"""Ways to call the module of section `swap`: its inputs, and what they are to heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .swap_cases import SwapCase

UNBATCHED = "unbatched"
_KEYS_OF_THEIR_OWN = ("cross", "autocast-cross", "apart", "widths")
_AT = {"shared-qk": (0, 0, 1), "cross": (0, 1, 1), "autocast-cross": (0, 1, 1), "apart": (0, 1, 2)}
_AT["widths"] = _AT["apart"]
"""Indices of query, key and value among the inputs; all are the first in other ways."""


def module(case: SwapCase, device: str) -> nn.MultiheadAttention:
    """The stock module of a cell."""
    E = case.size.E
    widths = {"kdim": E // 2, "vdim": E // 4} if case.way == "widths" else {}
    return nn.MultiheadAttention(
        E,
        case.size.H,
        dropout=float(case.dropout),
        batch_first=case.way != "sequence-first",
        device=device,
        dtype=getattr(torch, case.dtype),
        **widths,
    )


def shape_of_weights(case: SwapCase) -> tuple[int, int, int, int]:
    """Sizes of the weights, (B, H, Sq, Sk)."""
    _, H, B, S = case.size
    return 1 if case.way == UNBATCHED else B, H, S, S // 2 if case.way in _KEYS_OF_THEIR_OWN else S


def shapes(case: SwapCase) -> list[tuple[int, ...]]:
    """Sizes of the inputs, each one once."""
    B, _, Sq, Sk = shape_of_weights(case)
    E = case.size.E
    widths = (E, E // 2, E // 4) if case.way == "widths" else (E, E, E)
    found: list[tuple[int, ...]] = []
    for S, width in zip((Sq, Sk, Sk), widths, strict=True):
        rows = {UNBATCHED: (S,), "sequence-first": (S, B)}.get(case.way, (B, S))
        found.append((*rows, width))
    return found[: max(_AT.get(case.way, (0,))) + 1]


def inputs(case: SwapCase, leaves: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value."""
    query, key, value = (leaves[i] for i in _AT.get(case.way, (0, 0, 0)))
    return query, key, value


def heads(case: SwapCase, module: nn.MultiheadAttention, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """q, k and v (B, H, S, D) by plain torch."""
    if module.in_proj_weight is None:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        weights = list(module.in_proj_weight.chunk(3))
    found = []
    for x, weight, bias in zip(inputs(case, leaves), weights, module.in_proj_bias.chunk(3), strict=True):
        rows = _batch_first(case, F.linear(x, weight, bias))
        found.append(rows.unflatten(-1, (module.num_heads, -1)).transpose(1, 2))
    return found


def rows(case: SwapCase, out: Tensor) -> Tensor:
    """out (B, H, S, D) in the layout of the inputs."""
    return _batch_first(case, out.transpose(1, 2).flatten(2), back=True)


def _batch_first(case: SwapCase, x: Tensor, back: bool = False) -> Tensor:
    if case.way == UNBATCHED:
        return x.squeeze(0) if back else x[None]
    return x.transpose(0, 1) if case.way == "sequence-first" else x
