"""The numbers that a launch of the decode kernel takes besides its tensors."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...configs.decode import KEYS


class DecodeParams(NamedTuple):
    """Numbers of one launch; those that the features leave out are not read.

    Token i sees key j if `-left <= j - i - (Sk - Sq) <= right`; bounds of either sign, at most 2**30.
    """

    scale: Float32
    softcap: Float32
    left: Int32
    right: Int32
    max_seqlen_q: Int32
    """The most tokens of a sequence that has results; without cu_seqlens_q those of each one."""
    split_keys: Int32
    """Keys of a split, a multiple of 64, where all have the same (see groups.py); else not read."""
    num_splits: Int32
    """The most splits of a tile; with groups, the clusters that have them."""


class Divisors(NamedTuple):
    """Sizes of one launch, ready for numbers from 0 on to be divided by them without a division."""

    group: cute.FastDivmodDivisorV2
    """Query heads of a KV head."""
    tiles: cute.FastDivmodDivisorV2
    """Tiles of rows of a KV head and sequence."""
    page_size: cute.FastDivmodDivisorV2
    splits: cute.FastDivmodDivisorV2
    split_blocks: cute.FastDivmodDivisorV2
    """Blocks of params.split_keys."""


def make_divisors(group: Int32, tiles: Int32, page_size: Int32, splits: Int32, split_keys: Int32) -> Divisors:
    """The divisors, on the host; 0 becomes 1."""
    sizes = group, tiles, page_size, splits, split_keys // KEYS
    return Divisors(*(cute.fast_divmod_create_divisor_v2(cutlass.max(Int32(x), 1)) for x in sizes))


def example_params() -> DecodeParams:
    """Parameters that stand for any others when a kernel is compiled."""
    return DecodeParams(Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(1), Int32(0), Int32(1))
