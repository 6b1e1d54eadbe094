"""How long a launch takes whose tiles outnumber the SMs only a few times: tiles run in waves.

    launch = launch_of(features, sizes, config)
    time = launch.ns(TileTime(per_key=10.9, besides=1900.0))

With many waves only work counts. With few, 133 tiles take as long as 264, so that smaller or larger tiles,
which take longer for each row, may be done first.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .packing import best_pack
from .sizes import Sizes
from .types import Features


class Tile(Protocol):
    """What a config says of its tiles."""

    @property
    def rows(self) -> int:
        """Query rows in a tile."""
        ...

    @property
    def keys(self) -> int:
        """Keys in a block."""
        ...


class TileTime(NamedTuple):
    """The time of one tile on one SM, in ns."""

    per_key: float
    besides: float
    """What a tile takes besides its keys: its first loads and its epilogue."""


class Launch(NamedTuple):
    """The tiles of a launch, the longest of all heads first; lengths, in keys, fall evenly."""

    tiles_per_head: int
    heads: int | None
    """None: so many that only work counts."""
    shortest: int
    longest: int
    num_sms: int

    @property
    def tiles(self) -> int:
        """All tiles; those of one head if there are any number of heads."""
        return self.tiles_per_head * (self.heads or 1)

    def ns(self, time: TileTime) -> float:
        """The time of the launch, or of one head if there are any number of them.

        It is the largest of what no order can beat: the longest tile; all work, shared out evenly; and n
        tiles as long as number (n - 1) * num_sms, since some SM has n of that many and one more.
        """
        per_key, besides = time
        work = self.tiles_per_head * ((self.shortest + self.longest) // 2 * per_key + besides)
        if self.heads is None:
            return work
        waves = -(-self.tiles_per_head * self.heads // self.num_sms)
        longest = max(self.longest * per_key + besides, work * self.heads / self.num_sms)
        for n in (2, 3, waves):
            if 1 < n <= waves:
                keys = self._length((n - 1) * self.num_sms // self.heads)
                longest = max(longest, n * (keys * per_key + besides))
        return longest

    def split(self, number: int, block: int) -> Launch:
        """The same launch with the keys of every tile divided among splits, by whole blocks."""
        shortest, longest = (
            -(-max(keys // block, 1) // number) * block for keys in (self.shortest, self.longest)
        )
        heads = None if self.heads is None else self.heads * number
        return self._replace(heads=heads, shortest=shortest, longest=longest)

    def _length(self, step: int) -> int:
        """The keys of a head's tile, by the number of longer ones."""
        if self.tiles_per_head == 1:
            return self.longest
        return self.longest - (self.longest - self.shortest) * step // (self.tiles_per_head - 1)


def launch_of(features: Features, sizes: Sizes, tile: Tile) -> Launch:
    """The launch of a call in such tiles."""
    Sq, Sk, keys, heads = sizes.Sq, sizes.Sk, sizes.keys, sizes.heads
    pack = best_pack(features, tile.rows, sizes)
    queries, block = tile.rows // pack, tile.keys
    tiles, most = -(-Sq // queries), min(Sk, keys + queries)
    # Keys of the first and the last tile: causal ones end with their rows.
    first, last = (Sk - Sq + queries, Sk - Sq + tiles * queries) if features.right else (most, most)
    shortest, longest = (max(-(-min(x, most) // block), 1) * block for x in (first, last))
    packs = None if heads is None else heads * -(-sizes.group // pack)
    return Launch(tiles, packs, shortest, longest, sizes.num_sms)
