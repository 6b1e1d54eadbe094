"""Who does what, and in how much shared memory.

A CTA has one tile of keys of one KV head, and visits every block of queries, of all query heads of the group,
that sees one of these keys. Keys are the rows of S^T, dP^T, dK and dV: each warp has 16 of them, or
`column_warps` warps share 16. All warps do the same, block after block:

    load      every warp copies some of the rows of Q and dO, by cp.async, with the results of the preprocess
              kernel: lse and delta, and with the tile of a floating mask
    mainloop  S^T = K Q^T, P; dP^T = V dO^T, dV += P^T dO; dS to SMEM, dK += dS^T Q, for one part of the
              queries after another; dQ = dS K, of which each warp has 16 or 32 rows or, `dq_warps` sharing
              these, some columns of them
    dq_sums   a red.add for each number of dQ; in order, between two barriers and a semaphore
    epilogue  dK and dV through the memory of K and V

The copies of a block are one cp.async group. A barrier of the CTA says that a block has come, and that dS of
the block before has been used; another one that dS is written. Where blocks overlap, an mbarrier stands in
for the first one: see `empty`. If several warps share keys, they read P and dS from SMEM for dV and dK, too,
behind the barrier of dS: all of it, or the other warps'. Columns are shared such that every warp has some of
each chunk: see `warp_mma.Share`.
"""

from __future__ import annotations

from ....configs.types import Sm80Backward
from ...common import dropout, warp_mma, warp_tf32
from ...common.bwd.dq_blocks import DqBlocks, sums_of
from ...common.bwd.plan import BackwardPlan
from ...common.host import NUMERIC
from ...common.smem_layouts import chunk_of
from ...common.warps import WARP
from ..registers import Registers, registers_of_threads


