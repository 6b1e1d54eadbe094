"""The tiles of the backward by mma.sync: which to take for which call, and why.

As for the forward (`configs.sm80`) there are two tables, by how much shared memory a CTA may have. The first
row that admits the call serves it. No GPU has timed any of them: what a row says is what ptxas said, and what
follows from the sizes of shared memory and of the register file.
"""

from __future__ import annotations

from typing import NamedTuple

from .sections import Section, Workload, bounded_backward
from .sm80 import LARGE_BYTES, MAX_D, SMALL_BYTES
from .types import Features, Sm80Backward

_ORDERED, _ORDERED_IF_BOUNDED = 12, 32
"""KV heads of a section of the deterministic backward: those that Hopper was measured with."""


class Row(NamedTuple):
    """A row for head sizes up to (D, Dv)."""

    D: int
    Dv: int
    config: Sm80Backward
    why: str

    def admits(self, features: Features, shared_memory: int) -> bool:
        wide = features.D > self.D or features.Dv > self.Dv
        return not wide and fits(features, self.config, shared_memory)


# fmt: off
_Tiles = Sm80Backward
_TABLE = (
    # D   Dv
    Row(64, 64, _Tiles(8, 1, 64, 2), "80 KiB: 128 keys for each block of rows, two warps a tensor core"),
    Row(64, 64, _Tiles(8, 2, 64, 2), "features that need registers"),
    Row(96, 96, _Tiles(4, 1, 64, 2), "80 KiB; eight warps would halve 96 columns of dQ, and pad them to 128"),
    Row(96, 96, _Tiles(8, 2, 64, 1), "features that need registers"),
    Row(128, 128, _Tiles(8, 1, 64, 2), "144 KiB: 128 keys for each block of rows"),
    Row(128, 128, _Tiles(8, 2, 64, 2), "112 KiB: features that need registers"),
    Row(128, 128, _Tiles(8, 2, 64, 1), "80 KiB; four warps with 16 keys each would be one a tensor core"),
    Row(192, 192, _Tiles(8, 2, 64, 2), "160 KiB; dK and dV of 16 keys do not fit the registers of one warp"),
    Row(192, 192, _Tiles(8, 2, 64, 1), "112 KiB: two stages have no room next to dropout and masks"),
    Row(192, 192, _Tiles(4, 2, 64, 1), "80 KiB: 64 keys have no room"),
    Row(256, 256, _Tiles(8, 2, 64, 1), "144 KiB; two stages have no room"),
    Row(256, 256, _Tiles(4, 4, 64, 1), "84 KiB: 32 keys have no room, and fewer queries no layout of dQ"),
)
# fmt: on


class Table(NamedTuple):
    shared_memory: int
    """Bytes that a CTA may have."""

    def backward(
        self, features: Features, Sk: int, end_masked: bool = False, kv_head_rows: int = 0, group: int = 1
    ) -> Sm80Backward:
        """The config of a call: see `configs.sm90_backward.backward`."""
        config = self.row(features, kv_head_rows).config
        ragged_k = not (end_masked and features.right) and (features.varlen or Sk % config.keys != 0)
        return config._replace(ragged_k=ragged_k)

    def row(self, features: Features, kv_head_rows: int = 0) -> Row:
        """The row that serves a call."""
        return next(row for row in _TABLE if row.admits(features, self.shared_memory))

    def reachable(self, features: Features, group: int | None = None) -> tuple[Sm80Backward, ...]:
        """Every config that `backward` returns for some sizes."""
        config = self.row(features).config
        ragged = [False, True] if features.right or not features.varlen else [True]
        return tuple(config._replace(ragged_k=ragged_k) for ragged_k in ragged)

    def section(self, features: Features, config: Sm80Backward, work: Workload) -> Section:
        """The order of tiles: see `configs.sm90_backward.section`."""
        bounded = features.left or features.right
        if features.deterministic:
            return Section(min(_ORDERED_IF_BOUNDED if bounded else _ORDERED, work.heads))
        if not bounded:
            return Section(1)
        tiles = -(-work.Sk // config.keys)
        return bounded_backward(work, features.D, features.Dv, tiles, left=features.left)

    def limits(self, features: Features) -> list[str]:
        """Why no row serves the features, whose head sizes may be any."""
        if max(features.D, features.Dv) <= MAX_D:
            return []
        return [f"D is {features.D} and Dv is {features.Dv}, and it serves up to {MAX_D}"]


LARGE, SMALL = Table(LARGE_BYTES), Table(SMALL_BYTES)


def fits(features: Features, config: Sm80Backward, shared_memory: int) -> bool:
    """Whether the GPU has room for it, in shared memory and in registers."""
    return has_registers(features, config) and config.shared_memory(features) <= shared_memory


def has_registers(features: Features, config: Sm80Backward) -> bool:
    """Whether a thread has registers for it."""
    return True
