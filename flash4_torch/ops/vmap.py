"""torch.vmap over the operators: the mapped dimension joins the batch where it can, else a loop runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flex_problem import Mods
from . import schema

InDims = Sequence[Any]
"""The mapped dimension of each argument, None without one; a list of them for a list of tensors."""
Mapped = tuple[Any, Any]


def _loop(op: Callable[..., Any], size: int, in_dims: InDims, args: Sequence[Any]) -> Mapped:
    """One call per mapped entry: correct for every operator, mask and dropout."""
    if size == 0:
        return _of_nothing(op, in_dims, args)
    results = [op(*(_entry(a, d, n) for a, d in zip(args, in_dims, strict=True))) for n in range(size)]
    return _stacked(results)


def _entry(a: Any, d: Any, n: int) -> Any:
    """An argument's n-th mapped entry."""
    if isinstance(d, (list, tuple)):
        return [_entry(x, at, n) for x, at in zip(a, d, strict=True)]
    return a if d is None else a.select(d, n)


def _stacked(results: Sequence[Any]) -> Mapped:
    if isinstance(results[0], Tensor):
        return torch.stack(list(results)), 0
    parts = [_stacked(part) for part in zip(*results, strict=True)]
    kind = type(results[0])
    return kind(x for x, _ in parts), kind(d for _, d in parts)


def _of_nothing(op: Callable[..., Any], in_dims: InDims, args: Sequence[Any]) -> Mapped:
    """Empty results, with the shapes that one call on meta tensors gives."""

    def one(a: Any, d: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return [one(x, at) for x, at in zip(a, d or [None] * len(a), strict=True)]
        if not isinstance(a, Tensor):
            return a
        return (
            a.to("meta") if d is None else a.movedim(d, 0).new_empty(a.movedim(d, 0).shape[1:], device="meta")
        )

    device = next(a.device for a in args if isinstance(a, Tensor))

    def none(result: Any) -> Mapped:
        if isinstance(result, Tensor):
            return result.new_empty(0, *result.shape, device=device), 0
        parts, kind = [none(part) for part in result], type(result)
        return kind(x for x, _ in parts), kind(d for _, d in parts)

    return none(op(*(one(a, d) for a, d in zip(args, in_dims, strict=True))))


def _fold(op: Callable[..., Any], size: int, in_dims: InDims, args: Sequence[Any], tensors: int) -> Mapped:
    """One call on (mapped * B, ...): the first `tensors` arguments are mapped or None."""
    moved = [
        None if a is None else a.movedim(d, 0).flatten(0, 1)
        for a, d in zip(args[:tensors], in_dims[:tensors], strict=True)
    ]
    results = op(*moved, *args[tensors:])
    return _unfolded(results, size)


def _unfolded(result: Any, size: int) -> Mapped:
    if isinstance(result, Tensor):
        return (result.unflatten(0, (size, -1)), 0) if result.numel() else (result, None)
    parts, kind = [_unfolded(part, size) for part in result], type(result)
    return kind(x for x, _ in parts), kind(d for _, d in parts)


def _rule(name: str, tensors: int | None = None) -> Callable[..., Mapped]:
    """The vmap rule of an operator; `tensors` counts leading batch-first arguments that a fold can take."""
    op = getattr(schema, name)
    ends_with_mask_grad = name == "attention_backward"

    def rule(info: Any, in_dims: InDims, *args: Any) -> Mapped:
        size: int = info.batch_size
        sums_masks = ends_with_mask_grad and args[-1]
        if tensors is not None and size > 0 and not sums_masks and _can_fold(in_dims, args, tensors):
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
    return leading and mask_stays and sinks is None and rng_state is None


def flex_rule(
    op: Callable[..., Any], tensors: int, reads_batch: Callable[[str], bool]
) -> Callable[..., Mapped]:
    """The rule of an operator of programmable attention.

    `tensors` arguments come before `Mods`, and `reads_batch` says whether a program, by its text, reads b.
    """

    def rule(info: Any, in_dims: InDims, *args: Any) -> Mapped:
        size: int = info.batch_size
        mods = Mods(*args[tensors : tensors + len(Mods._fields)])
        of_mods = Mods(*in_dims[tensors : tensors + len(Mods._fields)])
        leading = zip(args[:tensors], in_dims[:tensors], strict=True)
        # Folding renumbers the batch, and sums up gradients of what all entries share.
        can_fold = (
            size > 0
            and all(a is None or (d is not None and a.numel()) for a, d in leading)
            and not any(map(_is_mapped, of_mods))
            and all(x is None or x.shape[0] == 1 for x in mods.tensors[:4])
            and all(x is None for x in mods.tensors[4:])
            and not (reads_batch(mods.score_mod) or reads_batch(mods.mask_mod))
            and not (isinstance(args[-1], (list, tuple)) and any(args[-1]))
        )
        return _fold(op, size, in_dims, args, tensors) if can_fold else _loop(op, size, in_dims, args)

    return rule


def _is_mapped(d: Any) -> bool:
    return any(map(_is_mapped, d)) if isinstance(d, (list, tuple)) else d is not None


for _name, _tensors in {
    "attention": 3,
    "attention_and_weights": 3,
    "attention_backward": 8,
    "attention_varlen": None,
    "attention_varlen_backward": None,
    "attention_weights": None,
    "attention_weights_signed": None,
    "attention_weights_backward": None,
}.items():
    torch.library.register_vmap(f"flash4::{_name}", _rule(_name, _tensors), lib=schema.LIBRARY)
