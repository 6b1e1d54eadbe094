"""`merge_states`: the checks of its arguments, and the call of the operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError, ShapeError
from ..ops import check, kvcache_append
from ..ops.autograd import refuse_tangents
from . import arguments


def merge_states(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Results of attention over disjoint sets of keys, merged into the result over all of them.

    Args:
        outs: results for the same queries, N of them: a tensor (N, T, Hq, Dv) or (N, B, Sq, Hq, Dv), or a
            sequence of N tensors (T, Hq, Dv) or (B, Sq, Hq, Dv); bfloat16, float16, float32 or float64, any
            strides.
        lses: their log-sum-exps, natural: (N, Hq, T) or (N, B, Hq, Sq), or a sequence of N; float32 (float64
            for float64). -inf says that there are no keys, and that out does not count, whatever it holds.

    Returns:
        (out, lse), contiguous, in the dtypes of outs and lses. A row without keys has out 0 and lse -inf;
        if one part has all keys of a row, the result is that part's.

    Raises:
        ArgumentError: an argument is outside its limits; the message names it, its value and the limit.
        NoGradientError: in a backward, or if an argument has a tangent.
    """
    is_listed = not (isinstance(outs, Tensor) and isinstance(lses, Tensor))
    parts, part_lses = _listed("outs", outs, is_listed), _listed("lses", lses, is_listed)
    first, drop = parts[0], int(is_listed)
    shape, prefix = tuple(first.shape[drop:]), "each must be (" if is_listed else "it must be (N, "
    arguments.dtype("outs", first, check.DTYPES)
    if first.dim() not in (4, 5):
        raise ShapeError("outs", shape, f"{prefix}T, Hq, Dv) or {prefix[prefix.index('(') :]}B, Sq, Hq, Dv)")
    if len(part_lses) != len(parts):
        raise ArgumentError("lses", len(part_lses), f"there must be as many as outs, {len(parts)}")
    for x in parts[1:]:
        arguments.tensor("outs", x, device=first.device, of="the first one's")
        if x.dtype != first.dtype:
            raise DtypeError("outs", x.dtype, f"all must have the first one's dtype, {first.dtype}")
        if x.shape != first.shape:
            raise ShapeError("outs", tuple(x.shape[drop:]), f"all must have the first one's shape, {shape}")
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    *batch, S, Hq, _ = shape
    wanted = (*batch, Hq, S)
    for lse in part_lses:
        arguments.tensor("lses", lse, device=first.device, of="outs'")
        arguments.dtype("lses", lse, (dtype,))
        if tuple(lse.shape[drop:]) != wanted:
            letters = "B, Hq, Sq)" if first.dim() == 5 else "Hq, T)"
            raise ShapeError("lses", tuple(lse.shape[drop:]), f"{prefix}{letters} = {wanted}")
    refuse_tangents("merge_states", (*parts, *part_lses))
    return kvcache_append.merge_states(parts, part_lses)


def _listed(name: str, x: Tensor | Sequence[Tensor], split: bool) -> list[Tensor]:
    """Tensors with a first dimension of parts; a tensor is split if the other argument is a list."""
    if isinstance(x, Tensor):
        arguments.tensor(name, x)
        return list(x.split(1)) if split and x.dim() and x.shape[0] else [x]
    if not isinstance(x, (list, tuple)) or not x:
        value = type(x).__name__ if not isinstance(x, (list, tuple)) else "empty"
        raise ArgumentError(name, value, "it must be a tensor, or a list or tuple of at least one")
    for one in x:
        arguments.tensor(name, one)
    return [one[None] for one in x]
