"""Rings of shared-memory stages between the warps that fill them and those that read them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator


class Ring(NamedTuple):
    """`stages` full barriers and `stages` empty barriers.

    Where two CTAs of a cluster fill their stages together, each has such a ring, and a stage of it is empty
    once the readers in both have released it.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int
    peer: Int32 | None = None
    """Rank of the other CTA."""

    @property
    def cluster_size(self) -> int:
        return 1 if self.peer is None else 2


class Cursor(NamedTuple):
    """A place in a ring. The phase flips each time round."""

    stage: Int32
    phase: Int32


def allocate(memory: SmemAllocator, stages: int, peer: Int32 | None = None) -> Ring:
    """A ring's barriers in shared memory, not yet initialised."""
    return Ring(memory.allocate_array(Int64, stages), memory.allocate_array(Int64, stages), stages, peer)


def start() -> Cursor:
    return Cursor(Int32(0), Int32(0))


@cute.jit
def after(cursor: Cursor, stages: cutlass.Constexpr) -> Cursor:
    # Compare and select: ptxas keeps that uniform in the warp, unlike an exclusive or.
    stage = cursor.stage + 1
    wrapped = stage == stages
    return Cursor(Int32(0) if wrapped else stage, cursor.phase ^ 1 if wrapped else cursor.phase)


@cute.jit
def wait_full(ring: Ring, cursor: Cursor) -> None:
    cute.arch.mbarrier_wait(ring.full + cursor.stage, cursor.phase)


@cute.jit
def wait_empty(ring: Ring, cursor: Cursor) -> None:
    """A fresh ring is empty: its first time round waits for the phase before the first."""
    cute.arch.mbarrier_wait(ring.empty + cursor.stage, cursor.phase ^ 1)


@cute.jit
def release(ring: Ring, cursor: Cursor) -> None:
    """One arrival of this warp, after all of its lanes, in each CTA that fills the stage."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.empty + cursor.stage)
        if cutlass.const_expr(ring.peer is not None):
            cute.arch.mbarrier_arrive(ring.empty + cursor.stage, ring.peer)


@cute.jit
def release_read(ring: Ring, cursor: Cursor) -> None:
    """`release` of a stage that the warp's lanes have read by ldmatrix or ld.shared and that TMA fills again.

    ptxas lets the arrival overtake such loads (ptxas.md, P32), and TMA could overwrite what they will read.
    """
    cute.arch.fence_view_async_shared()
    release(ring, cursor)


@cute.jit
def fill(ring: Ring, cursor: Cursor) -> None:
    """One arrival of this warp, after what all of its lanes wrote."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.full + cursor.stage)


@cute.jit
def initialise(ring: Ring, readers: cutlass.Constexpr, writers: cutlass.Constexpr = 1) -> None:
    """`writers` arrivals and the bytes of copies fill a stage; `readers` warps of each CTA empty it.

    A fence has to follow.
    """
    with cute.arch.elect_one():
        for stage in cutlass.range_constexpr(ring.stages):
            cute.arch.mbarrier_init(ring.full + stage, writers)
            cute.arch.mbarrier_init(ring.empty + stage, readers * ring.cluster_size)


@cute.jit
def place(count: Int32, stages: cutlass.Constexpr) -> Cursor:
    """The cursor after `count` steps from the start."""
    rounds = count // stages
    return Cursor(count - rounds * stages, rounds & 1)
