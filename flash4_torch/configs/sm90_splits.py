"""Splits of keys of the Hopper forward kernel: in `sm90`'s tiles, or next to programs in other ones."""

from __future__ import annotations

from . import programs, sm90
from .sizes import Sizes
from .splits import Candidate, Splits
from .types import Features, Sm90Forward, tile_dim
from .waves import TileTime

_FLOAT_MASK_NS, _PROGRAM_NS, _FUNCTIONS_NS, _LOADS_NS = 3.5, 3.0, 5.8, 20.0
"""What a key of 64 rows takes more next to a floating mask, and next to a program: any, one that computes
functions like tanh (softcap too), one that loads a number for each score. Fitted to one query of 8 sequences.
"""
_OF_TWO = 1.4
"""How many times as long that takes two CTAs on an SM."""
_LOAD_REGISTERS = 24
"""Registers of a consumer's thread that the load warp has next to several warpgroups: it finds splits."""
_ALONE = 0.8
"""The share of the time of two CTAs on an SM that one takes."""


def _program_rows() -> tuple[sm90.Row, ...]:
    """Tiles next to score_mod, mask_mod, block masks and bounds of rows, by the widest D and Dv."""

    def row(D: int, keys: int, kv_stages: int, at_once: int, time: TileTime, why: str) -> sm90.Row:
        tiles = Sm90Forward(1, keys, kv_stages, 1, k_ahead=True, at_once=at_once)
        return sm90.Row(D, D, None, None, tiles, time, why, few=True)

    return (
        row(64, 64, 4, 2, TileTime(12.5, 900), "one CTA on an SM 1.0 to 1.8 of its time"),
        row(96, 64, 3, 2, TileTime(14.0, 1300), "as for 64; unmeasured"),
        row(96, 32, 6, 2, TileTime(15.0, 1300), "states of single keys: 64 keys spill; unmeasured"),
        row(128, 48, 3, 2, TileTime(12.5, 1400), "one CTA on an SM 1.3 to 1.5; 32 keys 1.4 with tables"),
        row(128, 32, 4, 2, TileTime(13.5, 1400), "block masks, whose blocks 48 keys do not divide"),
        row(192, 32, 4, 1, TileTime(14.0, 3300), "O has no registers twice; 64 keys spill; unmeasured"),
        row(256, 32, 3, 1, TileTime(17.0, 4000), "as for 192"),
    )


_PROGRAM_ROWS = _program_rows()
_MOST_KEYS = {"": 64, "rows": 64, "scores": 32}
"""The most keys in a block, by `Mods.blocks`."""


def _whole(features: Features, sizes: Sizes) -> Candidate:
    return _candidate(features, sm90.row(features, sizes))


def _candidate(features: Features, row: sm90.Row) -> Candidate:
    at_once, warpgroups = row.config.at_once, row.config.warpgroups
    more = _more_ns(features) * (_OF_TWO if at_once == 2 else max(warpgroups / 2, 1.0))
    time = row.time._replace(per_key=row.time.per_key + more)
    return Candidate(row, time, at_once, 1.0 if at_once == 1 else _ALONE)


def _more_ns(features: Features) -> float:
    texts = [text for text in (features.mods.score_mod, features.mods.mask_mod) if text]
    if any(map(programs.loads_often, texts)):
        return _LOADS_NS
    if features.softcap or any(map(programs.has_functions, texts)):
        return _FUNCTIONS_NS
    return _PROGRAM_NS if texts else _FLOAT_MASK_NS if features.float_mask else 0.0


def _candidates(features: Features) -> list[Candidate]:
    """Rows for many keys; three warpgroups won one of 192 cells, by little. softcap takes as long as a
    program.
    """
    if any(features.mods):
        return [_candidate(features, _program_row(features))]
    rows = [row for row in sm90.candidates(features) if _has_registers(features, row.config)]
    few = [row for row in rows if row.config.warpgroups < 3] or rows
    if features.softcap and not (features.mask or features.page_box):
        few.append(_program_row(features))
    return [_candidate(features, row) for row in few]


def _program_row(features: Features) -> sm90.Row:
    """The first row with room for the head sizes; a block mask's blocks have multiples of 32 or 64 keys."""
    widest, blocks = max(features.D, features.Dv), features.mods.blocks
    return next(
        row
        for row in _PROGRAM_ROWS
        if widest <= row.D
        and row.config.keys <= _MOST_KEYS[blocks]
        and not (blocks and _MOST_KEYS[blocks] % row.config.keys)
    )


def _has_registers(features: Features, config: Sm90Forward) -> bool:
    """Next to floating masks two warpgroups of wide heads spilled, and 64 rows were faster anyhow; so did one
    warpgroup with softcap, and a window, above 128 columns.
    """
    if features.float_mask and (config.warpgroups > 1 or (features.softcap and tile_dim(features.Dv) > 128)):
        return False
    taken = _LOAD_REGISTERS if config.warpgroups > 1 else 0
    return sm90.registers(features, config) + taken <= sm90.available_registers(features, config)


def _completed(features: Features, config: Sm90Forward, pack_gqa: int) -> Sm90Forward:
    """A row's config. Clusters would have two tiles; ptxas serialises half blocks next to splits. Most CTAs
    have one tile: with `next_tile` 1.01 to 1.14 of the time.
    """
    config = config._replace(cluster=1, half_block=False, next_tile=False)
    return sm90.completed(features, config, ragged_k=True, pack_gqa=pack_gqa)


SPLITS = Splits(_whole, _candidates, _completed, clearly=0.97)
