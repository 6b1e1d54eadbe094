"""The Hopper forward kernel's tiles: which to take for which call, and why.

`TABLE` is read from the top: the first row that admits the call, and is not for few tiles, serves launches
of many tiles. If there are few, a row with other warpgroups may be done first, and serves the call: `row`
estimates both. The last column says what a row was measured at: bfloat16, 32k tokens of hidden size 2048
on an H200, throughput relative to the best peer's. Times were fitted to launches of up to seven waves there,
next to 128 to 32k keys, full and causal (`sm90-waves-h200.json`); unmeasured rows have guesses from others.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from . import programs
from .packing import best_pack, possible_packs, rows_that_share_keys
from .sizes import Sizes, may_end_inside, possible_ends
from .types import SHARED_MEMORY, Features, Sm90Forward, tile_dim
from .waves import TileTime, launch_of

_REGISTERS = {1: 216, 2: 240, 3: 160, 4: 112}
_REGISTERS_WITH_DROPOUT = {1: 208, 2: 208}
_REGISTERS_WITH_DROPOUT_AND_WIDE_O = {1: 216, 2: 224}
_TEMPORARIES = 28
"""Registers next to O, S and P: the tightest plans that do not spill leave this many."""
_BOOL_MASK_TEMPORARIES = 4
_SOFTCAP_TEMPORARIES = 4
_DROPOUT_TEMPORARIES = 4
_MOD_TEMPORARIES = 24
"""Programs that load numbers for each score or compute many: as many as such ones spill without."""
_LIGHT_MOD_TEMPORARIES = 4
"""Programs like ALiBi and softcap, and bounds of rows."""
_FUNCTION_TEMPORARIES = 4
"""Functions in programs next to a left bound: softcap in 192 x 128 at D 64 spilled."""
_PAGED_SOFTCAP_TEMPORARIES = 4
"""Softcap and pages: a bounded tile has no half blocks there, and 192 x 128 at D 64 spilled."""

MAX_D = 256
_MOST_OF_ENTRIES = 256
"""Keys that a row of a stack sees, at most, by a bound of the table."""
_QUERIES_OF_CLUSTERS = 1024
"""The fewest queries for clusters: a tile without a partner leaves half a cluster idle."""
_CLEARLY = 0.95
"""A row for few tiles serves a call if its time is less than this share of the first row's: estimates err."""


class Length(NamedTuple):
    """What rows go by of a call's sizes."""

    bound: int | None
    """The least of the table's bounds that the keys keep which a query row sees; None: none."""
    is_short: bool
    """Whether query rows next to the same keys keep it, too."""


_ANY_LENGTH = Length(None, False)


class Row(NamedTuple):
    """A row for head sizes up to (D, Dv). None: whatever the call has."""

    D: int
    Dv: int
    right: bool | None
    """Whether the band is bounded to the right, as it is for causal calls."""
    keys: int | None
    """A query row sees up to this many keys."""
    config: Sm90Forward
    time: TileTime
    why: str
    few: bool = False
    """Only for few tiles."""
    least_box: int = 0
    """Only for keys in pages, in boxes of so many keys or more."""
    short: bool = False
    """Only for as many query rows as keys, at most; then it serves any number of tiles."""

    def admits(self, length: Length) -> bool:
        """Whether it is for calls of that length."""
        bound, is_short = length
        few_keys = self.keys is None or (bound is not None and bound <= self.keys)
        return few_keys and (is_short or not self.short)

    def admits_features(self, features: Features) -> bool:
        return (
            features.D <= self.D
            and features.Dv <= self.Dv
            and self.right in (None, features.right)
            and self.least_box <= features.page_box
            # In 128 rows a mask's bits next to dropout's spilled at D 40.
            and not (self.short and features.mask and features.dropout)
            and fits(features, self.config)
        )


