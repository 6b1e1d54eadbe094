"""Layouts: which part of a sequence each rank holds.

    contiguous     rank r of N holds the r-th of N equal chunks
    zigzag         rank r of N holds chunks r and 2 N - 1 - r of 2 N, one after another

With causal attention a late query sees many keys and an early one few, and the ranks of a contiguous layout
get very different work; two chunks of a zigzag have the same work together on every rank. A layout divides
packed sequences like one long one, at any place of a document.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, ShapeError, hint
from .groups import Ranks, ranks_of
from .transfer import collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# PyTorch 2.13 has renamed it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


def check_layout(layout: Any) -> Layout:
    if layout not in LAYOUTS:
        near = hint(layout, LAYOUTS) if isinstance(layout, str) else ""
        raise ArgumentError("layout", repr(layout), f"it must be one of {', '.join(LAYOUTS)}{near}")
    return layout


class Shards(NamedTuple):
    """A sequence of S positions over the ranks of a ring."""

    layout: str
    ranks: int
    S: int

    @classmethod
    def of_shard(cls, layout: str, ranks: int, length: int, name: str = "q") -> Shards:
        """The shards of which each has `length` positions."""
        if layout == "zigzag" and length % 2:
            limit = "a zigzag layout has two equal chunks on each rank, which an odd length does not"
            raise ArgumentError(f"{name}'s length on this rank", length, limit)
        return cls(layout, ranks, length * ranks)

    def chunks(self, rank: int) -> tuple[range, ...]:
        """Positions of a rank's chunks, in their order on the rank."""
        if self.layout == "contiguous":
            each = self.S // self.ranks
            return (range(rank * each, (rank + 1) * each),)
        each = self.S // (2 * self.ranks)
        return tuple(range(c * each, (c + 1) * each) for c in (rank, 2 * self.ranks - 1 - rank))


def shard_sequence(
    x: Tensor,
    mesh: DeviceMesh | ProcessGroup | None = None,
    *,
    dim: int = 1,
    layout: Layout = "zigzag",
) -> Tensor:
    """This rank's part of a tensor that every rank holds whole.

    Args:
        x: any tensor with the sequence along `dim`: hidden states (B, S, E), token ids or positions (B, S),
            packed rows (T, ...). Give positions, too: a shard's are not those from 0 on.
        mesh: a DeviceMesh of one or two dimensions, named "ring" and "ulysses" or in this order; or a
            process group, which is a ring. Default: all ranks.
        dim: the sequence's dimension.
        layout: "zigzag" or "contiguous"; attention takes the same one. A mesh that is only "ulysses" divides
            contiguously whatever the layout.

    Returns:
        A new contiguous tensor, x with 1 / ranks of its length along `dim`. It is differentiable.

    Raises:
        ShapeError: x's length along `dim` is not a multiple of the number of chunks; the message says of
            which number. Pad the sequence at its end; causal rows before it do not change.
    """
    ranks, dim = ranks_of(mesh), _dim(x, dim)
    shards = _whole(x, ranks, dim, check_layout(layout))
    parts = [x.narrow(dim, chunk.start, len(chunk)) for chunk in shards.chunks(ranks.ring.rank)]
    mine = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    each = mine.shape[dim] // ranks.ulysses.size
    return mine.narrow(dim, ranks.ulysses.rank * each, each).clone(memory_format=torch.contiguous_format)


def unshard_sequence(
    x: Tensor,
    mesh: DeviceMesh | ProcessGroup | None = None,
    *,
    dim: int = 1,
    layout: Layout = "zigzag",
) -> Tensor:
    """The whole tensor, of which every rank holds its `shard_sequence`; every rank gets it.

    Args:
        x: this rank's part, of equal shape on all ranks.
        mesh, dim, layout: as in `shard_sequence`.

    Returns:
        A new tensor of ranks times x's length along `dim`, without history: it is for looking at results.
    """
    ranks, dim = ranks_of(mesh), _dim(x, dim)
    part = x.detach().movedim(dim, 0).contiguous()
    for axis in (ranks.ulysses, ranks.ring):
        if axis.size > 1:
            whole = part.new_empty(axis.size * part.shape[0], *part.shape[1:])
            collective(axis, "all-gather", _all_gather, whole, part)
            part = whole
    shards = Shards(check_layout(layout), ranks.ring.size, part.shape[0])
    result = torch.empty_like(part)
    start = 0
    for rank in range(ranks.ring.size):
        for chunk in shards.chunks(rank):
            result[chunk.start : chunk.stop] = part[start : start + len(chunk)]
            start += len(chunk)
    return result.movedim(0, dim).contiguous()


def _whole(x: Tensor, ranks: Ranks, dim: int, layout: Layout) -> Shards:
    length, ring = x.shape[dim], ranks.ring.size
    chunks = 2 * ring if layout == "zigzag" and ring > 1 else ring
    unit = math.lcm(chunks, ranks.size)
    if length % unit:
        limit = (
            f"its length along dim={dim} must be a multiple of {unit}: {chunks} chunks, {ranks.size} ranks"
        )
        raise ShapeError("x", tuple(x.shape), limit)
    return Shards(layout if ring > 1 else "contiguous", ring, length)


def _dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise ArgumentError("x", type(x).__name__, "it must be a tensor")
    if not -x.dim() <= dim < x.dim():
        raise ArgumentError("dim", dim, f"x has {x.dim()} dimensions")
    return dim % x.dim()
