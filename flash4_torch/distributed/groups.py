"""The ranks that share a sequence: a ring, which divides queries and keys, and inside of it ranks that divide
heads (Ulysses)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from ..errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RING, ULYSSES = "ring", "ulysses"
"""Names of a mesh's dimensions."""


class Axis(NamedTuple):
    """A process group, and this rank's place in it."""

    group: str
    """Its name, by which operators find it; empty for a rank alone."""
    size: int
    rank: int


ALONE = Axis("", 1, 0)


class Ranks(NamedTuple):
    """The two ways in which a sequence is divided; rank (r, u) holds part u of the ring's shard r."""

    ring: Axis
    ulysses: Axis

    @property
    def size(self) -> int:
        return self.ring.size * self.ulysses.size


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh whose dimensions are named "ring" and "ulysses", or are these in that order; one
    dimension of another name, or a process group, is a ring. None: the default process group.
    """
    if mesh is None or not _is_mesh(mesh):
        return Ranks(axis_of("mesh", mesh), ALONE)
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        axis = axis_of("mesh", mesh)
        return Ranks(ALONE, axis) if names == (ULYSSES,) else Ranks(axis, ALONE)
    if mesh.ndim != 2:
        limit = f"it must have one or two dimensions: {RING!r}, {ULYSSES!r} or both"
        raise ArgumentError("mesh", f"of {mesh.ndim} dimensions", limit)
    order = (0, 1)
    if set(names) & {RING, ULYSSES}:
        if set(names) != {RING, ULYSSES}:
            raise ArgumentError("mesh", names, f"its two dimensions must be {RING!r} and {ULYSSES!r}")
        order = (names.index(RING), names.index(ULYSSES))
    ring, ulysses = (_axis("mesh", mesh.get_group(dim)) for dim in order)
    return Ranks(ring, ulysses)


def axis_of(name: str, group: Any) -> Axis:
    """The axis of a process group or of a mesh of one dimension; None is the default process group.

    Raises:
        ArgumentError: it is neither, or no process group exists.
    """
    if not dist.is_available() or not dist.is_initialized():
        limit = "there must be a process group: call torch.distributed.init_process_group first"
        raise ArgumentError(name, group, limit)
    if group is None:
        return _axis(name, dist.group.WORLD)
    if _is_mesh(group):
        if group.ndim != 1:
            raise ArgumentError(name, f"a mesh of {group.ndim} dimensions", "it must have one")
        return _axis(name, group.get_group())
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(name, type(group).__name__, "it must be a ProcessGroup, a DeviceMesh or None")
    return _axis(name, group)


def _axis(name: str, group: Any) -> Axis:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ArgumentError(name, group.group_name, f"this rank, {dist.get_rank()}, must be one of its ranks")
    size = dist.get_world_size(group)
    return Axis(group.group_name, size, rank)


def group_of(axis: Axis) -> ProcessGroup:
    """The process group of an axis."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(axis.group)  # type: ignore[arg-type]


def _is_mesh(x: Any) -> bool:
    if isinstance(x, dist.ProcessGroup):
        return False
    # Its import costs time that a user of process groups need not spend.
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(x, DeviceMesh)
