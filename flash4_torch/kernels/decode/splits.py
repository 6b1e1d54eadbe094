"""The blocks of keys that a split has, and the splits that a group has.

Splits of any length divide what a tile sees evenly. Those of a fixed length make bits batch invariant: where
they begin depends on the position alone, params.split_keys keys after one another. `GROUP` of them are a
group, which is merged first; then groups are.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...configs.decode import GROUP
from ..common.band import Span
from .params import Divisors


class Shares(NamedTuple):
    """The splits that the CTAs of a cluster have, `each` of them after one another in each CTA."""

    splits: Span
    each: Int32

    def of(self, rank: int | Int32) -> Span:
        """The splits of a CTA, possibly none."""
        first = self.splits.first + rank * self.each
        return Span(first, cutlass.max(cutlass.min(first + self.each, self.splits.last), first))


@cute.jit
def even(visible: Span, split: Int32, divisors: Divisors, least: cutlass.Constexpr) -> tuple[Span, Span]:
    """The splits of the visible blocks, of `least` blocks or more, and the blocks of one of them."""
    count, num_splits = visible.last - visible.first, divisors.splits.divisor
    last = cutlass.max(cutlass.min(num_splits, count // least), 1)
    each = cutlass.max(count // divisors.splits, least)
    longer = cutlass.max(count - each * last, 0)
    begin = visible.first + split * each + cutlass.min(split, longer)
    end = begin + each + (Int32(1) if split < longer else Int32(0))
    # Splits of the least length may leave blocks over.
    end = visible.last if split == last - 1 else end
    return Span(Int32(0), last), Span(begin, end)


@cute.jit
def groups(visible: Span, divisors: Divisors, number: Int32) -> Span:
    """The groups of the visible blocks, of `number` groups."""
    return Span(group_of(visible.first, divisors, number), group_of(visible.last - 1, divisors, number) + 1)


def group_of(block: Int32, divisors: Divisors, number: Int32) -> Int32:
    """The group of a block; the last one has all that is left."""
    return cutlass.min(block // divisors.split_blocks // GROUP, number - 1)


@cute.jit
def splits_of_group(visible: Span, group: Int32, divisors: Divisors, number: Int32) -> Span:
    """The splits of a group that a tile sees."""
    first, last = visible.first // divisors.split_blocks, (visible.last - 1) // divisors.split_blocks + 1
    end = cutlass.min(last, GROUP * (group + 1))
    return Span(cutlass.max(first, GROUP * group), last if group == number - 1 else end)


@cute.jit
def shares_of_group(
    visible: Span, group: Int32, divisors: Divisors, number: Int32, cluster: cutlass.Constexpr
) -> Shares:
    """The splits of a group that a tile sees, dealt evenly to the CTAs of its cluster."""
    own = splits_of_group(visible, group, divisors, number)
    return Shares(own, cute.ceil_div(own.last - own.first, cluster))


@cute.jit
def blocks_of(visible: Span, splits: Span, divisors: Divisors) -> Span:
    """The visible blocks of splits of a fixed length."""
    each = divisors.split_blocks.divisor
    begin = cutlass.max(visible.first, splits.first * each)
    end = cutlass.min(visible.last, splits.last * each)
    return Span(begin, end if splits.first < splits.last else begin)
