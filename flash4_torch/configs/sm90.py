"""The Hopper forward kernel's tiles: which to take for which call, and why.

`TABLE` is read from the top: the first row that admits the call serves it. What a row was measured at stands
in its last column: bfloat16, 32k tokens of hidden size 2048 on an H200, ratios of throughput.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .types import Features, Sm90Forward

SHARED_MEMORY = 227 * 1024
"""Bytes that a CTA may have."""
_BARRIERS_AND_ALIGNMENT = 2048

REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
"""Of a consumer's thread, by consumer warpgroups."""
_TEMPORARIES = 32
"""Registers next to O, S and P: the tightest plans that do not spill leave as many."""
_MASK_TEMPORARIES = {"": 0, "bool": 4, "bfloat16": 12, "float16": 12, "float32": 12}
_SOFTCAP_TEMPORARIES = 4
_DROPOUT_TEMPORARIES = 16

MAX_PACK = 64


class Row(NamedTuple):
    """Head sizes up to (D, Dv); None and left out: whatever the call has."""

    D: int
    Dv: int
    rows: int | None
    """Up to so many query rows that share keys: Sq, times the heads of a group where these are packed."""
    right: bool | None
    """Whether the band is bounded to the right, as it is for causal calls."""
    keys: int | None
    """A row of queries sees up to so many keys."""
    config: Sm90Forward
    why: str

    def admits(self, features: Features, rows: int, keys: int) -> bool:
        return (
            self.admits_features(features)
            and (self.rows is None or rows <= self.rows)
            and (self.keys is None or keys <= self.keys)
        )

    def admits_features(self, features: Features) -> bool:
        return (
            features.D <= self.D
            and features.Dv <= self.Dv
            and self.right in (None, features.right)
            and fits(features, self.config)
        )


def _tiles(
    warpgroups: int,
    keys: int,
    kv_stages: int,
    q_stages: int,
    *,
    pingpong: bool = False,
    next_tile: bool = False,
    k_ahead: bool = False,
    half: bool = False,
    conditional: bool = False,
    o_over_q: bool = False,
) -> Sm90Forward:
    return Sm90Forward(
        warpgroups,
        keys,
        kv_stages,
        q_stages,
        pingpong=pingpong,
        next_tile=next_tile,
        k_ahead=k_ahead,
        half=half,
        conditional=conditional,
        o_over_q=o_over_q,
    )


_W4 = _tiles(4, 64, 4, 2)
_W4_NEXT = _tiles(4, 64, 4, 2, next_tile=True, conditional=True)

