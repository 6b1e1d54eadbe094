"""Who does what in the weights kernel, and in how much shared memory.

A CTA has a tile of queries by keys, of one batch entry, and goes through query heads:

    warps 0 to 7    32 queries by 64 keys each: S = Q K^T by warp-level MMAs, P = exp(S - lse), dropout;
                    sums of P over the heads, or P of each head, go to global memory; P may have signs that
                    say what dropout takes, so that one launch gives P before and after it
    warp 8          the load warp: Q and K by TMA, a chunk of up to 64 columns at a time
    warps 9 to 11   nothing

    load_qk         chunks of Q and K; `stages` of them

Without TMA there are warps 0 to 7 alone, which also copy the chunks, by cp.async. So it is with float32 on
every architecture: a chunk has 32 columns then, the bytes of 64 16-bit ones.
"""

from __future__ import annotations

from typing import NamedTuple

from ...configs.types import Features, tile_dim
from ...configs.weights import KEYS, MASK_BLOCK, QUERIES, WARP_GRID, WARP_TILE
from ..common import warp_tf32
from ..common.band import BandShape
from ..common.host import NUMERIC
from ..common.mask_tables import MaskPlan
from ..common.smem_layouts import chunk_of
from ..common.warps import GROUP, WARP

_CHUNK = 64
"""16-bit columns that the widest swizzle spans."""
_STAGES_BYTES = 160 * 1024
_STAGES_OF_COPIES, _STAGES_OF_COPIES_WITH_DROPOUT = 3, 2
"""Stages without TMA: what 99 KiB of shared memory hold, with dropout next to its keep bits."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Registers of a thread."""


class WeightsPlan(NamedTuple):
    """What the kernel is compiled for; `Dv` and `varlen` of the features are not read."""

    features: Features
    average: bool
    """Whether weights are averaged over the heads."""
    tma: bool = True
    """Whether Q and K come by TMA, and a warp of its own loads them."""
    signed: bool = False
    """Whether dropout makes a head's weights negative instead of 0, and leaves the others as they are."""

    @property
    def dtype(self) -> type:
        return NUMERIC[self.features.dtype]

    @property
    def is_float32(self) -> bool:
        return self.features.is_float32

    @property
    def tf32_method(self) -> warp_tf32.Method:
        return warp_tf32.Method(self.features.is_exact, steady=False)

    @property
    def staged_dtype(self) -> type:
        """The type of what is in SMEM; a float32 number is two of these."""
        return NUMERIC["bfloat16"] if self.is_float32 else self.dtype

    def halves(self, columns: int) -> int:
        """Columns in SMEM of as many columns in memory."""
        return 2 * columns if self.is_float32 else columns

    @property
    def consumer_warps(self) -> int:
        return WARP_GRID[0] * WARP_GRID[1]

    @property
    def threads(self) -> int:
        """A warpgroup has the load warp: registers are shared out by warpgroups."""
        return self.consumer_warps * WARP + (GROUP if self.tma else 0)

    @property
    def chunk(self) -> int:
        """Columns of Q and K in a stage."""
        if self.is_float32:
            return warp_tf32.CHUNK
        D = tile_dim(self.features.D)
        return _CHUNK if D > _CHUNK else chunk_of(D)

    @property
    def chunks(self) -> int:
        return -(-self.features.D // self.chunk)

    @property
    def stage_bytes(self) -> int:
        return 2 * (QUERIES + KEYS) * self.halves(self.chunk)

    @property
    def stages(self) -> int:
        if not self.tma:
            return _STAGES_OF_COPIES_WITH_DROPOUT if self.features.dropout else _STAGES_OF_COPIES
        return min(8, _STAGES_BYTES // self.stage_bytes)

    @property
    def loads_late(self) -> bool:
        """Whether a thread loads what a head needs besides Q and K only after its scores, each time: next to
        sums over heads it has no registers to keep it in without those of the load warp.
        """
        return self.average and not self.tma

    @property
    def band(self) -> BandShape:
        """The band, for a warp's keys; keys beyond Sk are not stored, whatever their weights."""
        return BandShape(self.features.left, self.features.right, False, WARP_TILE[1])

    @property
    def mask(self) -> MaskPlan:
        """How attn_mask's tables divide it into blocks: a block has the keys of a warp."""
        return MaskPlan(self.features.mask, *MASK_BLOCK)

    def check(self) -> None:
        """Assert what the kernel relies on."""
        f = self.features
        assert not (f.is_float32 and self.tma) and (f.is_float32 or not f.tf32)
        assert not self.signed or (f.dropout and not self.average)