# fmt: off
_Tiles, _Time = Sm90Forward, TileTime
TABLE = (
    # D   Dv   right  keys
    Row(64, 64, True, 64, _Tiles(1, 64, 4, 2, k_ahead=True), _Time(6.5, 900),
        "S 48 and 64: 0.59 to 0.73 of the time in tiles of 256 rows", short=True),
    Row(64, 64, True, 128, _Tiles(2, 64, 4, 2, next_tile=True, k_ahead=True), _Time(9.4, 1500),
        "S 80 to 128: 0.61 to 0.77 of the time in tiles of 256 rows, 128 keys in a block 0.73 to 0.82",
        short=True),
    Row(64, 64, True, 192, _Tiles(3, 64, 4, 2, k_ahead=True), _Time(10.8, 1800),
        "S 144 to 192: 0.78 to 0.85 of the time in tiles of 256 rows", short=True),
    Row(64, 64, True, 256, _Tiles(4, 64, 4, 2, k_ahead=True), _Time(11.0, 1000),
        "S 256: 1.27 of the best peer, with next_tile and lazy_rescale 1.22; tiles fit the diagonal"),
    Row(64, 64, None, 1536, _Tiles(4, 64, 4, 2, next_tile=True, lazy_rescale=True), _Time(17.0, 1500),
        "full S 256 to 1k: 1.14 to 1.23; causal S 512 and 1k: 1.20 and 1.13"),
    Row(64, 64, True, None, _Tiles(3, 128, 3, 2, pingpong=True, k_ahead=True, half_block=True),
        _Time(10.8, 1800),
        "S 2k and 4k: 1.08 and 1.05, 16k: 0.97 to 1.01; with lazy_rescale 0.01 to 0.03 less"),
    Row(64, 64, None, None, _Tiles(3, 128, 3, 2, pingpong=True, k_ahead=True), _Time(10.9, 1800),
        "S 2k and 4k: 1.05 to 1.07, 1.01 to 1.03; 16k: 0.90 to 1.005; four warpgroups 0.03 less"),
    Row(64, 64, None, None, _Tiles(3, 112, 3, 2, pingpong=True), _Time(11.5, 1800),
        "features that need registers: below 128 keys, above two warpgroups"),
    Row(64, 64, None, None, _Tiles(2, 128, 4, 2, pingpong=True, next_tile=True, k_ahead=True),
        _Time(8.7, 1500), "without pingpong 1.02 to 1.16 of its time", few=True),
    Row(64, 64, None, None, _Tiles(1, 128, 4, 2, next_tile=True, k_ahead=True), _Time(5.9, 900),
        "without next_tile and k_ahead up to 1.1 of its time with several waves, else the same", few=True),
    Row(64, 64, None, None, _Tiles(1, 96, 4, 2, k_ahead=True), _Time(6.5, 900),
        "floating masks: 128 keys have no registers; 0.69 of two warpgroups' time", few=True),
    Row(64, 64, None, None, _Tiles(2, 128, 4, 2, next_tile=True, k_ahead=True, lazy_rescale=True),
        _Time(9.4, 1500),
        "dropout: 1.03 to 1.1 of that without lazy_rescale; and features that need many registers"),

    Row(96, 96, False, 3072, _Tiles(2, 128, 3, 2, pingpong=True, next_tile=True, k_ahead=True),
        _Time(9.8, 1800), "S 1k: 1.20; three warpgroups of 96 keys 1.15"),
    Row(96, 96, True, 3072, _Tiles(2, 128, 3, 2, next_tile=True, k_ahead=True), _Time(9.8, 1800),
        "S 1k: 1.30"),
    Row(96, 96, False, None,
        _Tiles(3, 96, 3, 2, next_tile=True, k_ahead=True, lazy_rescale=True, exp_quarters_before_pv=2),
        _Time(13.1, 2800),
        "S 8k: 1.01; the wait left to ptxas 1.00, 3 quarters 0.99, two warpgroups 0.95"),
    Row(96, 96, True, None, _Tiles(3, 112, 2, 2, k_ahead=True, pingpong=True, lazy_rescale=True),
        _Time(13.1, 2800),
        "S 8k: 1.02, without lazy_rescale 1.016; from pages of any size 0.01 to 0.03 more than 96 keys"),
    Row(96, 96, None, None, _Tiles(2, 128, 3, 2, next_tile=True, k_ahead=True), _Time(9.8, 1800),
        "next to 8k and 32k keys; with pingpong up to 0.08 less time if causal", few=True),
    Row(96, 96, None, None, _Tiles(1, 128, 3, 2, next_tile=True, k_ahead=True), _Time(7.0, 1300),
        "as for 64", few=True),
    Row(96, 96, None, None, _Tiles(1, 96, 3, 2, k_ahead=True), _Time(7.7, 1300),
        "floating masks, as for 64; unmeasured", few=True),
    Row(96, 96, None, None, _Tiles(2, 128, 3, 2, k_ahead=True), _Time(10.0, 1800),
        "features that need registers"),

    Row(128, 128, False, 768, _Tiles(2, 128, 2, 2, pingpong=True, next_tile=True, k_ahead=True),
        _Time(10.9, 1900), "S 256 and 512: 1.05 and 1.12"),
    Row(128, 128, False, 3072,
        _Tiles(2, 128, 2, 2, next_tile=True, k_ahead=True, exp_quarters_before_pv=1), _Time(10.9, 1900),
        "S 1k and 2k: 1.08 and 1.05; the wait left to ptxas 0.002 less, 2 quarters 0.04"),
    Row(128, 128, True, 3072, _Tiles(2, 128, 2, 2, pingpong=True, next_tile=True, k_ahead=True),
        _Time(10.9, 1900),
        "S 256 to 2k: 1.00, 1.14, 1.07, 1.01; at 256 memory is the limit; tiles of 192 x 80 0.03 less"),
    Row(128, 128, True, 6144,
        _Tiles(2, 128, 2, 2, pingpong=True, next_tile=True, k_ahead=True, cluster=2), _Time(10.9, 1900),
        "S 4k: 1.005; without clusters 0.999, but 16k 0.99"),
    Row(128, 128, None, None, _Tiles(2, 128, 2, 2, pingpong=True, next_tile=True, k_ahead=True),
        _Time(10.9, 1900), "boxes of 16 keys, which 80 leave in any page, would be a fifth more copies",
        least_box=32),
    Row(128, 128, None, None, _Tiles(3, 80, 2, 2, pingpong=True, k_ahead=True, lazy_rescale=True),
        _Time(15.4, 3200), "full S 4k to 16k: 1.03 to 1.06; causal S 16k: 1.01, 128 keys 0.99"),
    Row(128, 128, True, None, _Tiles(2, 128, 2, 2, pingpong=True, next_tile=True, k_ahead=True),
        _Time(10.9, 1900), "next to 8k and 32k keys as fast as without pingpong", few=True),
    Row(128, 128, None, None,
        _Tiles(2, 128, 2, 2, next_tile=True, k_ahead=True, exp_quarters_before_pv=1), _Time(10.9, 1900),
        "next to 8k and 32k keys; with pingpong 1.03 of its time", few=True),
    Row(128, 128, None, None, _Tiles(1, 128, 2, 2, next_tile=True, k_ahead=True), _Time(8.1, 1400),
        "as for 64", few=True),
    Row(128, 128, None, None, _Tiles(1, 80, 2, 2, k_ahead=True), _Time(9.0, 1400),
        "floating masks, as for 64", few=True),
    Row(128, 128, None, None,
        _Tiles(2, 128, 2, 2, next_tile=True, k_ahead=True, lazy_rescale=True, o_over_q=True),
        _Time(10.9, 1900),
        "dropout, whose keep bits take the room that O would have; with pingpong 0.99"),

    Row(192, 128, None, None, _Tiles(2, 96, 2, 1, k_ahead=True), _Time(13.0, 3000),
        "as for 128", least_box=32),
    Row(192, 128, None, None, _Tiles(2, 112, 2, 1, k_ahead=True), _Time(13.0, 3000),
        "unmeasured: the most keys in two stages next to Q and O"),
    Row(192, 128, None, None, _Tiles(1, 112, 2, 2), _Time(9.6, 2500), "unmeasured", few=True),

    Row(192, 192, None, None,
        _Tiles(2, 64, 2, 2, next_tile=True, k_ahead=True, lazy_rescale=True, o_over_q=True,
               exp_quarters_before_pv=2), _Time(14.5, 4000), "as for 128", least_box=64),
    Row(192, 192, None, None,
        _Tiles(2, 80, 2, 2, next_tile=True, k_ahead=True, lazy_rescale=True, o_over_q=True,
               exp_quarters_before_pv=2), _Time(14.5, 4000),
        "full S 1k and 8k: 1.10 and 1.03; causal: 1.09 and 1.00; 112 keys, one stage of Q 0.01 to 0.08 less"),
    Row(192, 192, None, None, _Tiles(1, 96, 2, 1, k_ahead=True), _Time(10.7, 3300),
        "with 112 keys causal bool masks spill", few=True),
    Row(192, 192, None, None, _Tiles(1, 64, 2, 1, k_ahead=True), _Time(12.0, 3300),
        "floating masks, as for 64; unmeasured", few=True),
    Row(192, 192, None, None, _Tiles(2, 64, 2, 1, k_ahead=True, lazy_rescale=True), _Time(14.5, 4000),
        "as for 128", least_box=64),
    Row(192, 192, None, None, _Tiles(2, 80, 2, 1, k_ahead=True, lazy_rescale=True), _Time(14.5, 4000),
        "features that need registers, or Dv > D"),

    Row(256, 256, None, None, _Tiles(2, 64, 2, 1, k_ahead=True, lazy_rescale=True), _Time(19.7, 3800),
        "as for 128: small D or Dv", least_box=32),
    Row(256, 256, None, None, _Tiles(2, 80, 2, 1, k_ahead=True, lazy_rescale=True), _Time(17.0, 3800),
        "unmeasured: small D or Dv"),
    Row(256, 256, None, 3072,
        _Tiles(2, 64, 2, 1, pingpong=True, k_ahead=True, lazy_rescale=True, o_over_q=True),
        _Time(19.7, 3800),
        "S 1k: full 1.02, causal 1.05; without pingpong or with 80 keys 0.01 less, with clusters 0.03"),
    Row(256, 256, None, None,
        _Tiles(2, 64, 2, 1, pingpong=True, k_ahead=True, lazy_rescale=True, o_over_q=True, cluster=2),
        _Time(19.7, 3800),
        "S 4k and 16k: full 1.04 and 1.02, causal 1.02; without clusters 1.03 and 1.02, 1.005"),
    Row(256, 256, None, None, _Tiles(1, 80, 2, 1, k_ahead=True), _Time(13.3, 4000),
        "without k_ahead up to 1.02 of its time", few=True),
    Row(256, 256, None, None, _Tiles(2, 48, 2, 1, k_ahead=True, lazy_rescale=True), _Time(21.0, 3800),
        "features that need registers, or Dv > D"),
    Row(256, 256, None, None, _Tiles(2, 32, 2, 1, k_ahead=True, lazy_rescale=True), _Time(25.0, 3800),
        "dropout with a floating mask"),
)
# fmt: on


