"""The blocks of keys that a split has, and the splits that a group has.

Splits of any length divide what a tile sees evenly. Those of a fixed length are a law of bits: where they
begin depends on the position alone. The first `SHORT_SPLITS` have params.split_keys keys each, so that short
sequences keep many CTAs busy; the others have `LONGER` times as many, so that long sequences are no crowd.
`GROUP` splits after one another are a group, which is merged first.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...configs.decode import GROUP, LEAST_BLOCKS, LONGER, SHORT_SPLITS
from ..common.band import Span
from .params import Divisors


@cute.jit
def even(visible: Span, split: Int32, divisors: Divisors) -> tuple[Span, Span]:
    """The splits of the visible blocks, and the blocks of one of them."""
    count, num_splits = visible.last - visible.first, divisors.splits.divisor
    last = cutlass.max(cutlass.min(num_splits, count // LEAST_BLOCKS), 1)
    each = cutlass.max(count // divisors.splits, LEAST_BLOCKS)
    longer = cutlass.max(count - each * last, 0)
    begin = visible.first + split * each + cutlass.min(split, longer)
    end = begin + each + (Int32(1) if split < longer else Int32(0))
    # Splits of the least length may leave blocks over.
    end = visible.last if split == last - 1 else end
    return Span(Int32(0), last), Span(begin, end)


@cute.jit
def fixed(visible: Span, split: Int32, divisors: Divisors) -> tuple[Span, Span]:
    """The same of splits of a fixed length. The last one has the rest: too few cost the law, not keys."""
    by, final = divisors.split_blocks, divisors.splits.divisor - 1
    first, last = _split_of(visible.first, by), _split_of(visible.last - 1, by)
    begin, end = first_block(split, by.divisor), first_block(split + 1, by.divisor)
    end = visible.last if split == final else cutlass.min(end, visible.last)
    splits = Span(cutlass.min(first, final), cutlass.min(last, final) + 1)
    return splits, Span(cutlass.max(visible.first, begin), end)


@cute.jit
def groups(visible: Span, divisors: Divisors, number: Int32) -> Span:
    """The groups of the visible blocks, of `number` groups."""
    first, last = (_split_of(n, divisors.split_blocks) // GROUP for n in (visible.first, visible.last - 1))
    return Span(cutlass.min(first, number - 1), cutlass.min(last, number - 1) + 1)


@cute.jit
def blocks_of_group(visible: Span, group: Int32, divisors: Divisors, number: Int32) -> Span:
    """The visible blocks of a group; the last one has all that is left."""
    each = divisors.split_blocks.divisor
    begin, end = first_block(GROUP * group, each), first_block(GROUP * (group + 1), each)
    end = visible.last if group == number - 1 else cutlass.min(end, visible.last)
    return Span(cutlass.max(visible.first, begin), end)


@cute.jit
def end_of_split(block: Int32, divisors: Divisors) -> Int32:
    """The block after the split that has a block."""
    by = divisors.split_blocks
    return first_block(_split_of(block, by) + 1, by.divisor)


@cute.jit
def _split_of(block: Int32, by: cute.FastDivmodDivisorV2) -> Int32:
    index = block // by
    return index if index < SHORT_SPLITS else SHORT_SPLITS + (index - SHORT_SPLITS) // LONGER


@cute.jit
def first_block(split: Int32, each: Int32) -> Int32:
    """The first block of a split, where short ones have `each` blocks."""
    return (split + cutlass.max(split - SHORT_SPLITS, 0) * (LONGER - 1)) * each