class Plan(BackwardPlan):
    __slots__ = ()

    config: Sm80Backward

    @property
    def blocks(self) -> DqBlocks:
        return sums_of(self.features.D, self.config, self.features.column_step)

    @property
    def D(self) -> int:
        """Head size of Q and K in shared memory."""
        return self.blocks.columns

    @property
    def Dv(self) -> int:
        step = self.features.column_step * self.column_warps
        return -(-self.features.Dv // step) * step

    @property
    def is_float32(self) -> bool:
        return self.features.is_float32

    @property
    def tf32_method(self) -> warp_tf32.Method:
        is_exact, ahead = self.features.is_exact, self.config.reads_ahead
        # Single products that read ahead spill in neither form; D 64 is faster if the warp does not meet.
        return warp_tf32.Method(is_exact, steady=is_exact or not ahead, ahead=ahead)

    @property
    def staged_dtype(self) -> type:
        """The type of what is in SMEM; a float32 number is two of these."""
        return NUMERIC["bfloat16"] if self.is_float32 else self.dtype

    def halves(self, columns: int) -> int:
        """Columns in SMEM of so many columns."""
        return 2 * columns if self.is_float32 else columns

    @property
    def dq_chunk(self) -> int:
        """Columns of dQ of which each of `dq_warps` has an equal part: those of a chunk of K, but all of
        float32 numbers.
        """
        return self.D if self.is_float32 else chunk_of(self.D)

    @property
    def dq_own(self) -> int:
        """Columns of these that are a warp's."""
        return self.dq_chunk // self.config.dq_warps

    @property
    def mask_bytes(self) -> int:
        """Bytes of a number of the mask."""
        return 4 if self.features.mask == "float32" else 2

    @property
    def warps(self) -> int:
        return self.config.warps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def registers(self) -> Registers:
        return registers_of_threads(self.threads)

    @property
    def column_warps(self) -> int:
        """Warps that share 16 keys."""
        return self.config.column_warps

    @property
    def key_mmas(self) -> int:
        return self.config.key_mmas

    @property
    def warp_keys(self) -> int:
        """Keys of a warp, or of several that share them."""
        return self.key_mmas * warp_mma.ROWS

    @property
    def own_queries(self) -> int:
        """Queries of a block whose scores a warp computes."""
        return self.queries // self.column_warps

    @property
    def query_parts(self) -> int:
        """Parts of these queries, one after another."""
        return self.config.query_parts

    @property
    def part_queries(self) -> int:
        """Queries of a part."""
        return self.own_queries // self.query_parts

    @property
    def has_eight(self) -> bool:
        """Whether a part is eight queries, half of an ldmatrix's: two warps share a chunk of P and dS."""
        return self.part_queries == 8

    @property
    def chunk_queries(self) -> int:
        """Queries of a part of P and dS in SMEM."""
        return max(self.part_queries, warp_mma.ROWS)

    @property
    def part_strips(self) -> int:
        """Strips of keep bits of a part, for 16 keys."""
        return dropout.strips(self.part_queries)

    @property
    def keep_words(self) -> int:
        """Words of a lane's keep bits of a part."""
        return dropout.words(self.key_mmas * self.part_strips * dropout.STRIP)

    @property
    def generates_by_parts(self) -> bool:
        """Whether a part's keep bits are generated just before they are used, where its dS will be: two CTAs
        have room in an SM of 164 KiB. Otherwise a block's are generated at once.
        """
        return self.query_parts > 1

    @property
    def generates_ahead(self) -> bool:
        """Whether the next block's keep bits are generated among a block's last MMAs, which wait for SMEM."""
        return self.features.dropout and self.config.own_in_regs and not self.generates_by_parts

    @property
    def generates_under_wait(self) -> bool:
        """Whether a block's keep bits are generated ahead of the wait for it."""
        return self.features.dropout and not (self.generates_by_parts or self.generates_ahead)

    @property
    def begins_at_delta(self) -> bool:
        """Whether sums of dP begin at -delta / 2: see `weights.begin_dp`. Wide heads next to floating masks
        have no registers to spare, and took 2 to 3 % longer.
        """
        f = self.features
        has_room = not (f.float_mask and max(self.D, self.Dv) > 128)
        return f.is_exact and has_room and not f.dropout

    @property
    def drops_both(self) -> bool:
        """Whether P and dP are dropped together, after dP's MMAs, and P is rounded as late."""
        return self.features.dropout and self.config.own_in_regs

    @property
    def shares_weights(self) -> bool:
        """Whether warps read P and dS of their keys from SMEM, not only dS of all keys."""
        return self.column_warps > 1

    @property
    def own_in_regs(self) -> bool:
        """Whether a warp's own P and dS are operands from registers."""
        return not self.shares_weights or self.config.own_in_regs

    @property
    def stores_by_address(self) -> bool:
        """Whether P and dS are stored by one address a lane. With one MMA of keys, and with masks, some of
        these kernels spill; up to 96 columns they are slower.
        """
        f = self.features
        is_wide = max(self.D, self.Dv) > 96 or self.query_parts > 1
        return self.has_eight or (self.key_mmas > 1 and not f.mask and is_wide)

    @property
    def dq_row_mmas(self) -> int:
        """MMAs of 16 rows of dQ that a warp has."""
        return self.config.dq_row_mmas

    @property
    def dq_rows(self) -> int:
        """Rows of dQ that a warp has."""
        return self.dq_row_mmas * warp_mma.ROWS

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a warp computes."""
        return self.D // self.config.dq_warps

    @property
    def dq_columns_at_once(self) -> int:
        """Columns of dQ that a warp has in registers: of wide heads, and of few queries, few. Of others,
        where sums have no order, all, or what is left next to dK and dV of two MMAs, or to what dropout and
        the band need where no warps share keys. With dropout half of 256: all spill 3 to 6 times for sm_86.
        """
        f, columns = self.features, self.dq_columns
        if self.is_float32:
            return columns if columns <= 128 else columns // 2
        if max(self.D, self.Dv) > 256 or self.queries < 64:
            return next(n for n in (32, 16, 8) if columns % n == 0)
        if f.deterministic:
            return columns
        if self.key_mmas > 1:
            return 32 if columns % 32 == 0 else columns
        if f.dropout and columns > 192:
            return columns // 2
        if f.dropout and self.band.masks and not self.shares_weights:
            return columns // 2 if columns % 32 == 0 else warp_mma.ROWS
        return columns

    @property
    def dq_turns(self) -> int:
        """Parts of the keys by which dQ is summed up in a loop: two where ptxas would read so far ahead that
        it spills. Without any mask and with up to 96 columns it does not, nor with parts of queries; with 32
        rows of dQ only where Sk fills its tiles.
        """
        f = self.features
        bare = not (f.mask or f.left or f.right or f.varlen or f.deterministic or f.softcap or f.dropout)
        bare = bare and not (self.dq_row_mmas > 1 and self.config.ragged_k)
        if self.key_mmas == 1 or (self.dq_row_mmas > 1 and self.query_parts > 1):
            return 1
        if self.dq_row_mmas == 1 and self.dq_columns_at_once < self.dq_columns:
            return 1
        return 1 if bare and max(self.D, self.Dv) <= 96 else 2

    @property
    def stages(self) -> int:
        return self.config.stages

    @property
    def ahead(self) -> int:
        """The block that is loaded while one is worked on comes as many blocks later."""
        return max(self.stages - 1, 1)

    @property
    def groups_in_flight(self) -> int:
        """Groups of copies that may still be under way when a block has to be there."""
        return max(self.stages - 2, 0)

    @property
    def overlaps_blocks(self) -> bool:
        """Whether a warp may begin a block's S before all warps have used the block before: see `empty`."""
        return self.config.copies_after_scores

    @property
    def masks(self) -> bool:
        return self.band.left or self.band.right or self.config.ragged_k or self.features.lists_blocks

    @property
    def last_tile_first(self) -> bool:
        """Whether a head's last tile adds its dQ first: see the Hopper kernel's plan."""
        return self.features.deterministic and self.features.right

    @property
    def alternates_direction(self) -> bool:
        return False

    def check(self) -> None:
        """Raise AssertionError for a plan that would not run; `configs` never asks for one."""
        f, c = self.features, self.config
        assert f.D % 8 == 0 and f.Dv % 8 == 0 and 8 <= min(f.D, f.Dv) and max(f.D, f.Dv) <= 512
        assert not (f.is_float32 and any(f.mods)) and (f.is_float32 or not f.tf32)
        assert c.queries in (32, 64, 128) and c.column_warps in (1, 2, 4) and c.warps in (2, 4, 8)
        assert c.key_mmas in (1, 2) and not (c.key_mmas > 1 and f.mask and f.dropout)
        strips = self.key_mmas * self.part_strips
        assert c.query_parts == 1 or (self.part_queries % dropout.STRIP == 0 and not f.is_float32)
        assert not (self.has_eight and (self.own_in_regs or c.scores_by_parts)), "an MMA has 16 queries"
        assert c.query_parts == 1 or not f.dropout or strips % 2 == 0, "a word has bits of two strips"
        assert c.warps >= c.column_warps and 16 * c.warps % c.queries == 0, "dQ is not shared out evenly"
        assert not (c.own_in_regs and f.is_float32) and (f.is_float32 or not c.reads_ahead)
        own = self.dq_columns_at_once % self.dq_own == 0 or self.dq_columns <= self.dq_chunk
        assert own or self.is_float32, "columns of dQ at once are no whole chunks"
        assert not c.copies_after_scores or (c.stages > 1 and c.query_parts == 1)
        assert not self.overlaps_blocks or self.dq_columns_at_once == self.dq_columns, "it is released once"
        assert c.stages >= 1 and (f.float_mask or not f.dmask)
        assert bool(f.mods.score_mod) == bool(f.mods.derivative) and not (any(f.mods) and f.mask)
