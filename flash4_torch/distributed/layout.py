"""Layouts: which part of a sequence each rank holds.

    contiguous     rank r of N holds the r-th of N equal chunks
    zigzag         rank r of N holds chunks r and 2 N - 1 - r of 2 N, one after another

With causal attention a late query sees many keys and an early one few, and the ranks of a contiguous layout
get very different work; two chunks of a zigzag have the same work together on every rank. Both divide packed
sequences like one long one, at any place of a document, and ranks get the work of the documents that they
happen to hold. For these there is a layout that looks at the documents (`documents`):

    documents      each long document is a zigzag of its own; short ones stay whole on one rank
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, ShapeError, hint
from ..ops import check
from .documents import chunks_of_documents
from .groups import Ranks, ranks_of
from .transfer import collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# PyTorch 2.13 has renamed it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Layout = Literal["contiguous", "zigzag", "documents"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag", "documents")


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
    ends: tuple[int, ...] = ()
    """Starts of packed documents, and the end of the last one; only the layout `documents` has them."""

    @classmethod
    def of_shard(
        cls, layout: str, ranks: int, length: int, name: str = "q", ends: tuple[int, ...] = ()
    ) -> Shards:
        """The shards of which each has `length` positions."""
        if layout == "documents":
            return cls(layout, ranks, length * ranks, ends)
        if layout == "zigzag" and length % 2:
            limit = "a zigzag layout has two equal chunks on each rank, which an odd length does not"
            raise ArgumentError(f"{name}'s length on this rank", length, limit)
        return cls(layout, ranks, length * ranks)

    def chunks(self, rank: int) -> tuple[range, ...]:
        """Positions of a rank's chunks, in their order on the rank."""
        if self.layout == "documents":
            return chunks_of_documents(self.ends, self.ranks)[rank]
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
    return _part(x, ranks, dim, _whole(x, ranks, dim, _without_documents(layout)))


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
    layout = _without_documents(layout)
    return _united(x, ranks, dim, Shards(layout, ranks.ring.size, x.shape[dim] * ranks.size))


def shard_documents(
    x: Tensor, cu_seqlens: Tensor, mesh: DeviceMesh | ProcessGroup | None = None, *, dim: int = 0
) -> Tensor:
    """This rank's part of packed documents, for `layout="documents"`: even work whatever their lengths.

    Each long document is divided into chunks, two for each rank of the ring, as a zigzag of its own; short
    ones stay whole. Every rank gets equally many tokens, so that a few short documents are cut.

    Args:
        x: any tensor with the packed tokens along `dim`: hidden states (T, E), token ids or positions (T,).
            Give positions, too: a shard's jump.
        cu_seqlens: (B + 1,), where documents begin and end, int32 or int64, equal on all ranks. Its values
            are read: on a CPU they cost no waiting.
        mesh: as in `shard_sequence`. One that is only "ulysses" divides contiguously.
        dim: the tokens' dimension.

    Returns:
        A new contiguous tensor, x with 1 / ranks of its length along `dim`. It is differentiable.

    Raises:
        ShapeError: x's length along `dim` is not a multiple of the number of ranks.
        RangeError: cu_seqlens does not begin with 0, decreases, or does not end with that length.
    """
    ranks, dim = ranks_of(mesh), _dim(x, dim)
    return _part(x, ranks, dim, _of_documents(cu_seqlens, ranks, x.shape[dim], x, dim))


def unshard_documents(
    x: Tensor, cu_seqlens: Tensor, mesh: DeviceMesh | ProcessGroup | None = None, *, dim: int = 0
) -> Tensor:
    """The whole packed tensor, of which every rank holds its `shard_documents`; every rank gets it.

    Args:
        x: this rank's part, of equal shape on all ranks.
        cu_seqlens, mesh, dim: as in `shard_documents`.

    Returns:
        A new tensor of ranks times x's length along `dim`, without history: it is for looking at results.

    Raises:
        RangeError: cu_seqlens does not begin with 0, decreases, or does not end with that length.
    """
    ranks, dim = ranks_of(mesh), _dim(x, dim)
    return _united(x, ranks, dim, _of_documents(cu_seqlens, ranks, x.shape[dim] * ranks.size, x, dim))


def _part(x: Tensor, ranks: Ranks, dim: int, shards: Shards) -> Tensor:
    parts = [x.narrow(dim, chunk.start, len(chunk)) for chunk in shards.chunks(ranks.ring.rank)]
    mine = parts[0] if len(parts) == 1 else torch.cat([x.narrow(dim, 0, 0), *parts], dim)
    each = mine.shape[dim] // ranks.ulysses.size
    return mine.narrow(dim, ranks.ulysses.rank * each, each).clone(memory_format=torch.contiguous_format)


def _united(x: Tensor, ranks: Ranks, dim: int, shards: Shards) -> Tensor:
    part = x.detach().movedim(dim, 0).contiguous()
    for axis in (ranks.ulysses, ranks.ring):
        if axis.size > 1:
            whole = part.new_empty(axis.size * part.shape[0], *part.shape[1:])
            collective(axis, "all-gather", _all_gather, whole, part)
            part = whole
    result = torch.empty_like(part)
    start = 0
    for rank in range(ranks.ring.size):
        for chunk in shards.chunks(rank):
            result[chunk.start : chunk.stop] = part[start : start + len(chunk)]
            start += len(chunk)
    return result.movedim(0, dim).contiguous()


def _without_documents(layout: Layout) -> Layout:
    if check_layout(layout) == "documents":
        limit = "it depends on the documents' lengths: shard_documents and unshard_documents take cu_seqlens"
        raise ArgumentError("layout", repr(layout), limit)
    return layout


def _of_documents(cu_seqlens: Tensor, ranks: Ranks, T: int, x: Tensor, dim: int) -> Shards:
    if T % ranks.size:
        limit = f"its length along dim={dim} must be a multiple of the {ranks.size} ranks"
        raise ShapeError("x", tuple(x.shape), limit)
    on_cpu = isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type == "cpu"
    check.cu_seqlens("cu_seqlens", cu_seqlens, cu_seqlens if on_cpu else x)
    check.cu_seqlens_values("cu_seqlens", cu_seqlens.cpu(), T, T)
    ring = ranks.ring.size
    if ring == 1:
        return Shards("contiguous", 1, T)
    return Shards("documents", ring, T, tuple(cu_seqlens.tolist()))


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
