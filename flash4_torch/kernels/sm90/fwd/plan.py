"""Who does what, with how many registers, in how much shared memory.

A CTA stays for the whole launch and draws tiles of query rows from a counter:

    warp 0 of warpgroup 0    draws tiles, loads Q, K and V by TMA
    warpgroups 1, 2, ...     64 rows each: S = Q K^T, softmax, O += P V; each warp stores its 16 rows of O

    load_q   Q of a tile, and which tile it is; `q_stages`, so that the next tile's Q arrives under this one
    load_k, load_v   blocks of keys, from the last to the first; `kv_stages` each
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass

from ....configs.types import SHARED_MEMORY, Features, Sm90Forward, tile_dim
from ...common.band import BandShape
from ...common.exponent import Exponent
from ...common.mask_tables import MaskPlan
from ...common.softmax import Method

WARP = 32
GROUP = 128
"""Threads of a warpgroup."""
WARPS = GROUP // WARP
ROWS = 64
"""Query rows of a consumer warpgroup, a quarter of them a warp's."""
WARP_ROWS = ROWS // WARPS
LANES = 4
"""Neighbouring lanes that share a row of an accumulator."""
MESSAGE = 8
"""Words that describe a tile to the consumers."""
TURN = 1
"""The first of the named barriers by which warpgroups take turns."""
DONE = 8
"""The first of the named barriers at which a warpgroup's warps have all read Q."""

# By consumer warpgroups: registers of a consumer's and a producer's thread. More than the launch gave out in
# all would hang: 65536 registers over the warps of each quarter, floored to 8 a thread.
_REGISTERS = {1: (232, 40), 2: (232, 40), 3: (160, 32), 4: (112, 32)}
_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class Plan(NamedTuple):
    features: Features
    config: Sm90Forward

    @property
    def dtype(self) -> type:
        return _DTYPES[self.features.dtype]

    @property
    def D(self) -> int:
        """Head size of Q and K in shared memory."""
        return tile_dim(self.features.D)

    @property
    def Dv(self) -> int:
        return tile_dim(self.features.Dv)

    @property
    def keys(self) -> int:
        return self.config.keys

    @property
    def warpgroups(self) -> int:
        return self.config.warpgroups

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * GROUP

    @property
    def consumer_warps(self) -> int:
        return self.warpgroups * WARPS

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's thread and of a producer's."""
        return _REGISTERS[self.warpgroups]

    @property
    def pack(self) -> int:
        return self.config.pack

    @property
    def tokens(self) -> int:
        """Query positions of a warpgroup: each stands for `pack` rows."""
        return ROWS // self.pack

    @property
    def box(self) -> tuple[int, int]:
        """Heads and positions of a warpgroup's rows."""
        return self.pack, self.tokens

    @property
    def store_box(self) -> tuple[int, int]:
        """Heads and positions of a warp's rows."""
        heads = min(self.pack, WARP_ROWS)
        return heads, WARP_ROWS // heads

    @property
    def band(self) -> BandShape:
        return BandShape(self.features.left, self.features.right, self.config.tail, self.keys)

    @property
    def inner_band(self) -> BandShape:
        """Of all blocks but the first one: only that one may hold the end of Sk."""
        return self.band._replace(tail=False)

    @property
    def columns_before_wait(self) -> int:
        """How many of a thread's columns of a block become weights before the wait for PV."""
        columns = self.keys // 4
        return columns * self.config.wait // 16 * 4 if self.config.wait else columns

    @property
    def masks_inside(self) -> bool:
        """Whether blocks after the first one may have to be masked."""
        return self.inner_band.masks or bool(self.features.mask)

    @property
    def mask(self) -> MaskPlan:
        """How attn_mask's tables cut it into blocks."""
        return MaskPlan(self.features.mask, self.config.queries, self.keys, self.pack)

    @property
    def softmax(self) -> Method:
        return Method(LANES, self.hides_rows, self.config.conditional, Exponent(self.config.polynomial, 16))

    @property
    def hides_rows(self) -> bool:
        """Whether a block that is not skipped may be hidden from a whole row."""
        return self.band.hides or self.features.varlen or bool(self.features.mask)

    @property
    def stores_by_copy_engine(self) -> bool:
        """A tile of a varlen call may end inside the box; then rows are stored one by one."""
        return not self.features.varlen

    def check(self) -> None:
        """Raises AssertionError for what would not run; `configs` never asks for it."""
        f, c = self.features, self.config
        assert f.D % 8 == 0 and f.Dv % 8 == 0 and 8 <= min(f.D, f.Dv) and max(f.D, f.Dv) <= 256
        assert c.keys % 16 == 0 and 16 <= c.keys <= 256
        assert c.pack in (1, 2, 4, 8, 16, 32, 64)
        assert not c.o_over_q or self.Dv <= self.D
        assert not (f.dropout and c.pack > 1), "dropout's random numbers follow unpacked rows"
        assert not c.half or (f.right and not f.mask)
        # A warpgroup passes over K before it passes over V, with `next_tile` even while it holds another V.
        passed = -(-self.tokens * (c.warpgroups - 1) // c.keys) if f.right else 0
        assert passed <= c.kv_stages - c.next_tile
        if c.next_tile:
            assert c.q_stages > 1 and not f.left and not f.mask and not c.half
        consumer, producer = self.registers
        at_launch = min(65536 // self.threads // 8 * 8, 255)
        assert consumer * c.warpgroups + producer <= at_launch * (c.warpgroups + 1) + c.warpgroups + 1
        assert c.shared_memory(f.D, f.Dv) <= SHARED_MEMORY
