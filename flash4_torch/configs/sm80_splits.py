"""Splits of keys of the forward by mma.sync, in tiles of `sm80`'s rows.

Times of tiles were fitted to what an H200 measured: one tile on each of its SMs and two, next to 2k and 8k
keys, in bfloat16 at D 64 to 256, in float32 at D 64, 128 and 256. Other GPUs take longer, for two pieces as
for one.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from . import sm80
from .sizes import Sizes
from .splits import Candidate, Splits
from .types import RESERVED_BYTES, Features, Sm80Forward, tile_dim
from .waves import TileTime

_NS_16_BITS = {1: 0.0018, 2: 0.0014}
"""Time of a row, a key and a column, by the MMAs of rows that a warp has side by side."""
_NS_TF32, _NS_EXACT, _NS_OF_SHARED_ROWS = 0.0044, 0.0088, 1.4
"""The same of float32; the last one is a factor where several warps share rows."""
_BESIDES_NS, _BESIDES_NS_PER_COLUMN = 2000.0, 35.0
_ALONE = 0.65
"""The share of the time of two tiles on an SM that one takes: 0.58 to 0.70."""
_REGISTERS_OF_WARPS = 8
"""Warps whose registers fill an SM, of as many as a thread may have."""


class _Gpu(NamedTuple):
    """A table, and bytes of shared memory of an SM."""

    table: sm80.Table
    bytes: int


def _candidate(gpu: _Gpu, features: Features, row: sm80.Row) -> Candidate:
    config, columns = row.config, (features.D + features.Dv) / 2
    rate = _NS_16_BITS[config.row_mmas]
    if features.is_float32:
        rate = _NS_EXACT if features.is_exact else _NS_TF32
    if config.column_warps > 1:
        rate *= _NS_OF_SHARED_ROWS
    fit = gpu.bytes // (config.shared_memory(features) + RESERVED_BYTES)
    at_once = min(fit, _REGISTERS_OF_WARPS // config.warps)
    time = TileTime(rate * config.rows * columns * at_once, _BESIDES_NS + _BESIDES_NS_PER_COLUMN * columns)
    alone = 1.0 if at_once == 1 else _ALONE
    return Candidate(row, time, at_once, alone, 1 if _leaves_room(features, config) else 2)


def _leaves_room(features: Features, config: Sm80Forward) -> bool:
    """Whether threads have so few registers that an SM takes a third CTA: of two waves the first one is
    larger then, and slower: 1.3 times as long next to 131k keys at D 96.
    """
    return not features.is_float32 and config.row_mmas == 1 and tile_dim(features.Dv) <= 96


def _whole(gpu: _Gpu, features: Features, sizes: Sizes) -> Candidate:
    return _candidate(gpu, features, gpu.table.row(features, sizes))


def _candidates(gpu: _Gpu, features: Features) -> list[Candidate]:
    """The first row of each number of query rows. Where warps share rows of 16-bit numbers, O has no way to
    memory in float32.
    """
    by_rows: dict[int, sm80.Row] = {}
    for row in gpu.table.rows_that_serve(features):
        if row.config.column_warps == 1 or features.is_float32:
            by_rows.setdefault(row.config.rows, row)
    return [_candidate(gpu, features, row) for row in by_rows.values()]


def _completed(gpu: _Gpu, features: Features, config: Sm80Forward, pack_gqa: int) -> Sm80Forward:
    # With Q split, too, eight warps with 128 columns spill twice.
    return gpu.table.completed(features, config, True, pack_gqa)._replace(splits_q=False)


def _of(table: sm80.Table, sm_bytes: int) -> Splits:
    gpu = _Gpu(table, sm_bytes)
    return Splits(partial(_whole, gpu), partial(_candidates, gpu), partial(_completed, gpu))


LARGE = _of(sm80.LARGE, 164 * 1024)
SMALL = _of(sm80.SMALL, 100 * 1024)
ON_REQUEST = _of(sm80.ON_REQUEST, 228 * 1024)
