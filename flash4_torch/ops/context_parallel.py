"""Operators of one sequence over many ranks: schemas, fakes and gradients. `distributed` implements them.

A graph holds such an operator whole, with its communication. `group` is a process group's name.
`cu_seqlens` has the documents of the whole packed sequence; tensors are then (T, H, D), else (B, S, H, D).
`all_to_all` is its own gradient: x (N, ...) has one part for each rank, and so has the result. `from_first`
returns rank 0's x. Results are freshly allocated and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reference.scoring import working_dtype
from .after_import import after_import
from .schema import LIBRARY, define, refuse_double_backward, save_nothing

_RULES = (
    "float scale, SymInt? window_left, SymInt? window_right, float softcap, float dropout_p, "
    "bool deterministic"
)
_RING = f"Tensor? sinks, Tensor? rng_state, Tensor? cu_seqlens, str group, str layout, {_RULES}"
SCHEMAS = {
    "ring_attention": f"(Tensor q, Tensor k, Tensor v, {_RING}) -> (Tensor out, Tensor lse)",
    "ring_attention_backward": (
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{_RING}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
    ),
    "all_to_all": "(Tensor x, str group) -> Tensor",
    "from_first_rank": "(Tensor x, str group) -> Tensor",
}
for _name, _signature in SCHEMAS.items():
    define(_name, _signature)

ring_attention = torch.ops.flash4.ring_attention.default
all_to_all = torch.ops.flash4.all_to_all.default
from_first_rank = torch.ops.flash4.from_first_rank.default
_ring_attention_backward = torch.ops.flash4.ring_attention_backward.default


def implement(functions: dict[str, Callable[..., Any]]) -> None:
    """Registers the implementations, by the operators' names, on every device."""
    for name, function in functions.items():
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *batch, S, Hq, _ = q.shape
    lse = q.new_empty(*batch, Hq, S, dtype=working_dtype(q.dtype))
    return q.new_empty(*batch, S, Hq, v.shape[-1]), lse


def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _like(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, rng_state, cu_seqlens, *options = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, rng_state, cu_seqlens)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _grads(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    # Every rank takes part even if nobody asked it for a gradient of its own rows.
    q, k, v, out, lse, sinks, *others = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = _ring_attention_backward(dout, dlse, q, k, v, out, lse, sinks, *others, *ctx.options)
    return dq, dk, dv, None if sinks is None else dsinks, *(None,) * (2 + len(ctx.options))


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _all_to_all_grads(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return all_to_all(gradient.contiguous(), ctx.group), None


_fakes: dict[str, Callable[..., Any]] = {
    "ring_attention": _fake,
    "ring_attention_backward": _backward_fake,
    "all_to_all": _like,
    "from_first_rank": _like,
}
for _name, _function in _fakes.items():
    torch.library.register_fake(f"flash4::{_name}", _function, lib=LIBRARY)
for _name, _saves, _gradients in (
    ("ring_attention", _save, _grads),
    ("ring_attention_backward", save_nothing, refuse_double_backward),
    ("all_to_all", _save_group, _all_to_all_grads),
):
    torch.library.register_autograd(f"flash4::{_name}", _gradients, setup_context=_saves, lib=LIBRARY)


def _use_flop_formulas() -> None:
    from . import flops

    flops.register(flops.RING)


after_import("torch.utils.flop_counter", _use_flop_formulas)
