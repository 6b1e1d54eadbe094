"""Splits of keys of the Blackwell forward kernel, in tiles of `sm100`'s rows.

Nothing was timed: times of tiles are guesses. At D 128 two tiles have 1.6 PFLOP/s of a B200's 148 SMs, about
what is said of FlashAttention-4. Narrower heads have less, since exponentials take as long for fewer columns.
"""

from __future__ import annotations

from . import sm100, sm103
from .sizes import Sizes
from .splits import Candidate, Splits
from .types import Features, Sm100Forward, tile_dim
from .waves import TileTime

_NS_PER_KEY = {64: 9.7, 96: 11.0, 128: 12.0, 192: 16.0, 256: 28.0}
"""Time that a key takes two tiles of 128 rows, by the wider of D and Dv."""
_ONE_TILE = 0.75
"""The share of it that one tile takes, whose softmax has no other's MMAs to run under; of 256 columns one
tile is all that there is room for, and half."""
_BESIDES_NS = 2500.0


def _time(features: Features, config: Sm100Forward) -> TileTime:
    wider = tile_dim(max(features.D, features.Dv))
    width = next(width for width in _NS_PER_KEY if wider <= width)
    share = 1.0 if config.q_tiles == 2 else 0.5 if width == 256 else _ONE_TILE
    return TileTime(share * _NS_PER_KEY[width], _BESIDES_NS)


def _whole(features: Features, sizes: Sizes) -> Candidate:
    row = sm100.row(features, sizes)
    return Candidate(row, _time(features, row.config))


def _candidates(features: Features) -> list[Candidate]:
    """The first row of each number of tiles, but for those of CTA pairs."""
    by_tiles: dict[int, sm100.Row] = {}
    for row in sm100.rows_that_serve(features):
        if row.config.cluster == 1:
            by_tiles.setdefault(row.config.q_tiles, row)
    return [Candidate(row, _time(features, row.config)) for row in by_tiles.values()]


def _completed(features: Features, config: Sm100Forward, pack_gqa: int) -> Sm100Forward:
    return config._replace(ragged_k=True, pack_gqa=pack_gqa)


def _completed_for_ultra(features: Features, config: Sm100Forward, pack_gqa: int) -> Sm100Forward:
    return sm103.exact(_completed(features, config, pack_gqa))


SPLITS = Splits(_whole, _candidates, _completed)
SPLITS_OF_ULTRA = SPLITS._replace(completed=_completed_for_ultra)
"""Those of Blackwell Ultra, which has no polynomial."""
