"""The numbers that a launch of the decode kernel takes besides its tensors."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float32, Int32


class DecodeParams(NamedTuple):
    """Numbers of one launch; those that the features leave out are not read.

    Token i sees key j if `-left <= j - i - (Sk - Sq) <= right`; bounds of either sign, at most 2**30.
    """

    scale: Float32
    softcap: Float32
    left: Int32
    right: Int32
    max_seqlen_q: Int32
    """Tokens of the longest sequence, later ones have no result; without cu_seqlens_q those of each one."""
    split_keys: Int32
    """0: the blocks that a tile sees are divided evenly among splits. Else a multiple of 64: split s has keys
    from s * split_keys on, so that results do not depend on what else the launch does."""


def example_params() -> DecodeParams:
    """Parameters that stand for any others when a kernel is compiled."""
    return DecodeParams(Float32(1.0), Float32(0.0), Int32(0), Int32(0), Int32(1), Int32(0))
