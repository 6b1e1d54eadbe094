"""The sizes of a call that choose its tiles."""

from __future__ import annotations

from typing import NamedTuple

from .types import Features


class Sizes(NamedTuple):
    """What a table of forward kernels goes by, besides a call's `Features`."""

    Sq: int
    """Query positions; of the longest sequence if varlen, like Sk."""
    Sk: int
    group: int = 1
    """Query heads of each KV head."""
    seen: int | None = None
    """How many keys a row sees at most, by its window. None: Sk."""
    end_masked: bool = False
    """Whether the band masks everything beyond the last key, as for causal calls."""
    heads: int | None = None
    """KV heads of all batch entries. None: so many that there are many tiles."""
    num_sms: int = 1
    """SMs that the tiles of these heads are divided among."""
    num_splits: int = 0
    """Splits of each tile's keys that the caller asks for; 0 leaves the choice to the table."""

    @property
    def keys(self) -> int:
        """How many keys a row sees at most."""
        return self.Sk if self.seen is None else min(self.seen, self.Sk)


class BackwardSizes(NamedTuple):
    """The same for a table of backward kernels."""

    Sk: int
    """Key positions; of the longest sequence if varlen."""
    end_masked: bool = False
    """Whether the band masks everything beyond the last key, as for causal calls."""
    kv_head_rows: int = 0
    """Query rows of a KV head, of all query heads that share it, if there are heads enough for scope
    `kv_head`, where each CTA takes whole ones; else 0."""
    group: int = 1
    """Query heads of each KV head."""
    may_preprocess: bool = False
    """Whether there is a CTA for each KV head of the batch, and no gradient of lse: then few rows need no
    preprocess kernel."""


def may_end_inside(features: Features, sizes: Sizes | BackwardSizes, keys: int) -> bool:
    """Whether a sequence may end inside a block of so many keys, and the band does not mask what follows.

    A stack's band does: no row sees a key beyond its entry.
    """
    is_masked = features.is_stacked or (sizes.end_masked and features.right)
    return not is_masked and (features.varlen or sizes.Sk % keys != 0)


def possible_ends(features: Features) -> list[bool]:
    """All that `may_end_inside` returns for some sizes."""
    if features.is_stacked:
        return [False]
    return [False, True] if features.right or not features.varlen else [True]