# fmt: off
TABLE = (
    # D   Dv   rows  right  keys
    Row(64, 64, 64, None, None, _tiles(1, 128, 4, 2),
        "unmeasured: rows of a second warpgroup would be empty"),
    Row(64, 64, 128, None, None, _tiles(2, 128, 4, 2),
        "unmeasured: rows of a third warpgroup would be empty"),
    Row(64, 64, None, False, 1536, _W4_NEXT,
        "S 256 to 1k: 1.15 to 1.21 of the best peer; next_tile 1.02, conditional 1.03 to 1.05"),
    Row(64, 64, None, True, 768, _W4,
        "S 256 and 512: 1.21 to 1.29; tiles of 64 keys fit the diagonal of each warpgroup"),
    Row(64, 64, None, True, 1536, _W4_NEXT,
        "S 1k: 1.17"),
    Row(64, 64, None, True, 8192, _tiles(3, 128, 3, 2, pingpong=True, half=True),
        "S 2k and 4k: 1.10 to 1.13; half 1.05; a fifth fewer instructions than 256 x 64"),
    Row(64, 64, None, None, None, _tiles(3, 128, 3, 2, pingpong=True),
        "S 2k to 16k: 1.00 to 1.10; pingpong 1.02 to 1.09"),
    Row(64, 64, None, None, None, _tiles(3, 112, 3, 2, pingpong=True),
        "features that need registers: below 128 keys, above two warpgroups"),
    Row(64, 64, None, None, None, _tiles(2, 128, 4, 2),
        "features that need many registers"),

    Row(96, 96, 64, None, None, _tiles(1, 128, 3, 2), "unmeasured, as for 64"),
    Row(96, 96, None, False, 3072, _tiles(2, 128, 3, 2, pingpong=True, next_tile=True, k_ahead=True),
        "unmeasured, as for 128"),
    Row(96, 96, None, True, 1536, _tiles(2, 128, 3, 2, next_tile=True, k_ahead=True, half=True),
        "unmeasured, as for 128"),
    Row(96, 96, 128, None, None, _tiles(2, 128, 3, 2, k_ahead=True), "unmeasured, as for 64"),
    Row(96, 96, None, None, None, _tiles(3, 96, 3, 2, k_ahead=True, conditional=True),
        "unmeasured: the most keys whose S and P fit three warpgroups' registers"),
    Row(96, 96, None, None, None, _tiles(2, 128, 3, 2, k_ahead=True),
        "features that need registers"),

    Row(128, 128, 64, None, None, _tiles(1, 128, 3, 1), "unmeasured, as for 64"),
    Row(128, 128, None, False, 3072, _tiles(2, 128, 2, 2, pingpong=True, next_tile=True, k_ahead=True),
        "S 256 to 2k: 1.04 to 1.09"),
    Row(128, 128, None, True, 1536, _tiles(2, 128, 2, 2, next_tile=True, k_ahead=True, half=True),
        "S 256 to 1k: 0.99 to 1.15; pingpong 0.92 to 1.00 here; half 1.01, next_tile 1.02 to 1.06"),
    Row(128, 128, 128, None, None, _tiles(2, 128, 2, 2, k_ahead=True), "unmeasured, as for 64"),
    Row(128, 128, None, None, None, _tiles(3, 80, 2, 2, k_ahead=True, conditional=True),
        "full S 4k and 16k: 1.04; causal S 2k to 16k: 0.98 to 1.02; conditional 1.04; less L2 traffic"),
    Row(128, 128, None, None, None, _tiles(2, 128, 2, 2, k_ahead=True),
        "features that need registers"),

    Row(192, 128, 64, None, None, _tiles(1, 112, 2, 2), "unmeasured, as for 64"),
    Row(192, 128, None, None, None, _tiles(2, 112, 2, 1, k_ahead=True),
        "unmeasured: the most keys in two stages beside Q and O"),

    Row(192, 192, 64, None, None, _tiles(1, 112, 2, 1), "unmeasured, as for 64"),
    Row(192, 192, None, None, 1536, _tiles(2, 80, 2, 1, k_ahead=True, conditional=True),
        "unmeasured: the most keys in two stages beside Q and O"),
    Row(192, 192, None, None, None, _tiles(2, 112, 2, 1, k_ahead=True, o_over_q=True),
        "unmeasured: a third more keys, once a tile's rows see many"),
    Row(192, 192, None, None, None, _tiles(2, 80, 2, 1, k_ahead=True, conditional=True),
        "features that need registers, or Dv > D"),

    Row(256, 256, 64, None, None, _tiles(1, 80, 2, 1), "unmeasured, as for 64"),
    Row(256, 256, None, None, None, _tiles(2, 80, 2, 1, k_ahead=True, conditional=True),
        "unmeasured: small D or Dv"),
    Row(256, 256, None, None, None, _tiles(2, 80, 2, 1, k_ahead=True, conditional=True, o_over_q=True),
        "unmeasured: O beside Q would leave room for 48 keys"),
    Row(256, 256, None, None, None, _tiles(2, 48, 2, 1, k_ahead=True, conditional=True),
        "features that need registers, or Dv > D"),
)
# fmt: on


def forward(
    features: Features,
    Sq: int,
    Sk: int,
    group: int = 1,
    seen: int | None = None,
    none_sees_nothing: bool = True,
) -> Sm90Forward:
    """The config of a call.

    Args:
        features: what the kernel computes.
        Sq: query positions; of the longest sequence if varlen, like Sk.
        Sk: key positions.
        group: query heads of each key head.
        seen: how many keys a row sees at most, by its window. Default: Sk.
        none_sees_nothing: whether every row sees a key.
    """
    seen = Sk if seen is None else min(seen, Sk)
    rows = Sq * _cover(group) if _may_pack(features) else Sq
    row = next(row for row in TABLE if row.admits(features, rows, seen))
    tail = features.varlen or Sk % row.config.keys != 0
    next_tile = _may_draw_next(features) and (none_sees_nothing or not features.right)
    return _completed(features, row.config, next_tile, tail, _pack(features, row.config, Sq, group))


