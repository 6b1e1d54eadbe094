"""Query heads of one key head that share a tile's rows: how many, where there are few queries."""

from __future__ import annotations

from collections.abc import Iterator

from .types import Features

MAX_PACK = 64


def may_pack(features: Features) -> bool:
    """Dropout's numbers and a mask's rows follow single heads."""
    return not features.dropout and not features.mask


def possible_packs(features: Features, group: int | None) -> list[int]:
    """Whatever `best_pack` returns for some sizes; with `group`, for that many heads a key head."""
    if not may_pack(features):
        return [1]
    most = MAX_PACK if group is None else cover(group)
    return [p for p in _powers_of_two() if p <= most]


def best_pack(features: Features, rows: int, Sq: int, group: int) -> int:
    """How many heads to a tile of so many rows give the fewest tiles; of equals the fewest heads."""
    if not may_pack(features) or Sq >= rows:
        return 1

    def tiles(pack: int) -> int:
        return -(-group // pack) * -(-Sq * pack // rows)

    return min((p for p in _powers_of_two() if p <= cover(group)), key=tiles)


def cover(group: int) -> int:
    """The smallest power of two that holds all heads of the group, at most `MAX_PACK`."""
    return min(1 << max(group - 1, 0).bit_length(), MAX_PACK)


def _powers_of_two() -> Iterator[int]:
    return (1 << n for n in range(MAX_PACK.bit_length()))
