"""Splits of keys in forwards with few tiles: how many, and in which tiles.

Where a call has fewer tiles than the GPU has SMs, several CTAs divide the keys of each, and another launch
merges their results. How long either way takes is estimated as `waves` does, from the times of a table's
rows. What the second launch costs was measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .packing import best_pack, possible_packs
from .sizes import Sizes
from .types import Features
from .waves import Launch, TileTime, launch_of

_MERGE_NS = 4000.0
"""Time of the second launch, without splits and bytes."""
_MERGE_NS_EACH = 90.0
"""Time that each split adds to it."""
_MERGE_BYTES_PER_NS = 2500.0
"""Bytes of results of splits that are written and read again in a nanosecond."""
_READ_BYTES_PER_NS = 4500.0
"""Bytes of K and V that a GPU reads in a nanosecond: splits do not make it faster."""
_MOST_SPLITS = 128
_SHARES = (0.25, 0.5, 1.0, 2.0)
"""Numbers of CTAs that are tried, in those that the GPU runs at once."""


class Candidate(NamedTuple):
    """A table's row, which may serve a call, and how long its tiles take."""

    row: Any
    time: TileTime
    at_once: int = 1
    """CTAs that an SM runs at once: `time` is for as many."""
    alone: float = 1.0
    """The share of it that a tile takes with an SM for itself."""
    most_waves: int = 2
    """Waves of CTAs that splits may take."""

    def ns(self, launch: Launch) -> float:
        """The time of a launch in tiles of the row: of the last wave an SM may have one tile only."""
        waves, rest = divmod(-(-launch.tiles // launch.num_sms), self.at_once)
        share = (waves + self.alone) / (waves + 1) if rest == 1 else 1.0
        return share * launch._replace(num_sms=launch.num_sms * self.at_once).ns(self.time)


class Split(NamedTuple):
    """How the keys of a call's tiles are divided."""

    row: Any
    config: Any
    number: int
    """Splits of every tile, at least 2."""


class Splits(NamedTuple):
    """When and how the forward kernel of an architecture splits keys."""

    whole: Callable[[Features, Sizes], Candidate]
    """What serves a call in one piece."""
    candidates: Callable[[Features], Sequence[Candidate]]
    """What may serve splits; none if the kernel does not split such calls."""
    completed: Callable[[Features, Any, int], Any]
    """The config for splits: from features, the config of a candidate's row, and the heads in a tile."""
    clearly: float = 0.9
    """Keys are split if that takes less than this share of the time without: estimates err."""

    def split(self, features: Features, sizes: Sizes) -> Split | None:
        """How to divide keys, or None where this gains nothing; `sizes` has the number of heads.

        `sizes.num_splits` is taken as it is, up to a block for each split and `most_waves`: more would take
        memory for results and no less time.
        """
        if not features.may_be_split or sizes.heads is None or sizes.num_splits == 1:
            return None
        best: tuple[Any, int] | None = None
        least = math.inf, math.inf
        if not sizes.num_splits:
            whole = self.whole(features, sizes)
            launch = launch_of(features, sizes, whole.row.config)
            least = self.clearly * max(whole.ns(launch), _read_ns(features, sizes, launch)), math.inf
            if least[0] <= _MERGE_NS:
                return None
        row_bytes = 4 * features.Dv * sizes.Sq * sizes.group * sizes.heads
        for tile in self.candidates(features):
            config = tile.row.config
            launch = launch_of(features, sizes, config)
            blocks = launch.longest // config.keys
            shares = [share for share in _SHARES if share <= tile.most_waves]
            for share in shares[-1:] if sizes.num_splits else shares:
                ctas = int(share * sizes.num_sms * tile.at_once)
                most = min(ctas // launch.tiles, sizes.num_splits or _MOST_SPLITS, blocks)
                if most > 1:
                    number = -(-blocks // -(-blocks // most))  # without empty ones
                    merge_ns = _MERGE_NS + number * (_MERGE_NS_EACH + row_bytes / _MERGE_BYTES_PER_NS)
                    parts = launch.split(number, config.keys)
                    # Where reading decides, the tiles that leave the most time for it.
                    ns = tile.ns(parts), _read_ns(features, sizes, launch)
                    if (max(ns) + merge_ns, min(ns)) < least:
                        best, least = (tile.row, number), (max(ns) + merge_ns, min(ns))
        if best is None:
            return None
        row, number = best
        pack = best_pack(features, row.config.rows, sizes)
        return Split(row, self.completed(features, row.config, pack), number)

    def reachable(self, features: Features, group: int | None = None) -> tuple[Any, ...]:
        """Every config that `split` returns for some sizes; with `group`, for so many heads of a KV head."""
        if not features.may_be_split:
            return ()
        packs, tiles = possible_packs(features, group), self.candidates(features)
        return tuple(
            dict.fromkeys(self.completed(features, tile.row.config, pack) for tile in tiles for pack in packs)
        )


def _read_ns(features: Features, sizes: Sizes, launch: Launch) -> float:
    """The time of reading once what the longest tiles read of K and V."""
    assert sizes.heads is not None
    bytes_of_key = (features.D + features.Dv) * (4 if features.is_float32 else 2)
    return sizes.heads * launch.longest * bytes_of_key / _READ_BYTES_PER_NS
