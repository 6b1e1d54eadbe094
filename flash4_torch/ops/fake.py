"""Shapes, dtypes and strides of the operators' results, for tracing and FakeTensors; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem import has_float_mask, new_gradient
from ..reference.scoring import working_dtype
from .schema import LIBRARY


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    B, Sq, Hq, _ = q.shape
    lse = q.new_empty(B, Hq, Sq, dtype=working_dtype(q.dtype))
    low = lse.new_empty(B, Hq, Sq if has_float_mask(attn_mask) else 0)
    return q.new_empty(B, Sq, Hq, v.shape[3]), lse, low


def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return (
        new_gradient(q),
        new_gradient(k),
        new_gradient(v),
        _mask_like(q, attn_mask, rest[-1]),
        _sinks_like(q, sinks),
    )


def _attention_and_weights(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, *rest: Any) -> Any:
    out, lse, _ = _attention(q, k, v, attn_mask)
    return out, lse, _attention_weights(q, k, *rest)


def _attention_varlen(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    Tq, Hq, _ = q.shape
    return q.new_empty(Tq, Hq, v.shape[2]), q.new_empty(Hq, Tq, dtype=working_dtype(q.dtype))


def _attention_varlen_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return new_gradient(q), new_gradient(k), new_gradient(v), _sinks_like(q, sinks)


def _attention_weights(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    average_heads = rest[-1]
    B, Sq, Hq, _ = q.shape
    Sk = k.shape[1]
    return q.new_empty((B, Sq, Sk) if average_heads else (B, Hq, Sq, Sk))


def _attention_weights_signed(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return _attention_weights(q, k, False)


def _attention_weights_backward(
    dweights: Tensor,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lse_low: Tensor | None,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return new_gradient(q), new_gradient(k), _mask_like(q, attn_mask, rest[-1]), _sinks_like(q, sinks)


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _mask_like(q: Tensor, attn_mask: Tensor | None, mask_grad: bool) -> Tensor:
    return _like(attn_mask) if mask_grad and attn_mask is not None else q.new_empty(0)


def _sinks_like(q: Tensor, sinks: Tensor | None) -> Tensor:
    return q.new_empty(0) if sinks is None else _like(sinks)


by_name: dict[str, Callable[..., Any]] = {
    "attention_and_weights": _attention_and_weights,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_varlen": _attention_varlen,
    "attention_varlen_backward": _attention_varlen_backward,
    "attention_weights": _attention_weights,
    "attention_weights_signed": _attention_weights_signed,
    "attention_weights_backward": _attention_weights_backward,
}
for _name, _fake in by_name.items():
    torch.library.register_fake(f"flash4::{_name}", _fake, lib=LIBRARY)