def forward(features: Features, sizes: Sizes) -> Sm90Forward:
    """The config of a call.

    Args:
        features: what the kernel computes; its `page_box` is `widest_box` of the page size.
        sizes: the call's.
    """
    config = row(features, sizes).config
    ragged_k = may_end_inside(features, sizes, config.keys)
    config = config if sizes.Sq >= _QUERIES_OF_CLUSTERS else config._replace(cluster=1)
    return completed(features, config, ragged_k, best_pack(features, config.rows, sizes))


def row(features: Features, sizes: Sizes) -> Row:
    """The row that serves a call: see `forward`."""
    rows = candidates(features, _length(features, sizes))
    if rows[0].short:
        return rows[0]
    best, least = rows[0], math.inf
    for candidate in rows:
        ns = launch_of(features, sizes, candidate.config).ns(candidate.time)
        if ns < least:
            best, least = candidate, ns if candidate is not rows[0] else _CLEARLY * ns
    return best


def limits(features: Features) -> list[str]:
    """Why no row serves the features, whose head sizes may be any."""
    if max(features.D, features.Dv) <= MAX_D:
        return []
    return [f"D is {features.D} and Dv is {features.Dv}, and it serves up to {MAX_D}"]


def reachable(features: Features, group: int | None = None) -> tuple[Sm90Forward, ...]:
    """Every config that `forward` returns for some sizes; with `group`, for that many heads of a KV head."""
    packs = possible_packs(features, group)
    ragged = possible_ends(features)
    found = {
        completed(features, row.config._replace(cluster=cluster), ragged_k, pack_gqa): None
        for row in dict.fromkeys(row for length in _lengths(features) for row in _serving(features, length))
        for cluster in sorted({1, row.config.cluster})
        for ragged_k in ragged
        for pack_gqa in packs
    }
    return tuple(found)


