"""Roles of the warps, their registers, shared memory (SMEM) and tensor memory (TMEM).

A CTA stays for the whole launch and claims tiles from a counter: a tile is 128 keys of one KV head. It visits
every row of queries, of all query heads of the group, that sees one of its keys.

    warps 0 to 3     reduce: take dQ out of TMEM and have it added to global memory, 32 rows each
    warps 4 to 11    compute: scores to P, then to dS; a thread has a key and half of a block's queries;
                     at a tile's end the first four store dV, the others dK
    warp 12          mma: issues S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q and dQ = dS K
    warp 13          load: claims tiles, loads K and V, then Q and dO block after block

    load_k, load_v    K and V of a tile, and which tile it is; `kv_stages` each. dK and dV leave through them
    load_q, load_do   blocks of rows; lse and delta come with Q

The two CTAs of a pair claim neighbouring tiles, and both visit every block that either tile sees. MMAs then
have 256 rows, or for wide heads 128, half from each CTA, and are issued in CTA 0. Each CTA has dQ of half of
the rows, computed from both tiles' dS: its compute warps write the other half of their dS into the peer.
Where heads are wide, a CTA has 64 keys; both halves of its lanes have all of them, with half of the columns
each, so that P^T and dS^T go through SMEM.

TMEM, 512 columns: S^T, dP^T, dV and dK, one key per lane. P^T in 16 bits lies over S^T, dS^T over dP^T: each
half of the compute warps overwrites its own 64 columns, and only when it has read them. dQ, one query per
lane, has columns of its own where D leaves them, else it lies over dP^T.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ....configs.types import SHARED_MEMORY, Sm100Backward
from ...common.budget import Budget, always, registers_of
from ...common.bwd.dq_blocks import DqLanes
from ...common.bwd.plan import BackwardPlan
from ...common.warps import GROUP, WARP, WARPS, registers_suffice
from ..umma import DEPTH, Matrix, MmaOp

LANES = 128
"""TMEM lanes: the keys of a tile, and the queries of a block."""
COLUMNS = 512
HALF = 64
"""Queries of a block that a compute thread has."""
MMA_WARP = 12
LOAD_WARP = 13
THREADS = 16 * WARP
COMPUTE_WARPS = 2 * WARPS
REDUCE_WARPS = WARPS
PIECE = 32
"""Columns of dQ, at most, of a load from TMEM and of a copy to global memory."""


class NamedBarrier(IntEnum):
    """First hardware barrier of each use."""

    STAGED = 1
    """One barrier for dV and one for dK: four warps have staged it."""


class Registers(NamedTuple):
    """Registers of a thread, by role."""

    compute: int
    reduce: int
    other: int


_WITH_FEATURES = Registers(176, 64, 96)
_BUDGETS = (
    Budget(
        lambda p: p.wide and (p.scarce or (p.features.dropout and p.features.softcap)),
        Registers(152, 96, 112),
        "wide heads: dropout with softcap or a mask",
    ),
    Budget(lambda p: p.wide and p.features.lists_blocks, Registers(144, 128, 96), "wide heads with a mask"),
    Budget(
        lambda p: p.wide, Registers(144, 112, 112), "wide heads: a compute thread has half as many queries"
    ),
    Budget(
        lambda p: (
            p.features.softcap
            or p.features.dropout
            or p.features.float_mask
            or p.features.mods.changes_scores
        ),
        _WITH_FEATURES,
        "softcap, dropout and floating masks take registers of compute",
    ),
    Budget(always, Registers(144, 128, 96), "dQ of 64 columns in the reduce warps"),
)


class Plan(BackwardPlan):
    __slots__ = ()

    config: Sm100Backward

    @property
    def D(self) -> int:
        """Head size of Q and K in SMEM."""
        return self.sums.columns

    @property
    def Dv(self) -> int:
        step = self.config.column_step
        return -(-self.features.Dv // step) * step

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def registers(self) -> Registers:
        return registers_of(self, _BUDGETS)

    @property
    def scarce(self) -> bool:
        """Whether values that all roles would keep are computed anew (ptxas.md, P15 and P16).

        Next to a mask, keeping them spills; elsewhere, computing them anew does.
        """
        return self.wide and self.features.dropout and self.features.lists_blocks

    @property
    def dq_together(self) -> int:
        """Columns of dQ that a thread holds: the sooner all are read from TMEM, the sooner dP may follow."""
        return PIECE if self.registers == _WITH_FEATURES else 2 * PIECE

    @property
    def sums(self) -> DqLanes:
        return DqLanes(self.features.D, self.queries, self.config.column_step)

    @property
    def wide(self) -> bool:
        """Whether a CTA has 64 keys: each half of its lanes has all of them, and half of the columns."""
        return self.keys == LANES // 2

    @property
    def own_queries(self) -> int:
        """Queries of a block that a compute thread has."""
        return self.queries // 4 if self.wide else self.queries // 2

    # Columns of TMEM.

    @property
    def s_at(self) -> int:
        return 0

    @property
    def dp_at(self) -> int:
        return self._columns(self.queries)

    @property
    def dv_at(self) -> int:
        return 2 * self.dp_at

    @property
    def dk_at(self) -> int:
        return self.dv_at + self._columns(self.Dv)

    @property
    def dq_columns(self) -> int:
        """TMEM columns of dQ. In a CTA pair: half of the rows per CTA, half of D per half of its lanes."""
        return self.D // self.cluster_size

    @property
    def dq_apart(self) -> bool:
        """Whether dQ has columns of its own: the next dP^T then need not wait until dQ is taken out."""
        return self._after_dk + self.dq_columns <= COLUMNS

    @property
    def dq_at(self) -> int:
        return self._after_dk if self.dq_apart else self.dp_at

    @property
    def _after_dk(self) -> int:
        return self.dk_at + self._columns(self.D)

    def _columns(self, N: int) -> int:
        """TMEM columns of an accumulator of N columns whose rows are keys."""
        return N // 2 if self.wide else N

    @staticmethod
    def weights_at(step: int) -> int:
        """Column, among those of P^T or dS^T, at which the `step`-th instruction's part starts."""
        half, step = divmod(step, HALF // DEPTH)
        return half * HALF + step * DEPTH // 2

    # MMAs. In a CTA pair each CTA has half of the rows of both operands.

    @property
    def op_s(self) -> MmaOp:
        return self._op(self.keys, self.queries, Matrix(self.keys, self.D), self.rows_of_q)

    @property
    def op_dp(self) -> MmaOp:
        return self._op(self.keys, self.queries, Matrix(self.keys, self.Dv), self.rows_of_do)

    @property
    def op_dv(self) -> MmaOp:
        return self._op(self.keys, self.Dv, self._weights, self.columns_of_do)

    @property
    def op_dk(self) -> MmaOp:
        return self._op(self.keys, self.D, self._weights, self.columns_of_q)

    @property
    def op_dq(self) -> MmaOp:
        own = self.queries // self.cluster_size
        return self._op(own, self.D, Matrix(self.cluster_keys, own, True), self.columns_of_k)

    @property
    def rows_of_q(self) -> Matrix:
        return Matrix(self.queries // self.cluster_size, self.D)

    @property
    def rows_of_do(self) -> Matrix:
        return Matrix(self.queries // self.cluster_size, self.Dv)

    @property
    def columns_of_q(self) -> Matrix:
        return Matrix(self.queries, self.D // self.cluster_size, True)

    @property
    def columns_of_do(self) -> Matrix:
        return Matrix(self.queries, self.Dv // self.cluster_size, True)

    @property
    def columns_of_k(self) -> Matrix:
        return Matrix(self.cluster_keys, self.D // self.cluster_size, True)

    @property
    def _weights(self) -> Matrix | None:
        """P^T and dS^T of the CTA's own keys: in TMEM (None), unless both halves of its lanes need them."""
        return Matrix(self.keys, self.queries) if self.wide else None

    def _op(self, own_rows: int, N: int, a: Matrix | None, b: Matrix) -> MmaOp:
        return MmaOp(self.features.dtype, own_rows * self.cluster_size, N, a, b, self.cluster_size)

    # Which blocks a tile visits, and what is masked in them.

    @property
    def last_tile_first(self) -> bool:
        """Whether a head's last tile is claimed first, and adds its dQ first.

        Each tile of a band with a right bound begins at another block: the tile that reaches a block last is
        the one that has visited most blocks before. In any other order tiles would wait for it from their
        first block on.
        """
        return self.features.deterministic and self.features.right

    @property
    def masks(self) -> bool:
        return self.band.left or self.band.right or self.config.ragged_k or self.features.lists_blocks

    @property
    def queries_together(self) -> int:
        """Queries whose scores a thread holds: half of its own with softcap and a mask, unless `wide`."""
        halves = self.features.softcap and self.features.mask and not self.wide
        return self.own_queries // 2 if halves else self.own_queries

    @property
    def keeps_dtanh(self) -> bool:
        """Whether softcap's derivatives are computed before a mask or score_mod leaves no capped scores."""
        f = self.features
        return f.softcap and (f.float_mask or bool(f.mods.score_mod))

    @property
    def loaders(self) -> int:
        """Load warps that arrive at the stages that they fill in CTA 0: CTA 0's for both CTAs.

        With packed sequences both arrive, each when what follows the end is zeroed.
        """
        return self.cluster_size if self.features.varlen else 1

    @property
    def key_loads(self) -> int:
        """Arrivals with K in a CTA pair.

        With packed sequences each load warp arrives twice: with its K, with half of the columns of both K.
        """
        return 2 * self.loaders if self.features.varlen else 1

    def check(self) -> None:
        """Raises AssertionError for what would not run; `configs` never asks for it."""
        f, c = self.features, self.config
        assert f.D % 8 == 0 and f.Dv % 8 == 0 and 8 <= min(f.D, f.Dv) and max(f.D, f.Dv) <= 256
        assert self.queries == LANES and self._after_dk <= COLUMNS
        assert (c.cluster, c.keys) in ((1, 128), (2, 128), (2, 64)) and (self.dq_apart or not self.wide)
        assert c.kv_stages in (1, 2) and min(c.q_stages - 1, c.do_stages, c.dq_slots) >= 1
        assert c.cluster == 1 or (c.kv_stages == 1 and c.half_block_stages >= 2)
        assert not f.dmask or f.float_mask
        assert bool(f.mods.score_mod) == bool(f.mods.derivative) and not (any(f.mods) and f.mask)
        compute, reduce, other = self.registers
        assert registers_suffice(THREADS, 2 * compute + reduce + other) and GROUP == LANES
        assert c.shared_memory(f) <= SHARED_MEMORY
