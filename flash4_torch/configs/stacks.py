"""How many batch entries of short sequences make one sequence, where kernels are faster so.

Measured on an H200 in bfloat16 (`short-sequences-h200.json`); Blackwell's are guesses from there.
"""

from __future__ import annotations

from typing import NamedTuple

_LONGEST, _LONGEST_OF_WIDE, _WIDE = 40, 32, 64
"""Rows and keys of an entry, at most, in the forward up to `_WIDE` columns, and above. Longer ones share
blocks of keys with their neighbours, whose scores are masked."""
_BLOCK = 64
"""Keys of the forward's blocks: entries as long as one share none."""
_TILE = 128
"""Keys of the backward's tiles."""
_TURNS = 2
"""Heads of all entries for each SM, from which on entries share tiles: fewer run at the same time anyway."""


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
    def may_pay(self) -> bool:
        return self.B > 1 and min(self.Sq, self.Sk) > 1 and self.B * self.Hk >= _TURNS * self.num_sms


def forward(batch: Batch) -> int:
    """Entries of a stack: all, or 1, which is none."""
    narrow, longest = batch.columns <= _WIDE, batch.longest
    most = _LONGEST if narrow else _LONGEST_OF_WIDE
    # Causal tiles of a single entry have 256 rows.
    fits = longest <= most or (narrow and (longest == _BLOCK or (batch.end_masked and longest < _BLOCK)))
    return batch.B if batch.may_pay and fits else 1


def backward(batch: Batch) -> int:
    """The same for gradients: as many as a tile has room for and divide the batch, so that a CTA has all of a
    head.
    """
    if not batch.may_pay or batch.longest > _TILE // 2:
        return 1
    return next(entries for entries in range(_TILE // batch.longest, 0, -1) if batch.B % entries == 0)