@lru_cache(maxsize=1024)
def candidates(features: Features, length: Length = _ANY_LENGTH) -> tuple[Row, ...]:
    """The row for many tiles, and the first of each other number of warpgroups."""
    rows = [row for row in TABLE if row.admits(length) and row.admits_features(features)]
    first = next(row for row in rows if not row.few)
    by_warpgroups = {first.config.warpgroups: first}
    for row in rows:
        by_warpgroups.setdefault(row.config.warpgroups, row)
    return tuple(by_warpgroups.values())


def _bound(keys: int) -> int | None:
    """The least of the table's bounds that so many keys keep."""
    return next((bound for bound in _BOUNDS if keys <= bound), None)


_BOUNDS = sorted({row.keys for row in TABLE if row.keys is not None})


def _length(features: Features, sizes: Sizes) -> Length:
    bound = _bound(sizes.keys)
    return Length(bound, bound is not None and rows_that_share_keys(features, sizes) <= bound)


def _lengths(features: Features) -> list[Length]:
    """The lengths that calls with these features may have: a stack is long, and its rows see few keys."""
    if features.is_stacked:
        return [Length(bound, False) for bound in _BOUNDS if bound <= _MOST_OF_ENTRIES]
    bounded = [Length(bound, is_short) for bound in _BOUNDS for is_short in (False, True)]
    return [*bounded, _ANY_LENGTH]


