"""Who does what in the decode kernel, and in how much shared memory.

A CTA has a tile of rows of one sequence and one KV head, and a split of the keys that they see. A row is a
query token and a query head of the KV head's group. Four warps do the same work, block of keys after block:

    load      each warp starts copies of 16 keys of K and V, `stages` - 1 blocks ahead of their MMAs
    mainloop  tile of 16 rows: S of 16 keys each, then PV of a quarter of the columns each
              tile of 32 rows: two pairs of warps, which divide 16 rows in this way
              tile of 64 rows: 16 rows each, of which a warp does everything

The order in which a row's sums are added up is the same in all three, if blocks have as many keys: over
blocks; in a block for PV by key, and for sums of weights by four lanes in each of four parts of the keys. So
is that of splits. A block of 128 keys (`form.keys`) is two runs of 16 keys for each warp.

With warpgroup MMAs (`form.wgmma`; see wide.py) the order is another one, and a tile has 64 rows. With 128
rows (see roles.py) eight warps compute, and four load for them.

A tile of 16 rows whose sequence has no more than 8 (`form.few_rows`) multiplies 16, and does all else for 8.
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float8E4M3FN, Float16

from ...configs import decode
from ...configs.decode import (
    CHUNK,
    GROUP,
    KEYS,
    MMA_ROWS,
    MOST_STAGES,
    WARPGROUP_ROWS,
    WARPS,
    DecodeForm,
)
from ...configs.types import Features, tile_dim
from ..common.band import BandShape
from ..common.host import NUMERIC
from ..common.softmax import Method
from ..common.warps import WARP

PARTS = 4
"""Parts of a block's keys whose weights are summed up separately: as many as warps that may divide it."""

_MOST_WIDENED_AHEAD = 192
"""Columns up to which integers may widen FP8 numbers a block ahead: with 256 they spill."""

VECTOR = 4
"""Columns of O that a thread merges at once, 16 bytes."""

_ALIGNMENT = 1024
"""Bytes that swizzled memory begins at multiples of."""
_COUNT_BYTES = 32
_RING_BYTES = 2 * 2 * 8 * MOST_STAGES
"""Bytes of the barriers of K and V."""


