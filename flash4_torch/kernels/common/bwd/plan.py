"""The part of a backward kernel's plan that does not depend on the architecture."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....configs.types import Features, Scope
from ..band import BandShape
from ..host import NUMERIC
from ..mask_tables import MaskPlan


class BackwardPlan(NamedTuple):
    """Sizes of tiles, and which blocks of queries they visit."""

    features: Features
    config: Any

    @property
    def dtype(self) -> type:
        return NUMERIC[self.features.dtype]

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.config.queries

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return self.config.keys

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.config.cluster

    @property
    def cluster_keys(self) -> int:
        """Keys of a work item: a tile, or a cluster's tiles."""
        return self.config.cluster_keys

    @property
    def scope(self) -> Scope:
        return self.config.scope

    @property
    def band(self) -> BandShape:
        """The band of the transposed problem: rows are keys, and its right bound is the queries' left one.

        Query rows beyond the end need no mask: their lse is infinite.
        """
        return BandShape(self.features.right, self.features.left, False, self.queries)

    @property
    def mask(self) -> MaskPlan:
        """How attn_mask's tables divide the transposed mask, whose rows are keys, into blocks."""
        return MaskPlan(self.features.mask, self.cluster_keys, self.queries)

    @property
    def lists_blocks(self) -> bool:
        """Whether fully masked blocks are skipped where attn_mask says so. A fixed dQ order knows the band
        only.
        """
        return bool(self.features.mask) and not self.features.deterministic

    @property
    def stores_by_tma(self) -> bool:
        """Whether dK and dV are stored by TMA. A varlen tile may end inside the box: its rows are stored
        singly.
        """
        return not self.features.varlen
