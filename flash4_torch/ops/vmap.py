"""torch.vmap over the operators: the mapped dimension joins the batch where it can, else a loop runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import schema

InDims = Sequence[int | None]
Mapped = tuple[Any, Any]


def _loop(op: Callable[..., Any], size: int, in_dims: InDims, args: Sequence[Any]) -> Mapped:
    """One call per mapped entry: correct for every operator, mask and dropout."""
    if size == 0:
        return _of_nothing(op, in_dims, args)
    results = []
    for n in range(size):
        picked = (a if d is None else a.select(d, n) for a, d in zip(args, in_dims, strict=True))
        results.append(op(*picked))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _of_nothing(op: Callable[..., Any], in_dims: InDims, args: Sequence[Any]) -> Mapped:
    """Empty results, with the shapes that one call on meta tensors gives."""

    def one(a: Any, d: int | None) -> Any:
        if not isinstance(a, Tensor):
            return a
        return (
            a.to("meta") if d is None else a.movedim(d, 0).new_empty(a.movedim(d, 0).shape[1:], device="meta")
        )

    device = next(a.device for a in args if isinstance(a, Tensor))
    results = op(*(one(a, d) for a, d in zip(args, in_dims, strict=True)))
    if isinstance(results, Tensor):
        return results.new_empty(0, *results.shape, device=device), 0
    return tuple(r.new_empty(0, *r.shape, device=device) for r in results), (0,) * len(results)


def _fold(op: Callable[..., Any], size: int, in_dims: InDims, args: Sequence[Any], tensors: int) -> Mapped:
    """One call on (mapped * B, ...): the first `tensors` arguments are mapped or None."""
    moved = [
        None if a is None else a.movedim(d, 0).flatten(0, 1)
        for a, d in zip(args[:tensors], in_dims[:tensors], strict=True)
    ]
    results = op(*moved, *args[tensors:])
    unfolded = tuple(r.unflatten(0, (size, -1)) if r.numel() else r for r in results)
    return unfolded, tuple(0 if r.numel() else None for r in results)


def _rule(name: str, tensors: int | None = None) -> Callable[..., Mapped]:
    """The vmap rule of an operator; `tensors` counts leading batch-first arguments that a fold can take."""
    op = getattr(schema, name)

    def rule(info: Any, in_dims: InDims, *args: Any) -> Mapped:
        size: int = info.batch_size
        if tensors is not None and size > 0 and _can_fold(in_dims, args, tensors):
            return _fold(op, size, in_dims, args, tensors)
        return _loop(op, size, in_dims, args)

    return rule


def _can_fold(in_dims: InDims, args: Sequence[Any], tensors: int) -> bool:
    leading = all(
        a is None or (d is not None and a.numel()) for a, d in zip(args[:tensors], in_dims, strict=False)
    )
    # Folding renumbers the batch, which would change masks with a batch dimension and dropout.
    attn_mask, sinks, rng_state = args[tensors : tensors + 3]
    mask_stays = attn_mask is None or (in_dims[tensors] is None and attn_mask.shape[0] == 1)
    # One gradient of the sinks is for the whole batch.
    return leading and mask_stays and sinks is None and rng_state is None and args[-1] is not True


for _name, _tensors in {
    "attention": 3,
    "attention_backward": 8,
    "attention_varlen": None,
    "attention_varlen_backward": None,
    "attention_weights": None,
    "attention_weights_backward": None,
}.items():
    torch.library.register_vmap(f"flash4::{_name}", _rule(_name, _tensors), lib=schema.LIBRARY)
