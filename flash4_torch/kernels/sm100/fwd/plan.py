"""Roles of the warps, their registers, shared memory (SMEM), tensor memory (TMEM), and edges between roles.

A CTA stays for the whole launch. From a counter it claims one work item after another: two tiles of 128 query
rows, or one.

    warps 0 to 3, 4 to 7    softmax of the first and of the second tile, one row per thread; lse
    warps 8 to 11           correction: rescale O where row_max has grown; at the end normalise and store it
    warp 12                 mma: issues S = Q K^T and O += P V of both tiles
    warp 13                 load: claims tiles, loads Q, K and V by TMA
    warps 14, 15            idle

The two CTAs of a pair claim tiles together. MMAs then have 256 rows, 128 from each CTA, take half of K's rows
and of V's columns from each, and are issued in CTA 0. Q, K and V of both CTAs arrive there, and `s_p` and
`late` count the warps of both; MMAs signal in both.

TMEM, in columns of 32 bits: S of each tile, then O of each tile. P is written over the first half of its S
once S has been read.

Edges, each with who arrives; `t` counts tiles:

    tile        which tile it is; the load warp, and every warp that has read it
    load_q[t]   Q; TMA, and the MMAs that read it (with `o_over_q` the correction warps, after O has left)
    load_kv     K and V alternately; TMA, and the MMAs that read them
    s_p[t]      full: the MMA of S; empty: 4 softmax warps, which have read S and written the early part of
                P, and 4 correction warps, which have rescaled O, or before the first block have read the
                previous tile's O. PV and the next QK^T follow: MMAs complete in order, so S and P share
                columns
    late[t]     the rest of P; 4 softmax warps. Empty when S is full again, as that comes after PV
    o[t]        O is complete: the last PV. Free when the correction warps arrive at the next tile's `s_p`
    scale[t]    a factor for each row of O, by named barriers of one softmax and one correction warp. The slot
                is free when the next S is full: the correction warp arrived at `s_p` before it
    inverse[t]  one over each row_sum; 4 softmax warps, and 4 correction warps that have read it
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from ....configs.types import SHARED_MEMORY, Sm100Forward, may_pair
from ...common.budget import Budget, always, registers_of
from ...common.exponent import Exponent
from ...common.fwd.plan import ForwardPlan
from ...common.softmax import Method
from ...common.warps import WARP, WARPS, registers_suffice
from ..tmem import COLUMNS
from ..umma import Matrix, MmaOp

ROWS = 128
"""Rows of a tile: each has a TMEM lane and a softmax thread."""
CORRECTION_WARP = 8
"""First of the correction warps."""
MMA_WARP = 12
LOAD_WARP = 13
LAST = 16
TILE_STAGES = 2
LOADED = 32
"""Columns of S that a thread loads at a time."""
RESCALED = 16
"""Columns of O that a thread takes at a time: with 32, registers do not suffice (ptxas.md, P18)."""


class NamedBarrier(IntEnum):
    """First hardware barrier of each use."""

    RESCALE = 1
    """One barrier for each softmax warp: the factors for O."""


class Registers(NamedTuple):
    """Registers of a thread, by role."""

    softmax: int
    correction: int
    other: int
    idle: int
    """The second tile's softmax warps, where there is no second tile; elsewhere the same as `other`."""


def _is_banded(p: Plan) -> Any:
    f = p.features
    return f.left or f.right or f.varlen or f.lists_blocks


def _is_exact(p: Plan) -> Any:
    """Dropout of narrow heads without the polynomial."""
    return p.features.dropout and p.D <= 64 and not p.config.polynomial


def _drops(p: Plan) -> Any:
    """Dropout that needs registers in softmax."""
    f = p.features
    middle = p.D <= 96 and f.mask != "bool" and (_is_banded(p) or p.config.polynomial)
    narrow = p.D <= 64 or middle or (f.softcap and p.cluster_size > 1)
    return f.dropout and narrow and not _is_exact(p)


def _is_capped(p: Plan) -> Any:
    f = p.features
    return f.softcap and f.right and p.config.polynomial and not (f.left or f.varlen or f.mask or f.dropout)


def _is_ragged(p: Plan) -> Any:
    """Only the end of Sk is masked."""
    return p.config.ragged_k and not (_is_banded(p) or p.features.softcap)


_BUDGETS = (
    Budget(
        lambda p: p.q_tiles == 1 and p.features.dropout and (p.cluster_size > 1 or _is_ragged(p)),
        Registers(208, 128, 128, idle=24),
        "one tile, dropout: CTA pairs, or only the end masked",
    ),
    Budget(
        lambda p: p.q_tiles == 1 and p.features.dropout and p.features.float_mask,
        Registers(224, 96, 96, idle=24),
        "one tile, dropout beside a floating mask",
    ),
    Budget(
        lambda p: p.q_tiles == 1, Registers(240, 120, 120, idle=24), "one tile: the second one's are free"
    ),
    Budget(
        lambda p: _is_exact(p) and not p.rows_may_be_masked and p.config.ragged_k,
        Registers(200, 56, 56, idle=56),
        "narrow dropout without the polynomial; the end of Sk masked",
    ),
    Budget(
        lambda p: _is_exact(p) and not p.rows_may_be_masked,
        Registers(192, 64, 64, idle=64),
        "narrow dropout without the polynomial, nothing masked",
    ),
    Budget(
        lambda p: _drops(p) or _is_capped(p) or (p.features.right and p.D > 128),
        Registers(176, 80, 80, idle=80),
        "correction spills with fewer: dropout, causal softcap, wide causal heads",
    ),
    Budget(always, Registers(184, 72, 72, idle=72), "what spills least elsewhere"),
)
"""Rows were found by compiling: neither more nor fewer for softmax are better throughout (ptxas.md, P25)."""


