"""Batches of short sequences: entries one after another, as one sequence, so that a tile has rows of several.

Kernels take tiles of 64 rows and more of one head, so that a sequence of 16 leaves most of its tile empty. A
stack of entries is one sequence whose rows see the keys of their own entry (`Mods.bounds`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from ...configs import stacks
from ...configs.types import Features, Mods
from ...problem import Extent, Problem
from .targets import Target

_MOST_ROWS = 1 << 24
"""Rows of a batch, at most: kernels find a row's entry by a product of 32 bits (`kernels.common.band`)."""


@lru_cache(maxsize=1024)
def stacked(target: Target, problem: Problem, num_sms: int) -> Problem:
    """The problem as one of stacks, if that is faster; else the same."""
    spec, (B, Sq, Sk, _, Hk) = problem.spec, problem.extent
    # The keep bits and masks of a tile are those of one entry.
    is_of_one_entry = spec.varlen or spec.mask or spec.dropout or spec.weights or spec.running
    if is_of_one_entry or not target.has_bounds or B * max(Sq, Sk) > _MOST_ROWS:
        return problem
    if (
        spec.softcap
    ):  # next to bounds of rows it spills, above 64 in Blackwell's forward, in Hopper's backward
        return problem
    right = problem.band.right
    end_masked = right is not None and right <= 0
    batch = stacks.Batch(B, Sq, Sk, Hk, max(spec.D, spec.Dv), end_masked, num_sms)
    entries = (stacks.backward if spec.backward else stacks.forward)(batch)
    return problem if entries == 1 else of_entries(problem, entries)


def of_entries(problem: Problem, entries: int) -> Problem:
    """The problem as one of stacks of so many entries."""
    spec, (B, Sq, Sk, Hq, Hk), (left, right) = problem.spec, problem.extent, problem.band
    # A bound that hides nothing of an entry hides the entries before or after it.
    band = problem.band._replace(
        left=Sk - 1 if left is None else min(left, Sk - 1),
        right=Sq - 1 if right is None else min(right, Sq - 1),
    )
    extent = Extent(B // entries, Sq * entries, Sk * entries, Hq, Hk)
    spec = spec._replace(left=True, right=True)
    return problem._replace(spec=spec, extent=extent, band=band, entries=entries)


def may_be_stacked(extent: Extent, *tensors: Tensor) -> bool:
    """Whether entries are short, and those of (B, S, H, D) tensors follow one another in memory."""
    if max(extent.Sq, extent.Sk) > stacks.LONGEST:
        return False
    return all([x.stride(0) == x.shape[1] * x.stride(1) for x in tensors])


def arguments(problem: Problem) -> Any:
    """What a kernel takes for `Mods`; None for what is no stack."""
    entries = problem.entries
    if entries == 1:
        return None
    rows, columns = problem.extent.Sq // entries, problem.extent.Sk // entries
    if problem.spec.backward:
        rows, columns = columns, rows
    inverse = -(-(1 << 32) // rows)
    return None, None, None, None, (rows, columns, inverse, entries)


def features_of(target: Target, features: Features) -> Features | None:
    """The features of stacks of calls that have these; None if no stack serves any."""
    f = features
    is_plain = not (f.varlen or f.mask or f.dropout or f.running or f.is_float32 or f.softcap)
    if not (is_plain and target.has_bounds):
        return None
    return f._replace(left=True, right=True, mods=Mods(bounds="stacked"))
