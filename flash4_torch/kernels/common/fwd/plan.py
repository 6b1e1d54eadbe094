"""The part of a forward kernel's plan that does not depend on the architecture."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....configs.types import Features, tile_dim
from ..band import BandShape
from ..host import NUMERIC
from ..kvcache import MergePlan
from ..lowering import Layout
from ..mask_tables import MaskPlan
from ..smem_layouts import chunk_of

_MERGE_LANES = 4
"""Threads that divide the splits of a vector of O: latency of loads is what merging takes."""
_MOST_AT_ONCE = 4
"""Boxes without a loop."""


class ForwardPlan(NamedTuple):
    """Sizes of tiles, and what they may have to mask.

    Properties that raise are those that each architecture's plan has in its own way; a NamedTuple has no
    abstract ones.
    """

    features: Features
    config: Any

    @property
    def dtype(self) -> type:
        return NUMERIC[self.features.dtype]

    @property
    def out_dtype(self) -> type:
        """The type of O in memory."""
        return NUMERIC["float32"] if self.stores_float32 else self.dtype

    @property
    def stores_float32(self) -> bool:
        """Whether O leaves past shared memory, in float32: there is more to be added to it."""
        return bool(self.features.running) or self.features.splits

    @property
    def merge(self) -> MergePlan:
        """How the results of splits are merged."""
        f = self.features
        return MergePlan("float32", f.Dv, 1, f.dtype, f.varlen, _MERGE_LANES, f.large_scores)

    @property
    def D(self) -> int:
        """Head size of Q and K in shared memory."""
        return tile_dim(self.features.D)

    @property
    def Dv(self) -> int:
        """Head size of V and O in shared memory."""
        return tile_dim(self.features.Dv)

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.config.keys

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.config.cluster

    @property
    def queries(self) -> int:
        """Query positions of a work item: the tiles of a CTA, or of a cluster."""
        return self.config.queries * self.cluster_size

    @property
    def pack_gqa(self) -> int:
        return self.config.pack_gqa

    @property
    def mma_rows(self) -> int:
        """Rows of O that one TMA load of Q serves: those of an MMA."""
        raise NotImplementedError

    @property
    def warp_rows(self) -> int:
        """Rows of O that a warp stores."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Query positions of an MMA's rows: each position is `pack_gqa` of the rows."""
        return self.mma_rows // self.pack_gqa

    @property
    def box(self) -> tuple[int, int]:
        """Heads and positions of an MMA's rows: the box of a TMA load."""
        return self.pack_gqa, self.tokens

    @property
    def store_box(self) -> tuple[int, int]:
        """Heads and positions of a warp's rows: the box of a TMA store."""
        heads = min(self.pack_gqa, self.warp_rows)
        return heads, self.warp_rows // heads

    @property
    def band(self) -> BandShape:
        return BandShape(self.features.left, self.features.right, self.config.ragged_k, self.keys)

    @property
    def layout(self) -> Layout:
        """What rows and columns are to programs."""
        return Layout(packed=self.pack_gqa > 1)

    @property
    def mask(self) -> MaskPlan:
        """How the tables of attn_mask or a block mask divide keys into blocks."""
        return MaskPlan(self.features.mask, self.config.queries, self.keys, self.pack_gqa)

    @property
    def rows_may_be_masked(self) -> bool:
        """Whether a block that is not skipped may be masked for all of a row."""
        f = self.features
        return self.band.may_mask_rows or f.varlen or bool(f.mask) or any(f.mods)

    @property
    def paged(self) -> bool:
        """Whether keys and values are in pages."""
        return self.features.page_box > 0

    @property
    def whole_rows(self) -> bool:
        """Whether boxes of pages have all columns of their keys: one copy each (`pages.whole_row_map`)."""
        return False

    @property
    def page_boxes(self) -> int:
        """Boxes that a block of keys of a paged cache comes in."""
        return self.keys // self.features.page_box

    @property
    def copies_at_once(self) -> int:
        """Copies of boxes without a loop; their addresses and coordinates take registers (ptxas.md, P13)."""
        raise NotImplementedError

    @property
    def boxes_at_once(self) -> int:
        """Boxes without a loop, whose places are broadcast together: their latencies overlap."""
        copies_each = 1 if self.whole_rows else max(n // chunk_of(n) for n in (self.D, self.Dv))
        return min(max(self.copies_at_once // copies_each, 1), _MOST_AT_ONCE)

    def check_pages(self) -> None:
        """Raise AssertionError for pages that the kernel does not load."""
        f = self.features
        if self.paged:
            assert f.page_box in (16, 32, 64, 128) and self.keys % f.page_box == 0
            assert f.varlen and self.cluster_size == 1 and not (f.mask or f.dropout or any(f.mods))

    @property
    def stores_by_tma(self) -> bool:
        """Whether O is stored by TMA. A varlen tile may end inside the box: its rows are stored singly."""
        return not (self.features.varlen or self.stores_float32)

    def check_running(self) -> None:
        """Raise AssertionError for running results that the epilogue does not merge."""
        f = self.features
        assert f.running in ("", "begin", "add")
        assert not f.running or not (f.sinks or f.large_scores or self.paged)

    def check_splits(self) -> None:
        """Raise AssertionError for calls whose keys the kernel does not split."""
        f = self.features
        assert not f.splits or (f._replace(splits=False).may_be_split and self.cluster_size == 1)
