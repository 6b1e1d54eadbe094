"""How long a launch takes whose tiles outnumber the SMs only a few times: tiles run in waves.

    launch = Launch(tiles_per_head=8, heads=16, shortest=512, longest=1024, num_sms=132)
    time = launch.ns(TileTime(per_key=10.9, besides=1900.0))

With many waves only work counts. With few, 133 tiles take as long as 264, so that smaller or larger tiles,
which take longer for each row, may be done first.
"""

from __future__ import annotations

from typing import NamedTuple


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