def reachable(features: Features, group: int | None = None) -> tuple[Sm90Forward, ...]:
    """Every config that `forward` returns for some sizes; with `group`, for that many heads a key head."""
    packs = [1]
    if _may_pack(features):
        most = MAX_PACK if group is None else _cover(group)
        packs = [p for p in _powers_of_two() if p <= most]
    found = {
        _completed(features, row.config, next_tile, tail, pack): None
        for row in TABLE
        if row.admits_features(features)
        for next_tile in {_may_draw_next(features), _may_draw_next(features) and not features.right}
        for tail in {True, features.varlen}
        for pack in packs
    }
    return tuple(found)


def _completed(
    features: Features, config: Sm90Forward, next_tile: bool, tail: bool, pack: int
) -> Sm90Forward:
    """A row's config for one call; `half` is what a row has instead of a `next_tile` that cannot be.

    A mask's bits are read for whole blocks.
    """
    next_tile = config.next_tile and next_tile
    half = config.half and not next_tile and not features.mask
    return config._replace(next_tile=next_tile, half=half, tail=tail, pack=pack)


def _may_draw_next(features: Features) -> bool:
    """Whether a tile's first scores can be computed under another tile.

    It must have some, and no warpgroup may pass over so many blocks that they hold up the other tile's.
    """
    return not (features.left or features.mask or features.varlen)


def _may_pack(features: Features) -> bool:
    """Dropout's numbers and a mask's rows follow single heads."""
    return not features.dropout and not features.mask


def _pack(features: Features, config: Sm90Forward, Sq: int, group: int) -> int:
    """How many heads to a tile give the fewest tiles; of equals the fewest heads."""
    if not _may_pack(features) or Sq >= config.rows:
        return 1

    def tiles(pack: int) -> int:
        return -(-group // pack) * -(-Sq * pack // config.rows)

    return min((p for p in _powers_of_two() if p <= _cover(group)), key=tiles)


def _powers_of_two() -> Iterator[int]:
    return (1 << n for n in range(MAX_PACK.bit_length()))


def _cover(group: int) -> int:
    """The smallest power of two that holds all heads of the group, at most `MAX_PACK`."""
    return min(1 << max(group - 1, 0).bit_length(), MAX_PACK)


def tile_dim(D: int) -> int:
    """Head size in shared memory."""
    return -(-D // 16) * 16


def fits(features: Features, config: Sm90Forward) -> bool:
    """Whether the machine has room for it."""
    return (
        shared_memory(config, features.D, features.Dv) <= SHARED_MEMORY
        and registers(features, config) <= REGISTERS[config.warpgroups]
        and (not config.o_over_q or tile_dim(features.Dv) <= tile_dim(features.D))
    )


def shared_memory(config: Sm90Forward, D: int, Dv: int) -> int:
    """Bytes of shared memory: Q, K and V in their stages, O, barriers."""
    D, Dv = tile_dim(D), tile_dim(Dv)
    q = config.q_stages * config.rows * D
    kv = config.kv_stages * config.keys * (D + Dv)
    o = 0 if config.o_over_q else config.rows * Dv
    return 2 * (q + kv + o) + _BARRIERS_AND_ALIGNMENT


def registers(features: Features, config: Sm90Forward) -> int:
    """Registers that a consumer's thread needs, about: O and S in float32, P in 16 bits, temporaries.

    64 rows are 128 threads' work, so each column costs half a register, P's a quarter.
    """
    columns = tile_dim(features.Dv) // 2 + config.keys // 2 + config.keys // 4
    extras = (
        _MASK_TEMPORARIES[features.mask]
        + _SOFTCAP_TEMPORARIES * features.softcap
        + _DROPOUT_TEMPORARIES * features.dropout
    )
    return columns + _TEMPORARIES + extras
