"""The part of a backward kernel's plan that does not depend on the architecture."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....configs.types import Features, Scope
from ..band import BandShape
from ..host import NUMERIC
from ..lowering import Layout, lower_derivative
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
    def layout(self) -> Layout:
        """What rows and columns are to programs."""
        return Layout(rows_are_keys=True)

    @property
    def keeps_scores(self) -> bool:
        """Whether scores before score_mod are kept, because its derivative depends on them."""
        text = self.features.mods.derivative
        return bool(text) and lower_derivative(text, self.layout).reads_score

    @property
    def differentiates_mod(self) -> bool:
        """Whether score_mod's derivative changes gradients, or adds to those of captured tensors."""
        text = self.features.mods.derivative
        return bool(text) and not lower_derivative(text, self.layout).is_identity

    @property
    def mask(self) -> MaskPlan:
        """How the tables of attn_mask or a block mask divide the transposed mask, whose rows are keys."""
        column_major = self.features.float_mask and self.config.copies_masks
        return MaskPlan(self.features.mask, self.cluster_keys, self.queries, column_major=column_major)

    @property
    def lists_blocks(self) -> bool:
        """Whether blocks that a mask hides are skipped. A fixed dQ order knows the band only."""
        return self.features.lists_blocks and not self.features.deterministic

    @property
    def leaves_out_unseen_keys(self) -> bool:
        """Whether K and V are not read for tiles of keys that no query sees."""
        return self.lists_blocks and not self.features.varlen and self.cluster_size == 1

    @property
    def stores_by_tma(self) -> bool:
        """Whether dK and dV are stored by TMA. A varlen tile may end inside the box: its rows are stored
        singly.
        """
        return not self.features.varlen
