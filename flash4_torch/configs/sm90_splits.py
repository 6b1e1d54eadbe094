"""Splits of keys of the Hopper forward kernel, in tiles of `sm90`'s rows."""

from __future__ import annotations

from . import sm90
from .sizes import Sizes
from .splits import Candidate, Splits
from .types import Features, Sm90Forward, tile_dim


def _whole(features: Features, sizes: Sizes) -> Candidate:
    row = sm90.row(features, sizes)
    return Candidate(row, row.time)


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
    return [Candidate(row, row.time) for row in few]


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
