"""The band of keys that each query row may attend to, one definition for every backend.

Nothing here imports torch: `i` and `j` may be ints, tensors, or a kernel's registers.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Band(NamedTuple):
    """The keys that row i sees: `i + Sk - Sq - left <= j <= i + Sk - Sq + right`; None is unbounded.

    Aligned to the bottom right: the last query sees the last key for every `left, right >= 0`. Causal is
    `right = 0`; torch's top-left causal is `right = Sq - Sk`, so either bound may be negative.
    """

    left: int | None = None
    right: int | None = None

    @property
    def is_full(self) -> bool:
        """True when the band masks nothing, whatever the sizes."""
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0

    def hides_nothing(self, Sq: int, Sk: int) -> bool:
        """True when all `Sq` rows see all `Sk` keys."""
        left_ok = self.left is None or self.left >= Sk - 1
        right_ok = self.right is None or self.right >= Sq - 1
        return left_ok and right_ok

    def visible(self, i: T, j: T, Sq: int, Sk: int) -> T | bool:
        """Whether row i sees key j; broadcasts when `i` and `j` are tensors."""
        diagonal = j - i - (Sk - Sq)  # type: ignore[operator]
        seen: T | bool = True
        if self.left is not None:
            seen = diagonal >= -self.left
        if self.right is not None:
            below = diagonal <= self.right
            seen = below if self.left is None else seen & below
        return seen

    def keys(self, rows: range, Sq: int, Sk: int) -> range:
        """The smallest range that holds every key that some row of `rows` sees."""
        shift = Sk - Sq
        first = 0 if self.left is None else max(0, rows.start + shift - self.left)
        last = Sk if self.right is None else min(Sk, rows.stop + shift + self.right)
        return range(min(first, Sk), max(last, min(first, Sk)))

    def rows(self, Sq: int, Sk: int) -> range:
        """The smallest range that holds every row that sees a key."""
        left, right = self
        if left is not None and right is not None and left + right < 0:
            return range(0)
        first = 0 if right is None else max(0, Sq - Sk - right)
        stop = Sq if left is None else max(0, min(Sq, Sq + left))
        return range(min(first, stop), stop)

    def of_block(self, rows: range, keys: range, Sq: int, Sk: int) -> Band:
        """The band of some rows and keys, aligned to their own last ones."""
        moved = Sk - keys.stop - (Sq - rows.stop)
        left, right = self
        return Band(None if left is None else left - moved, None if right is None else right + moved)

    def covers(self, rows: range, keys: range, Sq: int, Sk: int) -> bool:
        """True when every row of the tile sees every key of it, so that the tile needs no mask."""
        shift = Sk - Sq
        left_ok = self.left is None or keys.start >= rows.stop - 1 + shift - self.left
        right_ok = self.right is None or keys.stop - 1 <= rows.start + shift + self.right
        return left_ok and right_ok

    def pairs(self, Sq: int, Sk: int) -> int:
        """Number of visible (row, key) pairs: the scores that an attention kernel has to compute."""
        if self.is_full:
            return Sq * Sk
        below_right = _pairs_below(Sq, Sk, Sk - 1 if self.right is None else Sk - Sq + self.right)
        below_left = 0 if self.left is None else _pairs_below(Sq, Sk, Sk - Sq - self.left - 1)
        return max(0, below_right - below_left)


def _pairs_below(Sq: int, Sk: int, diagonal: int) -> int:
    """Pairs with 0 <= i < Sq, 0 <= j < Sk and j <= i + diagonal."""
    # Row i sees clamp(i + diagonal + 1, 0, Sk) keys: empty rows, then a ramp, then full rows.
    ramp_start = min(max(-diagonal, 0), Sq)
    ramp_stop = min(max(Sk - diagonal, ramp_start), Sq)
    ramp = (ramp_stop - ramp_start) * (ramp_start + ramp_stop + 1) // 2 + diagonal * (ramp_stop - ramp_start)
    return ramp + (Sq - ramp_stop) * Sk
