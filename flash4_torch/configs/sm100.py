"""The Blackwell forward kernel's tiles: which to take for which call, and why.

`TABLE` is read from the top: the first row that admits the call serves it. Nothing here was ever timed: there
was no Blackwell to time it on. Rows are chosen by what shared memory and TMEM hold, by what a tile costs in
the units of an SM, and by the constants with which FlashAttention-4 was tuned.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .packing import best_pack, possible_packs, rows_that_share_keys
from .sizes import Sizes, may_end_inside, possible_ends
from .types import SHARED_MEMORY, Features, Sm100Forward, may_pair, tile_dim

MAX_D = 256


class Row(NamedTuple):
    """A row for head sizes up to (D, Dv). None: whatever the call has."""

    D: int
    Dv: int
    rows: int | None
    """Up to this many query rows that share keys: Sq, times the heads of a group where these are packed."""
    right: bool | None
    """Whether the band is bounded to the right, as it is for causal calls."""
    config: Sm100Forward
    why: str

    def admits_sizes(self, Sq: int, rows: int) -> bool:
        """Whether the row serves that many query positions; one CTA of a pair alone would have none."""
        alone = self.config.cluster > 1 and Sq <= self.config.queries
        return not alone and (self.rows is None or rows <= self.rows)

    def admits_features(self, features: Features) -> bool:
        return (
            features.D <= self.D
            and features.Dv <= self.Dv
            and self.right in (None, features.right)
            and fits(features, self.config)
        )


# fmt: off
_Tiles = Sm100Forward
TABLE = (
    # D   Dv   rows  right
    Row(64, 64, 128, None, _Tiles(1, 8), "never timed: rows of a second tile would be empty"),
    Row(64, 64, None, None, _Tiles(2, 8),
        "never timed: four blocks ahead; of 32 exponentials 4 by the polynomial, as FlashAttention-4"),

    Row(96, 96, 128, None, _Tiles(1, 6), "never timed, as for 64"),
    Row(96, 96, None, None, _Tiles(2, 5), "never timed: the most stages"),

    Row(128, 128, 128, None, _Tiles(1, 4), "never timed, as for 64"),
    Row(128, 128, None, False, _Tiles(2, 6, polynomial=6, cluster=2),
        "never timed: shared memory is read a third less"),
    Row(128, 128, None, False, _Tiles(2, 3, polynomial=6),
        "never timed: the most stages next to two tiles of Q and O; exponentials as FlashAttention-4"),
    Row(128, 128, None, True, _Tiles(2, 3), "never timed, as for full masks"),

    Row(192, 128, 128, None, _Tiles(1, 3), "never timed, as for 64"),
    Row(192, 128, None, False, _Tiles(2, 5, polynomial=6, o_over_q=True, cluster=2),
        "never timed, as for 128; and stages of half a block fit in more often"),
    Row(192, 128, None, False, _Tiles(2, 2, polynomial=6, o_over_q=True),
        "never timed: the most stages next to two tiles of Q"),
    Row(192, 128, None, True, _Tiles(2, 2, polynomial=2, o_over_q=True), "never timed, as for full masks"),

    Row(256, 256, None, False, _Tiles(1, 5, polynomial=6, o_over_q=True, cluster=2),
        "never timed, as for 128"),
    Row(256, 256, None, None, _Tiles(1, 2, polynomial=6, o_over_q=True),
        "never timed: a second tile has no room for its O in TMEM"),
    Row(256, 256, None, None, _Tiles(1, 1), "never timed: Dv > D, so that O needs room of its own"),
)
# fmt: on


def forward(features: Features, sizes: Sizes) -> Sm100Forward:
    """The config of a call, whatever the number of tiles."""
    config = _beside(features, row(features, sizes).config)
    pack = best_pack(features, config.rows, sizes)
    return config._replace(ragged_k=may_end_inside(features, sizes, config.keys), pack_gqa=pack)


def row(features: Features, sizes: Sizes) -> Row:
    """The row that serves a call: see `forward`."""
    rows = rows_that_share_keys(features, sizes)
    return next(r for r in rows_that_serve(features) if r.admits_sizes(sizes.Sq, rows))


def limits(features: Features) -> list[str]:
    """Why no row serves the features, whose head sizes may be any."""
    why = []
    if not any(row.admits_features(features) for row in TABLE):
        why.append(f"D is {features.D} and Dv is {features.Dv}, and it serves up to {MAX_D}")
    return why


def reachable(features: Features, group: int | None = None) -> tuple[Sm100Forward, ...]:
    """Every config that `forward` returns for some sizes; with `group`, for that many heads of a KV head."""
    ragged = possible_ends(features)
    found = {
        _beside(features, row.config)._replace(ragged_k=ragged_k, pack_gqa=pack_gqa): None
        for row in rows_that_serve(features)
        for ragged_k in ragged
        for pack_gqa in (possible_packs(features, group) if row.config.cluster == 1 else [1])
    }
    return tuple(found)


def _beside(features: Features, config: Sm100Forward) -> Sm100Forward:
    """The config, without the polynomial for dropout with one tile: MUFU does not limit, registers do."""
    return config._replace(polynomial=0) if features.dropout and config.q_tiles == 1 else config


@lru_cache(maxsize=1024)
def rows_that_serve(features: Features) -> tuple[Row, ...]:
    """The rows that admit the features, up to the first one that admits all sizes."""
    rows = [row for row in TABLE if row.admits_features(features)]
    last = next((i for i, row in enumerate(rows) if row.rows is None and row.config.cluster == 1), len(rows))
    return tuple(rows[: last + 1])


def fits(features: Features, config: Sm100Forward) -> bool:
    """Whether it may be a pair, SMEM has room for it, TMEM for O, and Q's place for O."""
    return (
        (config.cluster == 1 or may_pair(features))
        and config.shared_memory(features) <= SHARED_MEMORY
        and config.tensor_memory(features) <= 512
        and (not config.o_over_q or tile_dim(features.Dv) <= tile_dim(features.D))
    )
