"""Who does what, and in how much shared memory.

A CTA has one tile of query rows, and each of its warps `row_mmas` times 16 of them. All warps do the same,
block of keys after block, from the last to the first; or `column_warps` warps share 16 rows:

    load      every warp copies some of the rows of K and V, by cp.async
    mainloop  S = Q K^T of the warp's rows, softmax, O += P V; with dropout the keep bits of its weights
    epilogue  O through the memory of Q, which nothing reads any more, and lse

The copies of a block's K and of its V are a cp.async group each. A barrier of the CTA says that a block's K
has come, and that the V before it has been used; another one that its V has come, and that its K has been
used. Then the copies begin that take the place of what has been used, `kv_stages` blocks ahead.

Warps that share rows divide the keys of S and the columns of O. They tell each other the maxima of their keys
before the second barrier, and P goes through SMEM before a third one.
"""

from __future__ import annotations

from ....configs.types import Sm80Forward
from ...common import warp_mma, warp_tf32
from ...common.fwd.plan import ForwardPlan
from ...common.host import NUMERIC
from ...common.softmax import Method
from ...common.warps import WARP
from ..registers import Registers, registers_of_threads


class Plan(ForwardPlan):
    __slots__ = ()

    config: Sm80Forward

    @property
    def D(self) -> int:
        return self._tile_dim(self.features.D)

    @property
    def Dv(self) -> int:
        return self._tile_dim(self.features.Dv, self.column_warps)

    def _tile_dim(self, D: int, parts: int = 1) -> int:
        step = self.features.column_step * parts
        return -(-D // step) * step

    @property
    def column_warps(self) -> int:
        """Warps that share rows."""
        return self.config.column_warps

    @property
    def shares_rows(self) -> bool:
        """Whether warps read P of their rows from SMEM."""
        return self.column_warps > 1

    @property
    def own_keys(self) -> int:
        """Keys of a block whose scores a warp computes."""
        return self.config.own_keys

    @property
    def own_columns(self) -> int:
        """Columns of O that a warp computes."""
        return self.Dv // self.column_warps

    @property
    def is_float32(self) -> bool:
        return self.features.is_float32

    @property
    def tf32_method(self) -> warp_tf32.Method:
        f, c = self.features, self.config
        is_exact, has_band = f.is_exact, f.left or f.right
        # Two chunks of scores spill elsewhere (4 to 8 times), and without a band if the warp meets (3 times).
        by_two = c.reads_ahead and self.D == 128 and not (self.shares_rows or (has_band and c.pack_gqa > 1))
        # Three steps are an iteration less; with 256 columns they spill (2 to 80 times).
        return warp_tf32.Method(
            is_exact,
            steady=is_exact and (has_band or not by_two),
            ahead=c.reads_ahead,
            chunks=2 if by_two else 1,
            steps=3 if c.reads_ahead and max(self.D, self.Dv) <= 192 else 2,
            chunks_apart=c.chunks_apart,
        )

    @property
    def q_stages(self) -> int:
        """Stages that Q takes: a second one has its numbers' small parts."""
        return 2 if self.config.splits_q else 1

    @property
    def rest_of_q(self) -> int:
        """Bytes from a number of Q to its small part; 0 if numbers are split as they are read."""
        return 2 * self.rows * self.halves(self.D) if self.config.splits_q else 0

    @property
    def counts_blocks(self) -> bool:
        """Whether numbers of blocks are counted anew in each turn, and none is kept for the next: three
        products have no registers to spare (ptxas.md, P17).
        """
        return (self.features.is_exact or self.row_mmas > 1) and not self.features.lists_blocks

    @property
    def scarce(self) -> bool:
        """Whether O and S leave so few registers that addresses are kept, and scores computed by parts."""
        is_lazy = self.config.lazy_rescale and not self.is_float32
        return is_lazy and self.stages == 1

    @property
    def makes_keys_anew(self) -> bool:
        """Whether round keys of dropout are computed in each block: with 32 rows to a warp and 64 keys they
        have no registers, unless rescaling in a branch leaves some. With 32 keys they have.
        """
        many = self.row_mmas > 1 and self.keys > 32
        return self.features.dropout and many and not self.config.lazy_rescale

    @property
    def keeps_mask_rows(self) -> bool:
        """Whether a thread's rows of a mask are found once a tile, and words of a bool mask loaded early."""
        return bool(self.features.mask) and not self.scarce

    @property
    def staged_dtype(self) -> type:
        """The type of what is in SMEM; a float32 number is two of these."""
        return NUMERIC["bfloat16"] if self.is_float32 else self.dtype

    def halves(self, D: int) -> int:
        """Columns in SMEM of D columns in memory, without padding."""
        return 2 * D if self.is_float32 else D

    @property
    def mma_rows(self) -> int:
        return warp_mma.ROWS

    @property
    def row_mmas(self) -> int:
        return self.config.row_mmas

    @property
    def warp_rows(self) -> int:
        return self.row_mmas * warp_mma.ROWS

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
    def rows(self) -> int:
        """Rows of a tile."""
        return self.config.rows

    @property
    def stages(self) -> int:
        return self.config.kv_stages

    @property
    def groups_in_flight(self) -> int:
        """Groups of copies that may still be under way when a block's K, or its V, has to be there."""
        return 2 * (self.stages - 1)

    @property
    def stages_o(self) -> bool:
        """Whether O leaves through SMEM."""
        return not (self.is_float32 or self.stores_float32)

    @property
    def stores_by_tma(self) -> bool:
        return False

    @property
    def softmax(self) -> Method:
        return Method(
            warp_mma.LANES,
            self.rows_may_be_masked,
            self.config.lazy_rescale,
            subtracts_max_first=self.features.large_scores,
        )

    def check(self) -> None:
        """Raise AssertionError for a plan that would not run; `configs` never asks for one."""
        f, c = self.features, self.config
        assert f.D % 8 == 0 and f.Dv % 8 == 0 and 8 <= min(f.D, f.Dv) and max(f.D, f.Dv) <= 512
        assert f.is_float32 or not f.tf32
        assert c.keys % 16 == 0 and 16 <= c.keys <= 256
        assert c.warps in (2, 4, 8) and c.row_mmas in (1, 2) and c.kv_stages >= 1
        assert c.rows % c.pack_gqa == 0 and c.column_warps in (1, 2) and c.own_keys % 16 == 0
        assert c.column_warps == 1 or (c.row_mmas == 1 and not (f.is_float32 and c.keys % 32))
        assert not (f.dropout and c.pack_gqa > 1), "dropout's random numbers follow unpacked rows"
        assert not (any(f.mods) and (f.is_float32 or self.shares_rows))
        assert not self.paged
        assert not (f.is_float32 and c.lazy_rescale) and (f.is_exact or not c.splits_q)
        self.check_running()
        self.check_splits()
        assert not f.running or f.is_float32 or not self.shares_rows
