"""What a kernel is compiled for: `Features` says what it computes, a config how. No size of a call enters."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

LARGE_SOFTCAP = 64.0
"""Up to here 1 - 2 / (exp(2 y) + 1) is exact enough for tanh(y): its error is softcap * 2^-24 in a score."""
SHARED_MEMORY = 227 * 1024
"""Bytes that a CTA on Hopper and on Blackwell may have."""
_BARRIERS_AND_ALIGNMENT = 2048
_BARRIERS = 1024
"""Of a backward kernel, whose stages are multiples of 1024 bytes."""


class Features(NamedTuple):
    """What a kernel computes; everything that a call does not use is compiled out."""

    dtype: str
    """"bfloat16" or "float16"."""
    D: int
    Dv: int
    varlen: bool = False
    left: bool = False
    right: bool = False
    """Whether the band is bounded on that side."""
    softcap: bool = False
    scaled: bool = False
    """Scores are scaled before they are masked: for softcap, floating masks, and scales of 0 or below."""
    mask: str = ""
    """'' for none, else the dtype of attn_mask: "bool", "bfloat16", "float16", "float32"."""
    dropout: bool = False
    deterministic: bool = False
    """Of gradients: dQ is summed up in one order, for the same bits every time."""
    dmask: bool = False
    """Of gradients: that of a floating attn_mask is wanted, too."""
    large_softcap: bool = False
    """softcap is above `LARGE_SOFTCAP`: tanh near 0 comes from its series."""

    @property
    def float_mask(self) -> bool:
        """Whether numbers are added to scores."""
        return self.mask not in ("", "bool")

    @property
    def row_stats(self) -> int:
        """Numbers of each query row that the backward reads: lse in base 2, delta; with a floating mask also
        lse in natural units and lse_low."""
        return 4 if self.float_mask else 2

    @property
    def without_float_mask(self) -> Features:
        """Features of a block whose scores a float mask leaves alone."""
        return self._replace(mask="", scaled=self.softcap) if self.float_mask else self

    @property
    def rng_warpgroup(self) -> bool:
        """Whether a warpgroup of its own draws dropout's numbers.

        Beside two others a thread is launched with 128 registers then; the product for a wider O needs more.
        """
        return self.dropout and tile_dim(self.Dv) <= 192


class Sm90Forward(NamedTuple):
    """Tiles and switches of the Hopper forward kernel; `configs.sm90` says which to take and why."""

    warpgroups: int
    """Consumer warpgroups; each takes 64 query rows."""
    keys: int
    """Keys in a tile of K and V, a multiple of 16."""
    kv_stages: int
    q_stages: int
    pingpong: bool = False
    """Warpgroups take turns at issuing their products."""
    next_tile: bool = False
    """The first scores of the next tile are computed under this tile's epilogue."""
    k_ahead: bool = False
    """K is loaded one tile ahead of V, over the border of tiles too."""
    half_block: bool = False
    """The block on the diagonal may be half as wide."""
    lazy_rescale: bool = False
    """The accumulator is rescaled only when a row's maximum grew by more than a factor of 2^8."""
    exp_quarters_before_pv: int = 0
    """Quarters of a block's exponentials that come before the wait for PV; 0 leaves it to ptxas."""
    o_over_q: bool = False
    """O leaves through the shared memory of its own Q, where there is no room for a place of its own."""
    ragged_k: bool = True
    """Sk may end inside a tile of keys, where the band does not hide what follows."""
    pack_gqa: int = 1
    """Query heads of one key head that share a tile's rows: 1, 2, 4, ... 64."""
    cluster: int = 1
    """CTAs that take neighbouring tiles, 1 or 2; of two each loads half of every K and V for both."""

    @property
    def rows(self) -> int:
        """Query rows in a tile; with `pack_gqa`, each row is one head of one query."""
        return 64 * self.warpgroups

    @property
    def queries(self) -> int:
        """Query positions in a tile."""
        return self.rows // self.pack_gqa

    def shared_memory(self, features: Features) -> int:
        """Bytes of shared memory: Q, K and V in their stages, O, barriers and what alignment may cost.

        And with dropout, a bit for each weight, of as many blocks as there are stages of V.
        """
        D, Dv = tile_dim(features.D), tile_dim(features.Dv)
        q = self.q_stages * self.rows * D
        kv = self.kv_stages * self.keys * (D + Dv)
        o = 0 if self.o_over_q else self.rows * Dv
        bits = self.kv_stages * self.rows * tile_bits(self.keys) if features.dropout else 0
        return 2 * (q + kv + o) + bits // 8 + _BARRIERS_AND_ALIGNMENT


