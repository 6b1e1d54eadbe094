"""Who does what, with how many registers, in how much shared memory.

A CTA is persistent and claims tiles from a counter. A tile is a block of keys of one KV head, which the CTA
processes against every row of queries, of all query heads of the group, that sees one of these keys.

    warp 0 of warpgroup 0    the load warp: claims tiles, loads K and V, then Q and dO block after block
    warps 1, 2, 3 of it      store warps: add dQ to global memory, one for each consumer warpgroup; with
                             dropout one for all, and the others are RNG warps, which generate the keep bits.
                             With `dkv_via_dq_smem` store warps store dK and dV, too
    warpgroups 1, 2, ...     64 keys each: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, together
                             dQ = dS K; at the end each stores dK and dV. With `role_split`, see
                             role_split.py, two of them share 64 keys

    load_k, load_v    K and V of a tile, and the work tile; `kv_stages` each. dK and dV leave through their
                      stages, or with `dkv_via_dq_smem` through the slots of dQ
    load_q, load_do   blocks of rows, with the results of the preprocess kernel: lse with Q, delta with dO
    write_stats       the results of `preprocesses`, which the load warp fetches from global memory
    keep_bits         a bit for each weight of a block: whether dropout keeps it
    share_ds          dS of all keys, which is written and read by all warpgroups; `ds_stages`

With scope `KV_HEAD` a CTA claims a KV head, and processes its tiles one after another, the last one first. It
keeps their sums of dQ in a workspace of its own, to which the first tile, see finish_dq.py, adds its share.
With `preprocesses` it has no other KV head, and its consumers do before what else the preprocess kernel does,
see preprocess.py.

In a cluster the two CTAs claim a pair of neighbouring tiles, and both visit every block that either tile
sees: each CTA loads one half of the block into both.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ....configs.types import SHARED_MEMORY, WARPGROUPS, Mods, Scope, Sm90Backward, tile_dim
from ...common.budget import Budget, always, registers_of
from ...common.bwd.dq_blocks import DqBlocks
from ...common.bwd.plan import BackwardPlan
from ...common.bwd.row_blocks import PreprocessPlan, RowBlocks
from ...common.bwd.row_stats import NUM_WARPS
from ...common.warps import GROUP, WARPS, registers_suffice
from ..warps import ROWS, WARP_ROWS


class NamedBarrier(IntEnum):
    """The id of each use's first hardware barrier."""

    DS_WRITTEN = 1
    """All warpgroups have written their dS."""
    K_READ = 2
    """All warpgroups have read K for the last time."""
    DQ_FULL = 3
    """One for each slot of dQ: a piece waits for a store warp."""
    DQ_EMPTY = 9
    """One for each slot of dQ: it has room."""


class Registers(NamedTuple):
    """Registers of a thread, by role."""

    consumer: int
    producer: int


_BUDGETS = (
    Budget(
        lambda p: p.features.dropout and p.features.lists_blocks,
        Registers(224, 56),
        "RNG warps in the producer's warpgroup, and a mask's addresses there",
    ),
    Budget(lambda p: p.features.dropout, Registers(232, 40), "RNG warps in the producer's warpgroup"),
    Budget(always, Registers(240, 24), "all that the load and store warps leave"),
)


