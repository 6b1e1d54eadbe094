"""Splits of keys of the Hopper forward kernel, in tiles of `sm90`'s rows."""

from __future__ import annotations

from . import programs, sm90
from .sizes import Sizes
from .splits import Candidate, Splits
from .types import Features, Sm90Forward, tile_dim

_FLOAT_MASK, _PROGRAM, _FUNCTIONS, _LOADS = 1.4, 1.2, 1.7, 3.5
"""How many times as long keys take next to a floating mask, and next to a program: any, one that computes
functions like tanh, one that loads a number for each score. Measured at D 128, one query of 8 sequences.
"""


def _whole(features: Features, sizes: Sizes) -> Candidate:
    return _candidate(features, sm90.row(features, sizes))


def _candidate(features: Features, row: sm90.Row) -> Candidate:
    return Candidate(row, row.time._replace(per_key=row.time.per_key * _slowdown(features)))


def _slowdown(features: Features) -> float:
    texts = [text for text in (features.mods.score_mod, features.mods.mask_mod) if text]
    if any(map(programs.loads_often, texts)):
        return _LOADS
    if any(map(programs.has_functions, texts)):
        return _FUNCTIONS
    return _PROGRAM if texts else _FLOAT_MASK if features.float_mask else 1.0


_LOAD_REGISTERS = 24
"""Registers of a consumer's thread that the load warp has next to several warpgroups: it finds splits."""


def _candidates(features: Features) -> list[Candidate]:
    """Rows for many keys; three warpgroups won one of 192 cells, by little. Next to programs one warpgroup,
    whose tiles have the fewest rows that nobody asked for.
    """
    rows = [row for row in sm90.candidates(features, None) if _has_registers(features, row.config)]
    if any(features.mods):
        rows = [row for row in rows if row.config.warpgroups == 1]
    few = [row for row in rows if row.config.warpgroups < 3] or rows
    return [_candidate(features, row) for row in few]


def _has_registers(features: Features, config: Sm90Forward) -> bool:
    """Next to floating masks two warpgroups of wide heads spilled, and 64 rows were faster anyhow; so did one
    warpgroup with softcap, and a window, above 128 columns.
    """
    if features.float_mask and (config.warpgroups > 1 or (features.softcap and tile_dim(features.Dv) > 128)):
        return False
    taken = _LOAD_REGISTERS if config.warpgroups > 1 else 0
    return sm90.registers(features, config) + taken <= sm90.available_registers(features, config)


def _completed(features: Features, config: Sm90Forward, pack_gqa: int) -> Sm90Forward:
    """A row's config. Clusters would have two tiles; ptxas serialises half blocks next to splits."""
    config = config._replace(cluster=1, half_block=False)
    return sm90.completed(features, config, ragged_k=True, pack_gqa=pack_gqa)


SPLITS = Splits(_whole, _candidates, _completed)