class Plan(ForwardPlan):
    __slots__ = ()

    config: Sm100Forward

    @property
    def mma_rows(self) -> int:
        return ROWS

    @property
    def warp_rows(self) -> int:
        return WARP

    @property
    def q_tiles(self) -> int:
        return self.config.q_tiles

    @property
    def threads(self) -> int:
        return LAST * WARP

    @property
    def registers(self) -> Registers:
        return registers_of(self, _BUDGETS)

    @property
    def tile_readers(self) -> int:
        """Warps that read which tile it is, besides the one that issues MMAs."""
        return (self.q_tiles + 1) * WARPS

    @property
    def scores(self) -> MmaOp:
        """S = Q K^T."""
        return self._op(self.keys, Matrix(ROWS, self.D), Matrix(self.keys // self.cluster_size, self.D))

    @property
    def output(self) -> MmaOp:
        """O += P V."""
        return self._op(self.Dv, None, Matrix(self.keys, self.Dv // self.cluster_size, along_rows=True))

    def _op(self, N: int, a: Matrix | None, b: Matrix) -> MmaOp:
        return MmaOp(self.features.dtype, ROWS * self.cluster_size, N, a, b, self.cluster_size)

    @property
    def early_steps(self) -> int:
        """Instructions of PV that need only the early part of P."""
        return self.config.early // 16

    @property
    def o_columns(self) -> tuple[int, ...]:
        return tuple(2 * self.keys + t * self.Dv for t in range(self.q_tiles))

    @property
    def kv_elements(self) -> int:
        """Elements of one stage."""
        return self.keys * max(self.D, self.Dv) // self.cluster_size

    @property
    def copies_at_once(self) -> int:
        """Four: with more, or with other numbers for K and V, addresses that all roles share are spilled."""
        return 4

    @property
    def k_rows(self) -> int:
        """Keys that one copy of K brings: a CTA's part of a block, or a box of a page."""
        return self.features.page_box or self.scores.b.rows

    @property
    def v_rows(self) -> int:
        """Keys that one copy of V brings."""
        return self.features.page_box or self.keys

    @property
    def boxes(self) -> int:
        """Copies that bring a stage."""
        return self.page_boxes if self.paged else 1

    @property
    def spans_differ(self) -> bool:
        """Whether tiles may visit different blocks."""
        return self.q_tiles > 1 and self.band.may_mask_rows

    @property
    def only_end_is_partial(self) -> bool:
        """Whether only blocks at the right end may have to be masked: these then have a loop of their own.

        Next to bounds of rows, with two tiles, it spilled.
        """
        f = self.features
        return not (f.left or f.lists_blocks or f.mods.bounds)

    @property
    def skips_pieces(self) -> bool:
        """Whether a warp takes pieces of a block as masked or visible at once; it computes no masked weights.

        Registers do not suffice for these branches next to a mask's or dropout's bits (ptxas.md, P25).
        """
        f = self.features
        return self.band.masks and not (f.mask or f.dropout or f.mods.changes_scores)

    def changes_in_pieces(self, masked: bool) -> bool:
        """Whether scores of a block are changed in TMEM: by a floating mask, or programs that are no ramp."""
        f, mods = self.features, self.features.mods
        hides = mods.mask_mod or mods.blocks == "scores"
        may_hide = bool(hides) and (masked or not mods.blocks)
        return (masked and f.float_mask) or may_hide or bool(mods.score_mod and not mods.ramp)

    @property
    def softmax(self) -> Method:
        exponent = Exponent(self.config.polynomial, 32)
        return Method(
            1,
            self.rows_may_be_masked,
            lazy_rescale=True,
            exponent=exponent,
            packed=True,
            subtracts_max_first=self.features.large_scores,
        )

    def softmax_of(self, masked: bool) -> Method:
        """The softmax of a block, right for large masks (`subtracts_max_first`) only where one may be.

        With dropout all blocks share one softmax: two of them spill at D 256.
        """
        f = self.features
        large = f.mods.makes_large_scores or (f.float_mask and (masked or f.dropout))
        return self.softmax._replace(subtracts_max_first=large)

    def check(self) -> None:
        """Raises AssertionError for what would not run; `configs` never asks for it."""
        f, c = self.features, self.config
        assert f.D % 8 == 0 and f.Dv % 8 == 0 and 8 <= min(f.D, f.Dv) and max(f.D, f.Dv) <= 256
        assert c.q_tiles in (1, 2) and c.keys == 128
        assert c.early % 32 == 0 and 32 <= c.early <= c.keys - 32
        assert c.polynomial in range(0, 33, 2)
        assert c.pack_gqa in (1, 2, 4, 8, 16, 32, 64)
        assert c.cluster == 1 or (c.cluster == 2 and may_pair(f) and c.pack_gqa == 1)
        assert not (f.dropout and c.pack_gqa > 1), "dropout's random numbers follow unpacked rows"
        assert not c.o_over_q or self.Dv <= self.D
        self.check_pages()
        self.check_running()
        self.check_splits()
        assert c.tensor_memory(f) <= COLUMNS
        softmax, correction, other, idle = self.registers
        second = softmax if self.q_tiles == 2 else idle
        assert registers_suffice(self.threads, softmax + second + correction + other)
        assert c.shared_memory(f) <= SHARED_MEMORY
