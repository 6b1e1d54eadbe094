"""The features of attention, each as a pair of calls on the same inputs: ours, and torch's equivalent.

Sections `features` (time) and `memory` share them. To add a feature, add a row to FEATURES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import api

SOFTCAP = 20.0
DROPOUT_P = 0.1


@dataclass(frozen=True)
class Shape:
    """Sizes of q (B, S, H, D), k and v (B, S, Hk, D); Hk 0 means H."""

    B: int
    S: int
    H: int
    D: int
    Hk: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=self.dtype, device=self.device)

    def positions(self) -> Tensor:
        return torch.arange(self.S, device=self.device)


class Pair(NamedTuple):
    """Two calls that return (B, S, H, D), or packed (T, H, D), and the tensors to differentiate them by."""

    inputs: tuple[Tensor, ...]
    flash4: Callable[[], Tensor]
    torch: Callable[[], Tensor]


def forward(attend: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return attend()


def step(attend: Callable[[], Tensor], inputs: tuple[Tensor, ...], dout: Tensor) -> Any:
    """Forward and backward; returns output and gradients."""
    out = attend()
    return out, torch.autograd.grad(out, inputs, dout)


def _dense(shape: Shape, flash4: dict[str, Any], torch_: dict[str, Any]) -> Pair:
    q = shape.randn(shape.B, shape.S, shape.H, shape.D).requires_grad_()
    k, v = (shape.randn(shape.B, shape.S, shape.Hk or shape.H, shape.D).requires_grad_() for _ in range(2))
    return Pair(
        (q, k, v),
        lambda: api.attention(q, k, v, **flash4),
        lambda: _sdpa(q, k, v, **torch_),
    )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def _window(shape: Shape) -> Pair:
    size = max(1, shape.S // 16)

    @cache
    def mask() -> Tensor:
        distance = shape.positions()[:, None] - shape.positions()
        return (distance >= 0) & (distance <= size)

    pair = _dense(shape, {"window": (size, 0)}, {})
    return pair._replace(torch=lambda: _sdpa(*pair.inputs, attn_mask=mask()))


def _softcap(shape: Shape) -> Pair:
    pair = _dense(shape, {"softcap": SOFTCAP}, {})
    return pair._replace(torch=lambda: _capped(*pair.inputs))


def _capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softcap by its definition, as torch's SDPA has none."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 / SOFTCAP)) * SOFTCAP
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def _padding(shape: Shape) -> Pair:
    mask = {"attn_mask": (shape.positions() < shape.S - shape.S // 8)[None, None, None]}
    return _dense(shape, mask, mask)


def _slopes(shape: Shape) -> Pair:
    mask = {"attn_mask": shape.randn(1, shape.H, 1, shape.S)}
    return _dense(shape, mask, mask)


def _dropout(shape: Shape) -> Pair:
    return _dense(shape, {"dropout_p": DROPOUT_P}, {"dropout_p": DROPOUT_P})


def _gqa(shape: Shape) -> Pair:
    return _dense(replace(shape, Hk=shape.H // 2), {}, {"enable_gqa": True})


def _varlen(shape: Shape) -> Pair:
    """Four sequences of different lengths, B * S tokens in all; torch gets them one by one."""
    T = shape.B * shape.S
    return _packed(shape, [0, T // 2, T // 2 + T // 4, T // 2 + T // 4 + T // 8, T])


def _varlen_of_equals(shape: Shape) -> Pair:
    """The sequences of a dense call, packed; torch gets them as the dense call."""
    pair = _packed(shape, [b * shape.S for b in range(shape.B + 1)])
    dense = (shape.B, shape.S, shape.H, shape.D)
    return pair._replace(torch=lambda: _sdpa(*(x.view(dense) for x in pair.inputs)).flatten(0, 1))


def _packed(shape: Shape, ends: list[int]) -> Pair:
    longest = max(b - a for a, b in pairwise(ends))
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=shape.device)
    q, k, v = (shape.randn(ends[-1], shape.H, shape.D).requires_grad_() for _ in range(3))
    return Pair(
        (q, k, v),
        lambda: api.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        ),
        lambda: torch.cat([_sdpa(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in pairwise(ends)]),
    )


FEATURES: dict[str, Callable[[Shape], Pair]] = {
    "plain": lambda shape: _dense(shape, {}, {}),
    "causal": lambda shape: _dense(shape, {"causal": True}, {"is_causal": True}),
    "window": _window,
    "softcap": _softcap,
    "bool mask": _padding,
    "float mask": _slopes,
    "dropout": _dropout,
    "gqa": _gqa,
    "varlen": _varlen,
    "varlen of equals": _varlen_of_equals,
}
