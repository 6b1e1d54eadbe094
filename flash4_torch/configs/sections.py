"""The order in which CTAs fetch tiles of several heads: sections of heads, sized for the L2 cache.

Sections follow one another. Within one, the first tile of every head comes before the second, so that the
long tiles of a causal call come first, while what the section's tiles share stays in the cache.
"""

from __future__ import annotations

from typing import NamedTuple


class Section(NamedTuple):
    """How tiles of several heads are interleaved."""

    heads: int
    """KV heads, or packs of query heads, of a section."""
    run_length: int = 0
    """If not 0, there are no sections: this many tiles of one KV head follow one another."""


class Workload(NamedTuple):
    """What the choice of a section depends on besides the features and the config."""

    heads: int
    """KV heads of all batch entries."""
    group: int
    """Query heads of each KV head."""
    Sq: int
    Sk: int
    l2_bytes: int
    """Bytes that stay in the L2 cache while all tiles that share them run."""
    num_sms: int


def heads_that_fit(heads: int, bytes_each: int, l2_bytes: int, tiles: int, most: int, fewest: int) -> int:
    """The heads of a section whose shared data stays in the L2 cache.

    Args:
        heads: KV heads of all batch entries.
        bytes_each: bytes that the tiles of one head share.
        l2_bytes: bytes that stay in the L2 cache.
        tiles: tiles of one head.
        most: heads of a section, before sections are made even.
        fewest: tiles in a section; with fewer, some SMs would idle where one ends.
    """
    enough = -(-fewest // tiles)
    return evenly(heads, min(max(l2_bytes // bytes_each, enough), most, heads))


def evenly(heads: int, wanted: int) -> int:
    """A section's heads near those wanted, such that the last section is not much smaller than the others."""
    near = range(-(-wanted * 3 // 4), min(wanted * 3 // 2, heads) + 1)
    return min(near, key=lambda n: (-heads % n / n, abs(n - wanted)))


_FLOAT32 = 4
"""Bytes of a float32."""
_MOST_HEADS = 32
"""KV heads of a section, before sections are made even."""
_TILES, _FEWEST_HEADS = 256, 16
"""Tiles of a section, and its fewest heads, up to 128 columns with a right bound: measured at S 256 to 16k.
Far more than the cache holds, and seldom 1 % faster than half or twice as many."""
_ROWS = 1 << 19
"""Query rows of all heads of a section, at most: CTAs of a head drift apart by a share of its rows, until
they no longer find each other's rows and sums of dQ in the L2 cache. On an H100 16 heads to a section at D
128 (8 KV heads at D 64) run at half the speed from S 256k (512k) on; one is as fast as more from 64k on."""
_TILES_PER_SM, _WIDE_TILES_PER_SM = 4, 1
"""The fewest tiles of a section for each SM. One for wide heads, whose tiles come in pairs: the fastest, or
within 1 % of it, at D 192 and 256, S 1k to 16k; four are 1 to 5 % slower."""


def fewer_if_long(heads: int, Sq: int) -> int:
    """The KV heads of a section whose query rows are so many for each head, `heads` at most."""
    return max(1, min(heads, _ROWS // max(Sq, 1)))


def bounded_backward(work: Workload, D: int, Dv: int, tiles: int, *, left: bool) -> Section:
    """The section of a backward whose band has bounds, or that has a mask, for 16-bit dtypes.

    tiles: tiles of a head.
    """
    if not left and max(D, Dv) <= 128:
        wanted = min(max(_TILES // tiles, _FEWEST_HEADS), _MOST_HEADS)
        return Section(evenly(work.heads, min(fewer_if_long(wanted, work.Sq), work.heads)))
    row = (D + Dv) * 2 + D * _FLOAT32
    fewest = work.num_sms * (_WIDE_TILES_PER_SM if max(D, Dv) > 128 else _TILES_PER_SM)
    bytes_each = work.group * work.Sq * row
    return Section(heads_that_fit(work.heads, bytes_each, work.l2_bytes, tiles, _MOST_HEADS, fewest))
