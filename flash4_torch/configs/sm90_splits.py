"""Splits of keys of the Hopper forward kernel, for calls with few tiles: how many, and in which tiles.

Where a call has fewer tiles than the GPU has SMs, several CTAs divide the keys of each, and another launch
merges their results. Times are estimated as in `sm90`, whose rows serve splits, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from . import sm90
from .packing import best_pack, possible_packs
from .sizes import Sizes
from .types import Features, Sm90Forward

_MERGE_NS = 4000.0
"""Time of the second launch, without splits and bytes."""
_MERGE_NS_EACH = 90.0
"""Time that each split adds to it."""
_MERGE_BYTES_PER_NS = 2500.0
"""Bytes of results of splits that are written and read again in a nanosecond."""
_CLEARLY = 0.9
"""Keys are split if that takes less than this share of the time without: estimates err."""
_MOST_SPLITS = 128
_SHARES_OF_SMS = (0.25, 0.5, 1.0, 2.0)
"""Numbers of CTAs that are tried, in SMs of the GPU."""


class Split(NamedTuple):
    """How the keys of a call's tiles are divided."""

    row: sm90.Row
    config: Sm90Forward
    number: int
    """Splits of every tile, at least 2."""


def split(features: Features, sizes: Sizes) -> Split | None:
    """How to divide keys, or None where this gains nothing; `sizes` has the number of heads.

    `sizes.num_splits` is taken as it is, up to a block for each split and two CTAs for each SM: more would
    take memory for results and no less time.
    """
    if not features.may_be_split or sizes.heads is None or sizes.num_splits == 1:
        return None
    best, least = None, math.inf
    if not sizes.num_splits:
        whole = sm90.row(features, sizes)
        least = _CLEARLY * sm90.launch_of(features, sizes, whole).ns(whole.time)
        if least <= _MERGE_NS:
            return None
    row_bytes = 4 * features.Dv * sizes.Sq * sizes.group * sizes.heads
    shares = _SHARES_OF_SMS[-1:] if sizes.num_splits else _SHARES_OF_SMS
    for row in _rows(features):
        launch, block = sm90.launch_of(features, sizes, row), row.config.keys
        tiles, blocks = launch.tiles_per_head * (launch.heads or 1), launch.longest // block
        for share in shares:
            most = min(int(share * sizes.num_sms) // tiles, sizes.num_splits or _MOST_SPLITS, blocks)
            if most > 1:
                number = -(-blocks // -(-blocks // most))  # without empty ones
                merge_ns = _MERGE_NS + number * (_MERGE_NS_EACH + row_bytes / _MERGE_BYTES_PER_NS)
                ns = launch.split(number, block).ns(row.time) + merge_ns
                if ns < least:
                    best, least = (row, number), ns
    if best is None:
        return None
    row, number = best
    return Split(row, _completed(features, row, best_pack(features, row.config.rows, sizes)), number)


def reachable(features: Features, group: int | None = None) -> tuple[Sm90Forward, ...]:
    """Every config that `split` returns for some sizes; with `group`, for that many heads of a KV head."""
    if not features.may_be_split:
        return ()
    packs = possible_packs(features, group)
    return tuple(dict.fromkeys(_completed(features, row, pack) for row in _rows(features) for pack in packs))


def _rows(features: Features) -> list[sm90.Row]:
    """Rows for many keys; three warpgroups won one of 192 cells, by little."""
    rows = sm90.candidates(features, None)
    return [row for row in rows if row.config.warpgroups < 3] or list(rows)


def _completed(features: Features, row: sm90.Row, pack_gqa: int) -> Sm90Forward:
    """A row's config. Clusters would have two tiles; ptxas serialises half blocks next to splits."""
    config = row.config._replace(cluster=1, half_block=False)
    return sm90.completed(features, config, ragged_k=True, pack_gqa=pack_gqa)
