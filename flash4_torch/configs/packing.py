"""How many query heads of one KV head share a tile's rows, where there are few queries (`pack_gqa`)."""

from __future__ import annotations

from collections.abc import Iterator

from .sizes import Sizes
from .types import Features

MAX_PACK = 64


def may_pack(features: Features) -> bool:
    """Whether heads may be packed: dropout's keep bits follow single heads, and a stack has rows enough."""
    return not (features.dropout or features.is_stacked)


def possible_packs(features: Features, group: int | None) -> list[int]:
    """All that `best_pack` returns for some sizes; with `group`, for that many query heads of a KV head.

    Next to attn_mask and block masks they divide the group: tables have heads of a tile side by side.
    """
    if not may_pack(features):
        return [1]
    if group is None:
        return list(_powers_of_two())
    return [p for p in _powers_of_two() if p <= cover(group) and not (features.lists_blocks and group % p)]


def best_pack(features: Features, rows: int, sizes: Sizes) -> int:
    """The number of heads in a tile of `rows` rows for the fewest tiles; of equals the fewest heads."""
    Sq, group = sizes.Sq, sizes.group
    if Sq >= rows:
        return 1

    def tiles(pack: int) -> int:
        return -(-group // pack) * -(-Sq * pack // rows)

    return min(possible_packs(features, group), key=tiles)


def rows_that_share_keys(features: Features, sizes: Sizes) -> int:
    """Query rows next to the same keys: those of all heads of a group, where these may be packed."""
    return sizes.Sq * possible_packs(features, sizes.group)[-1]


def cover(group: int) -> int:
    """The smallest power of two that holds all heads of the group, at most `MAX_PACK`."""
    return min(1 << max(group - 1, 0).bit_length(), MAX_PACK)


def _powers_of_two() -> Iterator[int]:
    return (1 << n for n in range(MAX_PACK.bit_length()))
