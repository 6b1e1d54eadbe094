"""How many batch entries of short sequences make one sequence, where kernels are faster so.

Measured on an H200 in bfloat16 (`short-sequences-h200.json`); Blackwell's are guesses from there.
"""

from __future__ import annotations

from typing import NamedTuple

_TILE = 128
"""Keys of the backward's tiles."""
_BLOCK = 64
"""Keys of the forward's blocks: entries as long as one share none with their neighbours."""
_TURNS = 2
"""Heads of all entries for each SM, from which on entries share tiles: fewer run at the same time anyway."""
_WIDE = 64
"""Columns up to which entries may be longer: masked scores cost more the more columns they have."""


class Batch(NamedTuple):
    """The sizes of a call that decide."""

    B: int
    Sq: int
    Sk: int
    Hk: int
    columns: int
    """The larger one of D and Dv."""
    end_masked: bool
    """Whether the band is causal."""
    num_sms: int

    @property
    def longest(self) -> int:
        return max(self.Sq, self.Sk)

    @property
    def turns(self) -> float:
        """Heads of all entries for each SM."""
        return self.B * self.Hk / self.num_sms

    @property
    def may_be_stacked(self) -> bool:
        return self.B > 1 and min(self.Sq, self.Sk) > 1 and self.turns >= _TURNS


class Row(NamedTuple):
    """Entries that are stacked in the forward: up to so many rows and keys, from so many turns on."""

    longest: int
    turns: int


_ANY, _FULL_BLOCKS = Row(32, _TURNS), Row(_BLOCK, 2 * _TURNS)
_LONG = {
    # (narrow, causal)
    (True, False): Row(48, 16),
    (True, True): Row(80, 16),
    (False, True): Row(40, 16),
    (False, False): _ANY,
}
"""Entries that share blocks with their neighbours."""
LONGEST = max(row.longest for row in (_ANY, _FULL_BLOCKS, *_LONG.values()))
"""Rows and keys of any entry of a stack, at most."""


def forward(batch: Batch) -> int:
    """Entries of a stack: all, or 1, which is none."""
    narrow = batch.columns <= _WIDE
    rows = [_ANY, _LONG[narrow, batch.end_masked]]
    if narrow and batch.Sq == batch.Sk == _BLOCK:
        rows.append(_FULL_BLOCKS)
    fits = any(batch.longest <= row.longest and batch.turns >= row.turns for row in rows)
    return batch.B if batch.may_be_stacked and fits else 1


def backward(batch: Batch) -> int:
    """The same for gradients: as many as a tile has room for and divide the batch, so that a CTA has all of a
    head.
    """
    if not batch.may_be_stacked or batch.longest > _TILE // 2:
        return 1
    return next(entries for entries in range(_TILE // batch.longest, 0, -1) if batch.B % entries == 0)
