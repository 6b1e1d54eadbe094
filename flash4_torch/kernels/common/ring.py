"""Rings of shared-memory stages between a loading warp and the warps that read them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Ring(NamedTuple):
    """`stages` barriers that say full, and as many that say empty."""

    full: cute.Pointer
    empty: cute.Pointer
    stages: int


class Cursor(NamedTuple):
    """A place in a ring. The phase flips each time round."""

    stage: Int32
    phase: Int32


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
    """One arrival of this warp, after all of its lanes."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.empty + cursor.stage)


@cute.jit
def initialise(ring: Ring, readers: cutlass.Constexpr) -> None:
    """One arrival and the bytes of a copy fill a stage; `readers` warps empty it. A fence has to follow."""
    with cute.arch.elect_one():
        for stage in cutlass.range_constexpr(ring.stages):
            cute.arch.mbarrier_init(ring.full + stage, 1)
            cute.arch.mbarrier_init(ring.empty + stage, readers)