class Sm100Forward(NamedTuple):
    """Tiles and switches of the Blackwell forward kernel; `configs.sm100` says which to take and why."""

    q_tiles: int
    """Tiles of 128 query rows that a CTA has under way, 1 or 2: one's softmax under the other's products."""
    kv_stages: int
    """Of K and V together, which arrive in turns; of a pair each holds half of one."""
    keys: int = 128
    """Keys in a tile of K and V, 128."""
    early: int = 96
    """Columns of the weights that are handed to the product before the others; a multiple of 32."""
    polynomial: int = 4
    """Of every 32 weights of a row, how many are computed by a polynomial instead of the exponential unit."""
    o_over_q: bool = False
    """O leaves through the shared memory of its own Q, where there is no room for a place of its own."""
    ragged_k: bool = True
    """Sk may end inside a tile of keys, where the band does not hide what follows."""
    pack_gqa: int = 1
    """Query heads of one key head that share a tile's rows: 1, 2, 4, ... 64."""
    cluster: int = 1
    """CTAs that multiply together, 1 or 2: of two each loads half of every K and V."""

    @property
    def rows(self) -> int:
        """Query rows that a CTA takes at a time; with `pack_gqa`, each row is one head of one query."""
        return 128 * self.q_tiles

    @property
    def queries(self) -> int:
        """Query positions of those."""
        return self.rows // self.pack_gqa

    def shared_memory(self, features: Features) -> int:
        """Bytes of shared memory: Q, K and V in their stages, O, two numbers of each row, and barriers."""
        D, Dv = tile_dim(features.D), tile_dim(features.Dv)
        q = self.rows * D
        kv = self.kv_stages * self.keys * max(D, Dv) // self.cluster
        o = 0 if self.o_over_q else self.rows * Dv
        return 2 * (q + kv + o) + 8 * self.rows + _BARRIERS

    def tensor_memory(self, features: Features) -> int:
        """Columns up to the last one of O; S of two tiles comes first."""
        return 2 * self.keys + self.q_tiles * tile_dim(features.Dv)


WARPGROUPS = 2
"""Consumer warpgroups of the Hopper backward: each takes 64 keys, with `role_split` both the same ones."""


class Scope(str, Enum):
    """What one work item of the backward covers."""

    KEY_TILE = "key_tile"
    """A tile of keys of one KV head, against all query heads of its group."""
    KV_HEAD = "kv_head"
    """All key tiles of a KV head, from the last one to the first, which rounds dQ: the other tiles have left
    their sums to it. Nothing is cleared before or rounded after, and the sums have an order."""
    Q_HEAD = "q_head"
    """A tile of keys against one query head. A group's dK and dV are summed up afterwards. Rows and sums of dQ
    stay in the L2 cache where those of a whole group would not."""


