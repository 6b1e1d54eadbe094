"""Who does what, with how many registers, in how much shared memory.

A CTA is persistent and claims tiles of query rows from a counter:

    warp 0 of warpgroup 0    the load warp: claims tiles, loads Q, K and V by TMA
    warp 1 of warpgroup 0    with small pages it loads V
    warpgroups 1, 2, ...     64 rows each: S = Q K^T, softmax, O += P V; each warp stores its 16 rows of O
    one more, with dropout   RNG warps: generate the keep bits. If a wide O leaves no registers for this
                             warpgroup, warps 1, 2 and 3 of warpgroup 0 are the RNG warps

    load_q           Q of a tile, and the work tile; `q_stages`, so that the next Q arrives during this tile
    load_k, load_v   blocks of keys, from the last to the first; `kv_stages` each
    keep_bits        a bit for each weight of a block: whether dropout keeps it; a stage for each one of V

In a cluster the two CTAs claim a pair of neighbouring tiles, and both visit every block that either tile
sees: each CTA loads one half of the block into both.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ....configs.types import SHARED_MEMORY, Sm90Forward
from ...common.band import BandShape
from ...common.budget import Budget, always, registers_of
from ...common.fwd.plan import ForwardPlan
from ...common.smem_layouts import chunk_of
from ...common.softmax import Method
from ...common.warps import GROUP, WARPS, registers_suffice
from ..warps import LANES, ROWS, WARP_ROWS

_BOXES_OF_ONE_WARP = 2
"""Boxes of a block of K, and of V, that one warp loads in time."""


class NamedBarrier(IntEnum):
    """The id of each use's first hardware barrier."""

    WARP_SCHEDULER = 1
    """One for each consumer warpgroup: ping-pong."""
    Q_READ = 8
    """One for each consumer warpgroup: all of its warps have read Q."""


class Registers(NamedTuple):
    """Registers of a thread, by role."""

    consumer: int
    producer: int
    rng_warp: int = 0


_BUDGETS = (
    Budget(
        lambda p: p.features.rng_warpgroup,
        {1: Registers(208, 40, 96), 2: Registers(208, 40, 56), 3: Registers(112, 40, 96)},
        "dropout: an RNG warpgroup of its own has a share",
    ),
    Budget(
        lambda p: p.features.dropout,
        {1: Registers(216, 56), 2: Registers(224, 56)},
        "dropout with a wide O: RNG warps in the producer's warpgroup",
    ),
    Budget(
        lambda p: p.config.at_once == 2,
        {1: Registers(152, 104)},
        "two CTAs on an SM: half of its registers each",
    ),
    Budget(
        lambda p: p.features.splits,
        {1: Registers(240, 96), 2: Registers(216, 72), 3: Registers(152, 56)},
        "splits: the load warp finds them, and spilled up to 38 times with 40",
    ),
    Budget(
        always,
        {1: Registers(232, 40), 2: Registers(232, 40), 3: Registers(160, 32), 4: Registers(112, 32)},
        "as many for the consumers as are left: the load warp does with few",
    ),
)
"""Rows whose registers depend on the number of consumer warpgroups."""