def _serving(features: Features, length: Length) -> tuple[Row, ...]:
    """The rows that serve calls of a length."""
    rows = candidates(features, length)
    return rows[:1] if rows[0].short else rows


def completed(features: Features, config: Sm90Forward, ragged_k: bool, pack_gqa: int) -> Sm90Forward:
    """A row's config for one call.

    With a left bound, a mask or bounds of rows a warpgroup may skip so many blocks that they would hold up
    the next tile, and a mask's bits are read for whole blocks. A cluster's two tiles have one sequence and no
    mask. With dropout a wait that is left to ptxas is faster (D 192: by 7 %). Next to pages and
    ramps ptxas serialises half blocks.
    """
    halves = not (features.lists_blocks or features.page_box or features.mods.ramp)
    return config._replace(
        cluster=1 if features.varlen or features.lists_blocks or features.dropout else config.cluster,
        next_tile=config.next_tile and not (features.left or features.lists_blocks or features.mods.bounds),
        half_block=config.half_block and halves,
        exp_quarters_before_pv=0 if features.dropout else config.exp_quarters_before_pv,
        ragged_k=ragged_k,
        pack_gqa=pack_gqa,
    )


def fits(features: Features, config: Sm90Forward) -> bool:
    """Whether the GPU has room for it: in shared memory, in registers, and in Q's place for O."""
    return (
        config.shared_memory(features) <= SHARED_MEMORY
        and registers(features, config) <= available_registers(features, config)
        and (not config.o_over_q or tile_dim(features.Dv) <= tile_dim(features.D))
    )


def available_registers(features: Features, config: Sm90Forward) -> int:
    """The most that `registers` may be: about what a consumer's thread has; 0 for too many warpgroups."""
    of = _REGISTERS
    if features.dropout:
        of = _REGISTERS_WITH_DROPOUT if features.rng_warpgroup else _REGISTERS_WITH_DROPOUT_AND_WIDE_O
    return of.get(config.warpgroups, 0)


def registers(features: Features, config: Sm90Forward) -> int:
    """Registers that a consumer's thread needs, about: O and S in float32, P in 16 bits, temporaries.

    64 rows are 128 threads' work, so each column costs half a register, one of P a quarter.
    """
    columns = tile_dim(features.Dv) // 2 + config.keys // 2 + config.keys // 4
    extras = (
        _BOOL_MASK_TEMPORARIES * (features.mask == "bool")
        + _SOFTCAP_TEMPORARIES * features.softcap
        + _DROPOUT_TEMPORARIES * features.dropout
        + _of_mods(features)
        + _PAGED_SOFTCAP_TEMPORARIES * (features.softcap and features.page_box > 0)
    )
    return columns + _TEMPORARIES + extras + _bias(features, config)


def _of_mods(features: Features) -> int:
    """Registers of programs, block masks and bounds of rows."""
    mods = features.mods
    if not any(mods):
        return 0
    texts = [text for text in (mods.score_mod, mods.mask_mod) if text]
    if mods.blocks or not all(map(programs.is_light, texts)):
        return _MOD_TEMPORARIES
    has_functions = features.left and any(map(programs.has_functions, texts))
    return _LIGHT_MOD_TEMPORARIES + _FUNCTION_TEMPORARIES * has_functions


def _bias(features: Features, config: Sm90Forward) -> int:
    """Registers of a floating mask, loaded before the scores that it is added to: fitted to what spilled."""
    if features.mask in ("", "bool"):
        return 0
    return (config.keys - 16) * 3 // 4 + 48 * config.o_over_q
