"""Ulysses: ranks that hold parts of a sequence exchange them for heads of all of it, and back.

One all-to-all takes q, k and v there, one brings the output back. KV heads are repeated only as far as ranks
need one each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ShapeError
from ..ops import context_parallel as operators
from .groups import Axis, group_of
from .transfer import collective


def all_to_all(x: Tensor, group: str) -> Tensor:
    """The operator `all_to_all`: x (N, ...), part n for rank n; the result has part n from rank n."""
    axis = _axis(group)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    collective(axis, "all-to-all", dist.all_to_all_single, received, x.contiguous())
    return received


def from_first_rank(x: Tensor, group: str) -> Tensor:
    """The operator `from_first_rank`: rank 0's x on every rank of the group."""
    received = x.clone(memory_format=torch.contiguous_format)
    collective(_axis(group), "broadcast", dist.broadcast, received, group_src=0)
    return received


def _axis(group: str) -> Axis:
    found: Any = group_of(Axis(group, 0, 0))
    return Axis(group, dist.get_world_size(found), dist.get_rank(found))


def heads_of_rank(Hq: int, axis: Axis) -> slice:
    """The query heads of this rank.

    Raises:
        ShapeError: the ranks do not divide them.
    """
    if Hq % axis.size:
        limit = f"its heads must be a multiple of the {axis.size} ranks that divide them"
        raise ShapeError("q", f"of {Hq} heads", limit)
    each = Hq // axis.size
    return slice(axis.rank * each, (axis.rank + 1) * each)


def to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, S / N, H, D) of all heads as (B, S, H / N, D) of this rank's."""
    Hq, Hk, N = q.shape[2], k.shape[2], axis.size
    heads_of_rank(Hq, axis)
    # It divides Hq // Hk, because N divides Hq.
    copies = N // math.gcd(N, Hk)
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    if q.shape[1] == k.shape[1]:
        return _to_heads([q, k, v], axis)  # type: ignore[return-value]
    return *_to_heads([q], axis), *_to_heads([k, v], axis)  # type: ignore[return-value]


def _to_heads(tensors: list[Tensor], axis: Axis) -> tuple[Tensor, ...]:
    """Tensors (B, S / N, H, D) of one length, together in one message to each rank."""
    N = axis.size
    heads = [(x.shape[2] // N, x.shape[3]) for x in tensors]
    parts = [x.unflatten(2, (N, -1)).flatten(3).permute(2, 0, 1, 3) for x in tensors]
    received = operators.all_to_all(torch.cat(parts, -1).contiguous(), axis.group)
    whole = received.transpose(0, 1).flatten(1, 2)
    split = whole.split([H * D for H, D in heads], -1)
    return tuple(x.unflatten(-1, shape) for x, shape in zip(split, heads, strict=True))


def to_sequence(out: Tensor, axis: Axis) -> Tensor:
    """out (B, S, Hq / N, Dv) of this rank's heads as (B, S / N, Hq, Dv) of all."""
    Dv = out.shape[3]
    sent = out.unflatten(1, (axis.size, -1)).flatten(3).movedim(1, 0).contiguous()
    received = operators.all_to_all(sent, axis.group)
    return received.permute(1, 2, 0, 3).flatten(2).unflatten(2, (-1, Dv)).contiguous()


def lse_to_sequence(lse: Tensor, axis: Axis) -> Tensor:
    """lse (B, Hq / N, S) of this rank's heads as (B, Hq, S / N) of all."""
    sent = lse.unflatten(2, (axis.size, -1)).movedim(2, 0).contiguous()
    return operators.all_to_all(sent, axis.group).transpose(0, 1).flatten(1, 2).contiguous()