class Plan(ForwardPlan):
    __slots__ = ()

    config: Sm90Forward

    @property
    def mma_rows(self) -> int:
        return ROWS

    @property
    def warp_rows(self) -> int:
        return WARP_ROWS

    @property
    def warpgroups(self) -> int:
        return self.config.warpgroups

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1 + self.features.rng_warpgroup) * GROUP

    @property
    def consumer_warps(self) -> int:
        return self.warpgroups * WARPS

    @property
    def registers(self) -> Registers:
        return registers_of(self, _BUDGETS)[self.warpgroups]

    @property
    def rng_warps(self) -> int:
        """Warps that generate the keep bits."""
        if self.features.rng_warpgroup:
            return WARPS
        return WARPS - 1 if self.features.dropout else 0

    @property
    def q_readers(self) -> int:
        """Warps that read the work tile."""
        return self.consumer_warps + self.rng_warps + self.loads_v_apart

    @property
    def loads_v_apart(self) -> bool:
        """Whether a warp of its own loads V: a block has so many boxes that one warp could not keep up."""
        return self.paged and self.page_boxes > _BOXES_OF_ONE_WARP

    @property
    def whole_rows(self) -> bool:
        sizes = self.features.D, self.features.Dv
        # Columns that a tile has beyond a head's would be the next head's.
        fills_tiles = sizes == (self.D, self.Dv)
        return self.paged and fills_tiles and any(n > chunk_of(n) for n in sizes)

    @property
    def k_share(self) -> tuple[int, int]:
        """Keys and columns of a block of K that each CTA loads, or that a box of a page has."""
        return self._share(self.keys, self.D)

    @property
    def v_share(self) -> tuple[int, int]:
        """Columns and keys of a block of V that each CTA loads, or that a box of a page has."""
        keys, columns = self._share(self.keys, self.Dv)
        return columns, keys

    @property
    def copies_at_once(self) -> int:
        return 8

    @property
    def shares(self) -> int:
        """Shares that a block of K or of V consists of."""
        return self.page_boxes if self.paged else self.cluster_size

    def _share(self, keys: int, columns: int) -> tuple[int, int]:
        """A CTA's share is a range of columns if that fills whole copies, of 64 each: fewer than by keys."""
        if self.paged:
            return self.features.page_box, columns
        if columns % (64 * self.cluster_size) == 0:
            return keys, columns // self.cluster_size
        return keys // self.cluster_size, columns

    @property
    def skipped(self) -> int:
        """Blocks that a warpgroup may have to skip before its first one."""
        others = self.tokens * (self.warpgroups * self.cluster_size - 1)
        return -(-others // self.keys) if self.features.right else 0

    @property
    def skips_both(self) -> bool:
        """Whether V is skipped together with K; then any number of blocks may be skipped.

        Bounds of rows may leave that many between neighbouring warpgroups.
        """
        skips_many = self.cluster_size > 1 or self.features.mods.bounds
        return skips_many and self.features.right and not self.config.next_tile

    @property
    def ramp_by_mma(self) -> bool:
        """Whether tensor cores add a ramp."""
        return self.config.adds_ramp_by_mma(self.features)

    @property
    def inner_band(self) -> BandShape:
        """The band of all blocks but the first one: only that one may hold the end of Sk."""
        return self.band._replace(ragged_k=False)

    @property
    def columns_before_wait(self) -> int:
        """Number of a thread's columns in a block that are exponentiated before the wait for PV."""
        columns, quarters = self.keys // 4, self.config.exp_quarters_before_pv
        return columns * quarters // 16 * 4 if quarters else columns

    @property
    def only_end_is_partial(self) -> bool:
        """Whether only blocks at the right end may have to be masked: these then have a loop of their own.

        Not with `half_block`: ptxas would serialise the wgmmas (ptxas.md, P2).
        """
        return not (self.features.left or self.features.lists_blocks or self.config.half_block)

    @property
    def shares_mask_loads(self) -> bool:
        """Whether four lanes load a floating mask for one another, where they have registers for it."""
        return self.config.warpgroups == 2 and self.D <= 96

    @property
    def softmax(self) -> Method:
        return Method(
            LANES,
            self.rows_may_be_masked,
            self.config.lazy_rescale,
            subtracts_max_first=self.features.large_scores,
        )

    def softmax_of(self, masked: bool) -> Method:
        """The softmax of a block, which is right for a floating mask's large numbers only if `masked`."""
        f = self.features
        large = f.mods.makes_large_scores or (f.float_mask and masked)
        return self.softmax._replace(subtracts_max_first=large)

    def check(self) -> None:
        """Raise AssertionError for a plan that would not run; `configs` never asks for one."""
        f, c = self.features, self.config
        assert f.D % 8 == 0 and f.Dv % 8 == 0 and 8 <= min(f.D, f.Dv) and max(f.D, f.Dv) <= 256
        assert c.keys % 16 == 0 and 16 <= c.keys <= 256
        assert c.pack_gqa in (1, 2, 4, 8, 16, 32, 64)
        assert not c.o_over_q or self.Dv <= self.D
        assert not (f.dropout and c.pack_gqa > 1), "dropout's random numbers follow unpacked rows"
        assert not c.half_block or (f.right and not f.lists_blocks)
        # A warpgroup skips K before it skips V, with `next_tile` even while it holds another V.
        # With `k_ahead` a K arrives without waiting for the last V before it.
        assert self.skips_both or self.skipped <= c.kv_stages - c.next_tile + c.k_ahead
        assert not f.mods.bounds or not (c.next_tile or f.dropout)
        assert c.at_once == 1 or (c.at_once == 2 and f.splits and c.warpgroups == 1)
        assert c.cluster in (1, 2)
        self.check_pages()
        self.check_running()
        self.check_splits()
        if c.cluster > 1:
            assert not (f.varlen or f.lists_blocks or f.dropout)
        if c.next_tile:
            assert c.q_stages > 1 and not f.left and not f.lists_blocks and not c.half_block
        consumer, producer, rng_warp = self.registers
        assert registers_suffice(self.threads, consumer * c.warpgroups + producer + rng_warp)
        assert c.shared_memory(f) <= SHARED_MEMORY
