"""The numbers that a launch takes besides its tensors."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float32, Int32, Uint32


class LaunchParams(NamedTuple):
    """Numbers of one launch; those that the features leave out are not read.

    Row i sees key j if `-left <= j - i - (Sk - Sq) <= right`; bounds of either sign, at most 2**30.
    """

    scale: Float32
    softcap: Float32
    left: Int32
    right: Int32
    max_seqlen: Int32
    """Length of what tiles divide (queries forward, keys backward); with varlen, of the longest sequence."""
    heads_per_section: Int32
    """Heads, or packs of query heads, whose tiles are interleaved: what they read stays in the L2 cache."""
    num_sms: Int32
    drop_byte: Uint32
    drop_fraction: Uint32
    """The probability of dropping is (drop_byte + drop_fraction / 2**32) / 256."""
    keep_scale: Float32
    run_length: Int32
    """Backward with `heads_inner`: if not 0, this many tiles of one KV head follow one another, instead of
    sections."""
    heads_first: Int32
    """1 if q, k, v and their gradients come as (B, H, S, D); else 0."""
    out_heads_first: Int32
    """1 if out and its gradient do."""


def example_params() -> LaunchParams:
    """Parameters that stand for any others when a kernel is compiled."""
    return LaunchParams(
        Float32(1.0),
        Float32(0.0),
        Int32(0),
        Int32(0),
        Int32(1),
        Int32(1),
        Int32(1),
        Uint32(0),
        Uint32(0),
        Float32(1.0),
        Int32(0),
        Int32(0),
        Int32(0),
    )