class Plan(BackwardPlan):
    __slots__ = ()

    config: Sm90Backward

    @property
    def blocks(self) -> DqBlocks:
        return DqBlocks(self.features.D, self.queries, self.config.dq_pieces)

    @property
    def D(self) -> int:
        """Head size of Q and K in shared memory."""
        return self.blocks.columns

    @property
    def Dv(self) -> int:
        return tile_dim(self.features.Dv)

    @property
    def q_share(self) -> tuple[int, int]:
        """Rows and columns of a block of Q that each CTA loads."""
        return self._share(self.D)

    @property
    def do_share(self) -> tuple[int, int]:
        return self._share(self.Dv)

    def _share(self, columns: int) -> tuple[int, int]:
        """A share is a range of columns if that fills whole copies, of 64 each: fewer copies than by rows."""
        if columns % (64 * self.cluster_size) == 0:
            return self.queries, columns // self.cluster_size
        return self.queries // self.cluster_size, columns

    @property
    def warpgroups(self) -> int:
        return WARPGROUPS

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * GROUP

    @property
    def consumers(self) -> int:
        """Threads of all consumer warpgroups."""
        return self.warpgroups * GROUP

    @property
    def consumer_warps(self) -> int:
        return self.warpgroups * WARPS

    @property
    def registers(self) -> Registers:
        return registers_of(self, _BUDGETS)

    @property
    def last_tile_first(self) -> bool:
        """Whether a head's last tile is claimed first, and adds its dQ first.

        In a band with a right bound each tile begins at another block: the tile that reaches a block last is
        the one that has visited most blocks before it. In any other order tiles would wait for it from their
        first block on. With `heads_inner` all tiles begin at the last block, and the longest comes first.
        With scope `KV_HEAD` the first tile, which visits all rows, comes last.
        """
        is_ordered = self.features.deterministic and self.features.right and not self.heads_inner
        return is_ordered or self.scope == Scope.KV_HEAD

    @property
    def load_warp_sends_order(self) -> bool:
        """Whether the load warp finds out when a tile may add its dQ, and sends this with the work tile.

        Among the threads that add, only thread 0 needs it: if a single thread uses the tile's numbers, ptxas
        takes them, and the loops of CTA pairs, for different in each thread (ptxas.md, P8). With scope
        `KV_HEAD` there is no dQ order, but what the tile before has visited is sent the same way.
        """
        is_ordered_inside = self.features.deterministic and self.config.role_split and self.heads_inner
        return self.scope == Scope.KV_HEAD or (is_ordered_inside and not self.features.varlen)

    @property
    def heads_inner(self) -> bool:
        """Whether a block is visited for all heads before the next; a mask's blocks differ among heads."""
        return self.config.heads_inner and not self.features.lists_blocks

    @property
    def alternates_direction(self) -> bool:
        """Whether every second tile visits its blocks in reverse order; not if a bound makes one partial."""
        return self.scope == Scope.KV_HEAD and self.heads_inner and not self.features.right

    @property
    def preprocess(self) -> PreprocessPlan:
        """The preprocess kernel's plan: with `preprocesses`, of what the consumers do instead."""
        return PreprocessPlan(self.features.dtype, self.features.Dv, RowBlocks.of(self.blocks), clears=False)

    @property
    def load_q_first(self) -> bool:
        """Whether a tile's first Q and dO are loaded before its K and V; only where one loop loads all."""
        return self.config.load_q_first and self.heads_inner

    @property
    def skip_masked_half(self) -> bool:
        """Whether a warpgroup checks if it sees nothing of a tile's last block, and then leaves it out.

        Only the first warpgroup sees something of a causal tile's first rows. Not with dropout: a warpgroup
        that leaves a block out would have to take its keep bits all the same.
        """
        f, c = self.features, self.config
        return self.heads_inner and f.right and self.queries < self.keys and not (f.dropout or c.role_split)

    @property
    def fetches_words(self) -> bool:
        """Whether a bool mask's words of a block are loaded while the block before it ends."""
        return self.features.mask == "bool" and not self.config.role_split

    @property
    def adds_rows_one_by_one(self) -> bool:
        """Whether a floating mask may be added to one of a thread's two keys after the other.

        At D 128 the offsets of all keys do not fit next to the registers that wgmmas hold. With a bound ptxas
        finds room (ptxas.md, P20).
        """
        wide = not self.config.role_split and max(self.D, self.Dv) == 128
        return wide and not self.features.dmask and not (self.band.left or self.band.right)

    @property
    def dkv_via_dq_smem(self) -> bool:
        """Whether store warps store dK and dV, too: a warpgroup leaves them in its slots of dQ.

        A slot has room for twice as many columns of 16 bits as its piece of dQ has of 32 bits: where a piece
        is half of dQ's columns, for as many as dQ has.
        """
        fits = 2 * ROWS * max(self.D, self.Dv) <= 4 * GROUP * self.blocks.registers
        asked = self.config.dkv_via_dq_smem and fits
        return asked and self.stores_by_tma and not self.features.deterministic

    @property
    def shares_scores(self) -> bool:
        """Whether the first warpgroup hands scores before score_mod to the second, in float32."""
        return self.config.role_split and self.keeps_scores

    @property
    def shares_dtanh(self) -> bool:
        """Whether the second warpgroup gets softcap's derivative (dtanh) separate from P: for what takes the
        gradient before it, dmask and score_mod. From scores it computes dtanh itself.
        """
        f = self.features
        takes_dtanh = f.softcap and (f.dmask or bool(f.mods.score_mod))
        return self.config.role_split and takes_dtanh and not self.shares_scores

    @property
    def strips(self) -> int:
        """Strips of 16 keys in a tile: one for each warp that computes P."""
        return self.keys // WARP_ROWS

    @property
    def dq_slots(self) -> int:
        """Slots for pieces of dQ on their way to global memory: w and w + warpgroups are warpgroup w's."""
        return self.warpgroups * self.config.dq_stages

    @property
    def rng_warps(self) -> int:
        """Warps that generate the keep bits: those of the producer warpgroup with nothing else to do."""
        return WARPS - 1 - self.store_warps if self.features.dropout else 0

    @property
    def store_warps(self) -> int:
        """Warps that have dQ added to global memory; they are in the producer warpgroup, too."""
        return 1 if self.features.dropout else self.warpgroups

    @property
    def stores_by_blocks(self) -> bool:
        """Whether a store warp takes the pieces of all warpgroups, of every second block.

        If sums have an order, it waits until they are in global memory. That takes about as long as a block.
        """
        return self.features.deterministic and self.store_warps == self.config.dq_stages == 2

    @property
    def partial_at_start(self) -> bool:
        """Whether a head's first blocks, or all blocks of a tile, may have to be masked."""
        return self.band.left or self.config.ragged_k

    @property
    def partial_at_end(self) -> bool:
        return self.band.right

    @property
    def masks(self) -> bool:
        return self.partial_at_start or self.partial_at_end or self.features.lists_blocks

    def check(self) -> None:
        """Raise AssertionError for a plan that would not run; `configs` never asks for one."""
        f, c = self.features, self.config
        assert f.D % 8 == 0 and f.Dv % 8 == 0 and 8 <= min(f.D, f.Dv)
        assert max(f.D, f.Dv) <= (256 if c.role_split else 128)
        assert c.queries in (64, 128)
        assert self.blocks.bands * self.blocks.parts == c.dq_pieces, "dQ is not shared out evenly"
        assert c.cluster in ((1, 2) if c.role_split else (1,)) and (c.role_split or c.dq_passes == 1)
        assert not c.role_split or c.queries == ROWS
        # The peer's loads could arrive before this CTA has zeroed the end of another sequence.
        assert c.cluster == 1 or not f.varlen
        assert c.dq_stages in (1, 2) and (c.dq_passes == 1 or c.dq_stages == 1)
        assert not c.load_q_first or (c.heads_inner and not c.role_split)
        assert not c.dkv_via_dq_smem or (c.dq_stages == 2 and not c.role_split and not c.next_tile)
        assert not c.unroll_stages or (c.q_stages == c.do_stages == 2 and not c.role_split)
        assert not c.next_tile or (c.kv_stages == 2 and not c.role_split)
        # With scope `KV_HEAD` the first tile has to visit all rows, and to lie where a head's tiles begin.
        bounded = (f.left or any(f.mods)) and f.mods != Mods(bounds="stacked")
        others = bounded or f.mask or f.varlen or f.deterministic or c.role_split
        assert c.scope != Scope.KV_HEAD or not others
        assert not c.preprocesses or (c.scope == Scope.KV_HEAD and not f.large_scores)
        assert not c.preprocesses or self.consumer_warps == NUM_WARPS
        assert not f.dmask or f.float_mask
        assert bool(f.mods.score_mod) == bool(f.mods.derivative) and not (any(f.mods) and f.mask)
        assert c.kv_stages in (1, 2) and c.ds_stages in (1, 2) and min(c.q_stages, c.do_stages) >= 1
        consumer, producer = self.registers
        assert registers_suffice(self.threads, consumer * WARPGROUPS + producer)
        assert c.shared_memory(f) <= SHARED_MEMORY