class DecodePlan(NamedTuple):
    """What the kernel is compiled for; `varlen` of the features is not read."""

    features: Features
    rows: int
    """Rows of a tile, one of `configs.decode.ROWS`."""
    form: DecodeForm

    @property
    def dtype(self) -> type:
        return NUMERIC[self.features.dtype]

    @property
    def is_fp8(self) -> bool:
        """Whether K and V are FP8 numbers, and not of Q's dtype."""
        return self.form.cache_dtype != ""

    @property
    def cache_dtype(self) -> type:
        return Float8E4M3FN if self.is_fp8 else self.dtype

    @property
    def mma_dtype(self) -> type:
        """Operands of the MMAs; each 16-bit number of K and V in shared memory, too, or two FP8 numbers."""
        return Float16 if self.is_fp8 else self.dtype

    @property
    def scales_q(self) -> bool:
        """Whether rows of Q are scaled to fit into the MMAs' dtype."""
        return self.mma_dtype is not self.dtype

    @property
    def threads(self) -> int:
        """Threads that compute, and store results."""
        return self.compute_warps * WARP

    @property
    def compute_warps(self) -> int:
        return max(WARPS, self.rows // MMA_ROWS)

    @property
    def has_load_warps(self) -> bool:
        """Whether warps have roles: tiles of two warpgroups, and warps that load for both."""
        return self.rows > WARPGROUP_ROWS

    @property
    def launch_threads(self) -> int:
        return self.threads + (WARPS * WARP if self.has_load_warps else 0)

    @property
    def registers(self) -> tuple[int, int]:
        """Those of a thread that loads, and of one that computes, where warps have roles."""
        return decode.GROUP_REGISTERS if self.form.group_in_regs else decode.REGISTERS

    @property
    def in_flight(self) -> int:
        """Blocks that the load warps have on their way besides the one that they wait for.

        The warps that compute free V of a block once they have K of the next one: with more blocks on their
        way than this, they and the load warps would wait for each other.
        """
        return min(2, self.stages - 2)

    @property
    def lands_apart(self) -> bool:
        """Whether load warps wait for K and V of a block one after another: with few stages, both at once
        would be there too late."""
        return self.form.keys > KEYS

    @property
    def copies(self) -> int:
        """Runs of keys of a block that each warp copies."""
        return self.form.keys // KEYS

    @property
    def least_blocks(self) -> int:
        """Blocks that a split has at least."""
        return decode.LEAST_BLOCKS // self.copies

    @property
    def q_rows(self) -> int:
        """Rows of Q that warps load together."""
        return min(self.rows, WARPGROUP_ROWS)

    @property
    def lane_rows(self) -> int:
        """Rows of an MMA's accumulator that the loop over blocks looks at in each lane, of two."""
        return 1 if self.form.few_rows else 2

    @property
    def key_warps(self) -> int:
        """Warps that share 16 rows: they divide a block's keys, and then the columns of O."""
        return max(WARPS * MMA_ROWS // self.rows, 1)

    @property
    def warp_keys(self) -> int:
        return self.form.keys // self.key_warps

    @property
    def parts(self) -> int:
        """Parts of a block's keys that a warp has."""
        return 1 if self.form.wgmma else PARTS // self.key_warps

    @property
    def D(self) -> int:
        return tile_dim(self.features.D)

    @property
    def Dv(self) -> int:
        """Columns of V in shared memory: warps that share rows divide each chunk of a swizzle among them."""
        if self.key_warps > 1:
            return -(-self.features.Dv // CHUNK) * CHUNK
        return tile_dim(self.features.Dv // self._packed) * self._packed

    @property
    def _packed(self) -> int:
        """Numbers of K or V in 16 bits."""
        return 2 if self.is_fp8 else 1

    @property
    def k_columns(self) -> int:
        """16-bit columns of K in shared memory."""
        return tile_dim(self.features.D // self._packed)

    @property
    def v_columns(self) -> int:
        """16-bit columns of V in shared memory."""
        return self.Dv // self._packed

    @property
    def ahead(self) -> int:
        """Blocks that products of Q and K are ahead of the softmax: only tiles of 16 rows have registers
        for it, and not where integers widen FP8 numbers of wide heads."""
        widens = self.is_fp8 and not self.form.gpu.converts_fp8
        if self.rows > MMA_ROWS or self.form.groups or self.stages == 1:
            return 0
        return 0 if widens and max(self.features.D, self.features.Dv) > _MOST_WIDENED_AHEAD else 1

    @property
    def strip(self) -> int:
        """Columns of O side by side that a warp has; its next ones are `key_warps` strips further."""
        return self.Dv if self.key_warps == 1 else CHUNK // self.key_warps

    @property
    def strips(self) -> int:
        return self.Dv // self.key_warps // self.strip

    @property
    def row_columns(self) -> int:
        """Columns of O that a thread has of each of its two rows."""
        return self.strip * self.strips // 4

    @property
    def vectors(self) -> int:
        """Vectors of O that a thread has of its two rows."""
        return 2 * self.row_columns // VECTOR

    @property
    def shares_keys(self) -> bool:
        """Whether CTAs share a tile's keys, in splits of any length."""
        return (self.form.cluster > 1 or self.form.parts) and not self.form.groups

    @property
    def kept(self) -> int:
        """Splits whose results a CTA keeps for its cluster; one without others keeps none."""
        if self.form.groups:
            return max(GROUP // self.group_ctas, 1) if self.group_ctas > 1 else 0
        return 1 if self.form.cluster > 1 else 0

    @property
    def kept_in_stages(self) -> int:
        """How many of these take the place of K and V: the last one, or all, if others are in registers."""
        return self.kept if self.form.group_in_regs else min(self.kept, 1)

    @property
    def group_ctas(self) -> int:
        """CTAs that share a group; where warps have roles each has groups alone."""
        return 1 if self.has_load_warps or self.form.alone else self.form.cluster

    @property
    def merges_together(self) -> bool:
        """Whether CTAs that have groups alone merge all groups of a tile together."""
        return self.form.groups and self.form.cluster > self.group_ctas

    @property
    def group_vectors(self) -> int:
        """Vectors of each thread for results of splits, besides those in the place of K and V."""
        if not self.form.groups or self.form.group_in_regs:
            return 0
        return self.vectors * (self.kept - 1 if self.group_ctas > 1 else 1)

    @property
    def stage_bytes(self) -> int:
        return 2 * self.form.keys * (self.k_columns + self.v_columns)

    @property
    def other_bytes(self) -> int:
        """Bytes of shared memory besides the stages, at most."""
        columns = self.D, self.form.keys
        q, p = (-(-2 * self.rows * number // _ALIGNMENT) * _ALIGNMENT for number in columns)
        # Floats of a row: lse and factor; maxima and sums.
        numbers, shared = (
            4 * self.rows * (1 + max(self.kept, 1)),
            4 * self.rows * (self.key_warps + 4 * PARTS),
        )
        sizes = self.rows, self.features.Dv, self.form.cluster, self.form.group_in_regs
        group = decode.group_bytes(*sizes) if self.form.groups else 0
        rings = _RING_BYTES if self.has_load_warps else 0
        return q + _COUNT_BYTES + rings + numbers + group + (p + shared if self.key_warps > 1 else 0)

    @property
    def stages(self) -> int:
        sizes = self.rows, self.stage_bytes, self.other_bytes, self.form.ctas
        return decode.stages(self.form.gpu, *sizes)

    @property
    def ctas_per_sm(self) -> int:
        sizes = self.rows, self.stage_bytes, self.other_bytes, self.form.ctas
        return decode.ctas_per_sm(self.form.gpu, *sizes)

    @property
    def band(self) -> BandShape:
        return BandShape(self.features.left, self.features.right, True, self.form.keys)

    @property
    def softmax(self) -> Method:
        return Method(lanes=4, may_be_fully_masked=True, lazy_rescale=True)
