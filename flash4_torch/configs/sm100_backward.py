"""The Blackwell backward kernel's configs: which to take for which call, and why.

`TABLE` is read from the top: the first row that admits the call serves it. No row was ever timed: there was
no such GPU. The last column says what a row rests on: what fits into 227 KB of shared memory and the 512
columns of TMEM, and what tensor cores and shared memory take by their documented rates.
"""

from __future__ import annotations

from typing import NamedTuple

from .sections import Section, Workload, bounded_backward
from .sizes import BackwardSizes, may_end_inside, possible_ends
from .types import SHARED_MEMORY, Features, Sm100Backward


class Row(NamedTuple):
    """A row for head sizes above `above` and up to (D, Dv)."""

    above: int
    D: int
    Dv: int
    config: Sm100Backward
    why: str
    plain: bool = False
    """Whether the row leaves features that take registers to other rows."""

    def admits(self, features: Features) -> bool:
        return (
            self.above < min(features.D, features.Dv)
            and features.D <= self.D
            and features.Dv <= self.Dv
            and not (self.plain and _takes_registers(features))
            and self.config.shared_memory(features) <= SHARED_MEMORY
        )


def _takes_registers(features: Features) -> bool:
    return features.softcap or features.dropout or features.float_mask or features.mods.changes_scores


# fmt: off
_Tiles = Sm100Backward
TABLE = (
    # above D   Dv
    Row(0, 64, 64, _Tiles(do_stages=2, kv_stages=2),
        "never timed: two stages of everything fit, so that the next tile's K and V arrive under this one"),
    Row(0, 96, 96, _Tiles(do_stages=2),
        "never timed: two blocks of dO fit, but not two tiles of K and V"),
    Row(96, 128, 128, _Tiles(cluster=2, half_block_stages=5, dq_slots=1),
        "never timed: SMEM limits one CTA; each of two reads half of Q and dO, adds half of dQ; "
        "16 KB of dS a block cross", plain=True),
    Row(0, 128, 128, _Tiles(),
        "never timed: S of the next block comes before dK of this one: two stages of Q; "
        "no room for a second one of dO"),
    Row(0, 192, 128, _Tiles(cluster=2, keys=64, half_block_stages=4, dq_slots=1),
        "never timed: dK, dV of 128 keys leave no TMEM for S, dP, dQ; of 64 a CTA they do: "
        "pairs with 128-row MMAs, full rate"),
    Row(0, 192, 192, _Tiles(cluster=2, keys=64, half_block_stages=3, dq_slots=1), "never timed: as above"),
    Row(0, 256, 256, _Tiles(cluster=2, keys=64, half_block_stages=2, dq_slots=1),
        "never timed: as above; all 512 columns; only two half-block stages fit; "
        "two kernels, one for dQ: 7 MMAs, not 5"),
)
# fmt: on


def backward(features: Features, sizes: BackwardSizes) -> Sm100Backward:
    """The config of a call that `limits` has nothing against. The scope is never `kv_head`."""
    config = _config(features)
    return config._replace(ragged_k=may_end_inside(features, sizes, config.cluster_keys))


def reachable(features: Features, group: int | None = None) -> tuple[Sm100Backward, ...]:
    """Every config that `backward` returns for some sizes; `group` is not used."""
    ragged = possible_ends(features)
    return tuple(_config(features)._replace(ragged_k=ragged_k) for ragged_k in ragged)


_ORDERED, _ORDERED_IF_BOUNDED = 12, 32
"""KV heads of a section of the deterministic backward: never timed here, but taken from Hopper."""


def row(features: Features, kv_head_rows: int = 0) -> Row:
    """The row that serves a call: see `backward`."""
    return next(r for r in TABLE if r.admits(features))


def section(features: Features, config: Sm100Backward, work: Workload) -> Section:
    """The order of tiles."""
    if features.deterministic:
        wanted = _ORDERED_IF_BOUNDED if features.left or features.right else _ORDERED
        return Section(min(wanted, work.heads))
    # Tiles of a mask differ in length, too.
    if not (features.left or features.right or features.lists_blocks):
        return Section(1)
    tiles = -(-work.Sk // config.cluster_keys)
    return bounded_backward(work, features.D, features.Dv, tiles, left=features.left)


def limits(features: Features) -> list[str]:
    """Why no config serves the features, as sentences; none where one does."""
    if any(row.admits(features) for row in TABLE):
        return []
    D, Dv = max(row.D for row in TABLE), max(row.Dv for row in TABLE)
    return [f"D is {features.D} and Dv is {features.Dv}, and it serves gradients up to {D} and {Dv}"]


def _config(features: Features) -> Sm100Backward:
    return row(features).config