class Sm90Backward(NamedTuple):
    """Tiles and switches of the Hopper backward kernel."""

    queries: int
    """Rows of queries in a block, 64 or 128."""
    q_stages: int = 2
    do_stages: int = 2
    kv_stages: int = 1
    """With two, K and V of the next tile arrive under this one."""
    ds_stages: int = 1
    """With two, no warpgroup waits for another one's dQ before it writes its dS; but where `role_split`."""
    dq_stages: int = 1
    """Of each warpgroup's dQ on its way to global memory, 1 or 2; 1 with more than one of `dq_passes`."""
    next_tile: bool = False
    """The first scores of the next tile are computed under this tile's epilogue; with two `kv_stages`."""
    heads_inner: bool = False
    """From the last block of rows to the first one, each of all heads of the group, so that tiles of a key
    head read the same rows at a time; else head after head, each from its first block on, as with masks."""
    dkv_via_dq_smem: bool = False
    """dK and dV leave through the two places of a warpgroup's dQ, so that the next K and V arrive under a
    tile's end; else through K and V, as with packed sequences, sums in order, and dV wider than dK."""
    load_q_first: bool = False
    """With heads inside: a tile's first Q and dO are loaded before its K and V, which have no room yet."""
    unroll_stages: bool = False
    """Of the code for blocks that nothing cuts there is a copy for each stage of Q, whose addresses are then
    constants; with two stages of Q, and of dO. Not where `role_split`."""
    scope: Scope = Scope.KEY_TILE
    round_weights: bool = False
    """dS is made of the rounded weights, which frees the registers of the others."""
    ragged_k: bool = True
    """Sk may end inside a tile."""
    role_split: bool = False
    """Two warpgroups share 64 keys, for wide heads: one makes weights and dV, the other one dS and dK."""
    cluster: int = 1
    """CTAs that take neighbouring tiles, 1 or, where `role_split`, 2: each loads half of every Q and dO for both,
    and adds half of the columns of both tiles' dQ."""
    v_in_regs: bool = False
    """With `role_split`: V is an operand from registers, so that SMEM is read less."""
    dq_passes: int = 1
    """With `role_split`: parts of its dQ that a warpgroup makes one after another, for want of registers."""

    @property
    def tmem_order(self) -> bool:
        """Whether dQ is summed up in the order of tensor memory, not in that of wgmma accumulators."""
        return False

    @property
    def keys(self) -> int:
        """Of a tile."""
        return 64 if self.role_split else 64 * WARPGROUPS

    @property
    def cluster_keys(self) -> int:
        """Of a cluster's tiles, which visit the same blocks of rows: what attn_mask's tables go by."""
        return self.keys * self.cluster

    @property
    def dq_pieces(self) -> int:
        """In which a block of rows has its dQ added up."""
        return WARPGROUPS * self.cluster * self.dq_passes

    def shared_memory(self, features: Features) -> int:
        """Bytes: Q, dO, K, V and dS in their stages, dQ, two or three numbers of each row, and barriers.

        In pairs the other CTA's half of K and its dS, too; softcap's slopes for dmask; and with dropout a bit
        for each weight, of as many blocks as there are stages of Q.
        """
        parts = max(64 * self.dq_pieces // self.queries, 1)  # ranges of dQ's columns
        D, Dv = -(-features.D // (16 * parts)) * 16 * parts, tile_dim(features.Dv)
        dq = self.dq_stages * WARPGROUPS * 64 * D // parts
        rows = self.queries * (self.q_stages * D + self.do_stages * Dv)
        others = (self.cluster - 1) * D // self.cluster
        kv = self.kv_stages * self.keys * (D + Dv + others)
        dtanh = self.role_split and features.softcap and features.dmask
        ds = self.ds_stages * self.keys * self.queries * (self.cluster + dtanh)
        of_scores = features.row_stats - 1
        statistics = 4 * self.queries * (of_scores * self.q_stages + self.do_stages)
        bits = self.q_stages * self.keys * tile_bits(self.queries) if features.dropout else 0
        return 2 * (rows + kv + ds) + 4 * dq + statistics + bits // 8 + _BARRIERS


class Sm100Backward(NamedTuple):
    """Tiles and switches of the Blackwell backward kernel: 128 keys a CTA, blocks of 128 rows of queries."""

    q_stages: int = 2
    do_stages: int = 1
    kv_stages: int = 1
    """With two, K and V of the next tile arrive under this one."""
    dq_slots: int = 2
    """Pieces of 32 columns of dQ on their way to global memory, of each of the four warps that add it."""
    ragged_k: bool = True
    """Sk may end inside a tile."""
    cluster: int = 1
    """CTAs that take neighbouring tiles, 1 or 2; each of two adds half of every block's rows to dQ."""
    keys: int = 128
    """Of a tile, 128, or 64 of a pair for wide heads: then each CTA has half of the lanes' rows, twice."""
    half_block_stages: int = 0
    """CTA pairs: stages of half blocks of Q and dO, each for one MMA, in the order of the MMAs."""

    @property
    def scope(self) -> Scope:
        return Scope.KEY_TILE

    @property
    def tmem_order(self) -> bool:
        """Whether dQ is summed up in the order of tensor memory, not in that of wgmma accumulators."""
        return True

    @property
    def queries(self) -> int:
        """Rows in a block."""
        return 128

    @property
    def column_step(self) -> int:
        """Of which head sizes are filled up to multiples in shared memory: of what a CTA of a pair halves."""
        return {(1, 128): 16, (2, 128): 128, (2, 64): 64}[self.cluster, self.keys]

    @property
    def cluster_keys(self) -> int:
        """Of a cluster's tiles, which visit the same blocks of rows: what attn_mask's tables go by."""
        return self.keys * self.cluster

    @property
    def dq_pieces(self) -> int:
        """In which a block of rows has its dQ added up: bands of 32 rows, of a pair halves of them."""
        return self.queries // 32 * self.cluster

    def shared_memory(self, features: Features) -> int:
        """Bytes: Q, dO, K and V in their stages, dS, dQ, two numbers of each row, and barriers.

        Of a pair: half blocks of Q and dO in one ring of stages, and half of the columns of both tiles' K;
        for wide heads P and dS of the own keys, too.
        """
        D, Dv = (-(-n // self.column_step) * self.column_step for n in (features.D, features.Dv))
        rows = self.queries * (self.q_stages * D + self.do_stages * Dv)
        kv = self.kv_stages * self.keys * (D + Dv)
        ds = self.keys * self.queries
        if self.cluster > 1:
            rows = self.half_block_stages * self.queries // 2 * max(D, Dv)
            kv += self.keys * D
            ds *= 3 if self.keys == 64 else 1
        dq = self.dq_slots * self.queries * min(D, 32)
        statistics = 2 * self.queries * self.q_stages
        return 2 * (rows + kv + ds) + 4 * (dq + statistics) + _BARRIERS


def may_pair(features: Features) -> bool:
    """Whether two CTAs of the Blackwell forward may multiply together: all tiles visit the same blocks then.

    Each holds half of O's columns of V, and products take columns by 32s.
    """
    f = features
    return not (f.left or f.right or f.varlen or f.mask) and tile_dim(f.Dv) % 32 == 0


def tile_bits(keys: int) -> int:
    """Bits that a row takes for what dropout keeps of its weights: of every 64 keys, two words of 32."""
    return -(-keys // 64) * 64


def tile_dim(D: int) -> int:
    """Head size in shared memory: what the tensor cores take, filled up with zeros."""
    return -(-D // 16) * 16
