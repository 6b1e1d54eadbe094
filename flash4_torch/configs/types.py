"""What a kernel is compiled for: `Features` say what it computes, a config how.

No size of a call is part of either.
"""

from __future__ import annotations

import hashlib
import math
from enum import Enum
from typing import NamedTuple

from ..flex import program

LARGE_SOFTCAP = 64.0
"""The largest softcap for which 1 - 2 / (exp(2 y) + 1) is exact enough for tanh(y): its error in a score is
softcap * 2^-24."""
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a CTA on Hopper and on Blackwell may have."""
LARGE_BYTES, SMALL_BYTES = 163 * 1024, 99 * 1024
"""The same on compute capability 8.0 and 8.7, and on 8.6, 8.9, 12.0 and 12.1."""
RESERVED_BYTES = 1024
"""Bytes of an SM's shared memory that each CTA takes besides."""
_BARRIERS_AND_ALIGNMENT = 2048
_WORK_TILE = 32
"""Bytes of the work tile of a kernel by mma.sync, without those of a split."""
_ALIGNMENT = 1024
"""Bytes that swizzled memory begins at multiples of."""
_BARRIERS = 1024
"""Bytes for barriers where stages are multiples of 1024 bytes: backward kernels, and Blackwell's forward."""


class Mods(NamedTuple):
    """What programs do to scores. In a key's text there are hashes of programs, which may be long."""

    score_mod: str = ""
    mask_mod: str = ""
    """Texts of programs (`flex.program`), or ''."""
    blocks: str = ""
    """'' without a block mask. "rows": columns of a kernel's block lie inside of one of the mask's, so that
    rows have one state each; "scores": they may not."""
    derivative: str = ""
    """Gradients only: the text of score_mod's derivative (`flex.program`)."""
    bounds: str = ""
    """Bounds that each row of the band has for itself; `left` and `right` say on which sides. "table": they
    are in a table. "stacked": the batch entries are one sequence, one after another, of which a row sees the
    part that is its own entry, bounded by the band."""
    ramp: bool = False
    """Whether score_mod is served as a ramp (`flex.ramp`), which softmax arithmetic has a part in."""

    @property
    def makes_large_scores(self) -> bool:
        """Whether score_mod makes scores of any size."""
        return bool(self.score_mod) and not self.ramp

    @property
    def derivative_reads_score(self) -> bool:
        """Whether score_mod's derivative depends on the score before it, which kernels then keep."""
        return bool(self.derivative) and program.reads_score(self.derivative)

    @property
    def changes_scores(self) -> bool:
        """Whether anything but the band changes or hides scores."""
        return bool(self.score_mod or self.mask_mod or self.blocks)

    def __repr__(self) -> str:
        texts = self.score_mod, self.mask_mod, *([self.derivative] if self.derivative else [])
        keys = [hashlib.sha256(text.encode()).hexdigest()[:32] if text else "" for text in texts]
        flags = [f"{name}={x!r}" for name in ("bounds", "ramp") if (x := getattr(self, name))]
        return f"Mods({', '.join([*map(repr, (*keys[:2], self.blocks, *keys[2:])), *flags])})"


class Features(NamedTuple):
    """What a kernel computes. Everything that a call does not use is compiled out."""

    dtype: str
    """"bfloat16" or "float16"; for the kernels by mma.sync also "float32"."""
    D: int
    Dv: int
    varlen: bool = False
    left: bool = False
    right: bool = False
    """`left` and `right`: whether the band is bounded on that side."""
    softcap: bool = False
    scaled: bool = False
    """Scores are scaled before they are masked: for softcap, floating masks, and scales of 0 or below."""
    mask: str = ""
    """'' for none, else the dtype of attn_mask: "bool", "bfloat16", "float16", "float32"."""
    dropout: bool = False
    deterministic: bool = False
    """Gradients only: dQ is summed up in one order, for the same bits every time."""
    dmask: bool = False
    """Gradients only: the gradient of a floating attn_mask is wanted, too."""
    large_softcap: bool = False
    """softcap is above `LARGE_SOFTCAP`: tanh near 0 comes from its series."""
    sinks: str = ""
    """Forward only: '' for none, else the dtype of the sinks: "bfloat16", "float16", "float32"."""
    page_box: int = 0
    """Forward only: keys in a TMA box of a paged cache, 16 to 128, which divides both a block and a page; 0
    without pages. With pages, queries are packed (`varlen`)."""
    mods: Mods = Mods()
    """score_mod, mask_mod and a block mask."""
    tf32: bool = False
    """float32 only: operands are rounded to TF32, with one MMA each. Otherwise 3xTF32, as exact as float32:
    three MMAs of big and small parts (big x big, big x small, small x big)."""
    dropout_of_part: bool = False
    """The call is a part of a larger one, in which dropout counts its positions and heads."""
    running: str = ""
    """Forward only: "" if out is the call's. Otherwise out is float32, and calls on further keys add to out
    and lse: "begin" writes them, "add" merges them with what is there."""
    splits: bool = False
    """Forward only: the blocks of keys of a tile are divided among splits, whose number a launch says. out is
    float32, and out and lse have a dimension of splits before the others."""
    segments: bool = False
    """Sequences are parts of batch entries, the same of q and k. cu_seqlens counts the rows of all entries,
    one after another."""

    @property
    def is_packed(self) -> bool:
        """Whether tensors have no batch dimension."""
        return self.varlen and not self.segments

    @property
    def is_stacked(self) -> bool:
        """Whether batch entries are one sequence, one after another."""
        return self.mods.bounds == "stacked"

    @property
    def is_float32(self) -> bool:
        return self.dtype == "float32"

    @property
    def column_step(self) -> int:
        """Multiple to which head sizes are padded in SMEM; in float32 it is a swizzle's width."""
        return 32 if self.is_float32 else 16

    @property
    def is_exact(self) -> bool:
        """Whether products are as exact as float32."""
        return self.is_float32 and not self.tf32

    @property
    def lists_blocks(self) -> bool:
        """Whether a table lists the blocks of keys that a tile visits."""
        return bool(self.mask or self.mods.blocks)

    @property
    def large_scores(self) -> bool:
        """Whether scores are in natural units and of any size: after a floating mask or score_mod
        that adds no ramp.
        """
        return self.float_mask or self.mods.makes_large_scores

    @property
    def float_mask(self) -> bool:
        """Whether the mask is floating: it adds numbers to scores."""
        return self.mask not in ("", "bool")

    @property
    def may_be_split(self) -> bool:
        """Whether a tile's keys can be divided among splits."""
        return not (self.running or self.dropout or self.segments or self.splits or self.is_stacked)

    @property
    def row_stats(self) -> int:
        """Numbers of each query row that the backward reads: lse in base 2 and delta; with a floating mask or
        score_mod also lse in natural units and lse_low.
        """
        return 4 if self.large_scores else 2

    @property
    def without_float_mask(self) -> Features:
        """The features of a block whose scores a floating mask leaves alone."""
        return self._replace(mask="", scaled=self.softcap) if self.float_mask else self

    @property
    def rng_warpgroup(self) -> bool:
        """Whether a warpgroup of its own generates dropout's keep bits.

        With it, next to two consumer warpgroups, a thread is launched with 128 registers; PV for a wider O
        needs more.
        """
        return self.dropout and tile_dim(self.Dv) <= 192


class Sm80Forward(NamedTuple):
    """Tiles and switches of the forward by mma.sync; `configs.sm80` says which to take and why."""

    warps: int
    row_mmas: int
    """MMAs of 16 query rows side by side that a warp has: what it reads of K and V serves them all."""
    keys: int
    """Keys in a block of K and V, a multiple of 16."""
    kv_stages: int
    lazy_rescale: bool = False
    """O is rescaled only when a row's maximum has grown so far that weights would exceed 2^8."""
    ragged_k: bool = True
    """Sk may end inside a block of keys, where the band does not mask what follows."""
    pack_gqa: int = 1
    """Query heads of one KV head that share a tile's rows: 1, 2, 4, ... 64."""
    column_warps: int = 1
    """Warps that share rows: each computes the scores of some keys of a block, and some columns of O. If
    there are several, P goes through SMEM, and `row_mmas` is 1."""
    chunks_apart: bool = False
    """Whether three products add every second chunk of O's columns in a branch, so that not all sums live at
    once (ptxas.md, P31)."""
    splits_q: bool = False
    """Whether Q's big and small TF32 parts are computed once per tile instead of once per block; Q then takes
    twice as much SMEM."""
    reads_ahead: bool = False
    """Whether float32 operands are read from SMEM a step ahead of their MMAs."""

    @property
    def cluster(self) -> int:
        """CTAs that take neighbouring tiles: there are no clusters."""
        return 1

    @property
    def rows(self) -> int:
        """Query rows in a tile; with `pack_gqa`, each row is one head of one query."""
        return 16 * self.row_mmas * self.warps // self.column_warps

    @property
    def own_keys(self) -> int:
        """Keys of a block whose scores a warp computes."""
        return self.keys // self.column_warps

    @property
    def queries(self) -> int:
        """Query positions in a tile."""
        return self.rows // self.pack_gqa

    def shared_memory(self, features: Features) -> int:
        """Bytes of shared memory: Q, or O in its place, K and V in their stages, and the work tile.

        With dropout also a bit for each weight of one block. Several `column_warps` also share P, and a
        number of each row and warp.
        """
        D, Dv = halves(features, features.D), halves(features, features.Dv, self.column_warps)
        stages = (self.kv_stages * self.keys * n for n in (D, Dv))
        # float32's O does not go through SMEM.
        q = self.rows * (D if features.is_float32 else max(D, Dv)) * (2 if self.splits_q else 1)
        shares = self.column_warps > 1
        weights = self.rows * self.keys * (2 if features.is_float32 else 1) if shares else 0
        bits = self.rows * self.column_warps * tile_bits(self.own_keys) if features.dropout else 0
        exchanged = 4 * self.rows * self.column_warps if shares else 0
        whole = sum(-(-2 * n // _ALIGNMENT) * _ALIGNMENT for n in (q, *stages, weights))
        return whole + bits // 8 + exchanged + _WORK_TILE + 8 * features.splits


class Sm90Forward(NamedTuple):
    """Tiles and switches of the Hopper forward kernel; `configs.sm90` says which to take and why."""

    warpgroups: int
    """Consumer warpgroups; each takes 64 query rows."""
    keys: int
    """Keys in a block of K and V, a multiple of 16."""
    kv_stages: int
    q_stages: int
    pingpong: bool = False
    """Warpgroups ping-pong: they alternate in issuing their wgmmas."""
    next_tile: bool = False
    """The next tile's first QK^T is computed under this tile's epilogue."""
    k_ahead: bool = False
    """K is loaded one block ahead of V, also from one tile to the next."""
    half_block: bool = False
    """The block on the diagonal may be half as wide."""
    lazy_rescale: bool = False
    """O is rescaled only when a row's maximum has grown so far that weights would exceed 2^8."""
    exp_quarters_before_pv: int = 0
    """Quarters of a block's exponentials that come before the wait for PV; 0 leaves the wait to ptxas."""
    o_over_q: bool = False
    """O leaves through the shared memory of its own Q, where it has no room of its own."""
    ragged_k: bool = True
    """Sk may end inside a block of keys, where the band does not mask what follows."""
    pack_gqa: int = 1
    """Query heads of one KV head that share a tile's rows: 1, 2, 4, ... 64."""
    cluster: int = 1
    """CTAs that take neighbouring tiles, 1 or 2; each of two loads half of every K and V for both."""
    at_once: int = 1
    """CTAs that an SM runs at once, 1 or 2: one waits for memory and for its own softmax while the other
    computes."""

    @property
    def rows(self) -> int:
        """Query rows in a tile; with `pack_gqa`, each row is one head of one query."""
        return 64 * self.warpgroups

    @property
    def queries(self) -> int:
        """Query positions in a tile."""
        return self.rows // self.pack_gqa

    def adds_ramp_by_mma(self, features: Features) -> bool:
        """Whether tensor cores add a ramp: up to D 64, where they have more time left than the FMA pipe.

        Not to capped scores; and the next tile's scores would need its rows before this tile is done.
        """
        f = features
        return f.mods.ramp and not f.scaled and tile_dim(f.D) <= 64 and not self.next_tile

    def shared_memory(self, features: Features) -> int:
        """Bytes of shared memory: Q, K and V in their stages, O, barriers and what alignment may cost.

        With dropout also a bit for each weight, of as many blocks as there are stages of V.
        """
        D, Dv = tile_dim(features.D), tile_dim(features.Dv)
        q = self.q_stages * self.rows * D
        kv = self.kv_stages * self.keys * (D + Dv)
        o = 0 if self.o_over_q else self.rows * Dv
        bits = self.kv_stages * self.rows * tile_bits(self.keys) if features.dropout else 0
        ramp = 32 * self.keys if self.adds_ramp_by_mma(features) else 0
        return 2 * (q + kv + o) + bits // 8 + ramp + _BARRIERS_AND_ALIGNMENT


class Sm100Forward(NamedTuple):
    """Tiles and switches of the Blackwell forward kernel; `configs.sm100` says which to take and why."""

    q_tiles: int
    """Tiles of 128 query rows that a CTA has in flight, 1 or 2: one's softmax runs under the other's MMAs."""
    kv_stages: int
    """Stages of K and V together, which alternate; in a CTA pair each CTA holds half of a stage's K or V."""
    keys: int = 128
    """Keys in a block of K and V, 128."""
    early: int = 96
    """Columns of P that are handed to the PV MMA before the others; a multiple of 32."""
    polynomial: int = 4
    """How many of every 32 weights of a row are computed by a polynomial instead of MUFU."""
    o_over_q: bool = False
    """O leaves through the shared memory of its own Q, where it has no room of its own."""
    ragged_k: bool = True
    """Sk may end inside a block of keys, where the band does not mask what follows."""
    pack_gqa: int = 1
    """Query heads of one KV head that share a tile's rows: 1, 2, 4, ... 64."""
    cluster: int = 1
    """CTAs of an MMA, 1 or 2; each of two loads half of every K and V."""

    @property
    def rows(self) -> int:
        """Query rows that a CTA takes at a time; with `pack_gqa`, each row is one head of one query."""
        return 128 * self.q_tiles

    @property
    def queries(self) -> int:
        """Query positions that a CTA takes at a time."""
        return self.rows // self.pack_gqa

    def shared_memory(self, features: Features) -> int:
        """Bytes of shared memory: Q, K and V in their stages, O, numbers of each row, and barriers."""
        D, Dv = tile_dim(features.D), tile_dim(features.Dv)
        q = self.rows * D
        kv = self.kv_stages * self.keys * max(D, Dv) // self.cluster
        o = 0 if self.o_over_q else self.rows * Dv
        numbers = 2 + (features.running == "add")
        return 2 * (q + kv + o) + 4 * numbers * self.rows + _BARRIERS

    def tensor_memory(self, features: Features) -> int:
        """TMEM columns up to the last one of O; S of two tiles comes first."""
        return 2 * self.keys + self.q_tiles * tile_dim(features.Dv)


WARPGROUPS = 2
"""Consumer warpgroups of the Hopper backward: each takes 64 keys, with `role_split` both the same ones."""


class Scope(str, Enum):
    """What one work item of the backward covers."""

    KEY_TILE = "key_tile"
    """A tile of keys of one KV head, against all query heads of its group."""
    KV_HEAD = "kv_head"
    """All key tiles of a KV head, from the last to the first, which adds its share to the sums of the others
    and rounds dQ. Nothing is cleared before or rounded after, and the sums have an order."""
    Q_HEAD = "q_head"
    """A tile of keys against one query head. A group's dK and dV are summed up afterwards. Rows and sums of
    dQ stay in the L2 cache where those of a whole group would not."""

    # As a plain string, so that a key's text is a literal.
    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return self.value


class Sm80Backward(NamedTuple):
    """Tiles and switches of the backward by mma.sync; `configs.sm80_backward` says which to take and why."""

    warps: int
    column_warps: int = 1
    """Warps that share 16 keys: each has some of the queries of their scores, and some columns of dK and dV.
    If there are several, P and dS go through SMEM."""
    queries: int = 64
    """Query rows in a block: 32, 64 or 128."""
    stages: int = 2
    """Stages of Q and dO. With one, the next block's arrive only under dQ."""
    round_weights: bool = False
    """dS is computed from the rounded weights, which frees the registers of the unrounded ones."""
    ragged_k: bool = True
    """Sk may end inside a tile."""
    key_mmas: int = 1
    """MMAs of 16 keys side by side that a warp has: what it reads of Q and dO serves them all. With two there
    is no mask beside dropout."""
    query_parts: int = 1
    """Parts of a warp's queries of a block, which it works on one after another: S and dP take registers for
    one of them. Not for float32."""
    own_in_regs: bool = False
    """Each of several `column_warps` has its own P and dS as operands of dV and dK from registers, before the
    barrier, and reads the others' from SMEM, behind it. Not for float32."""
    copies_after_scores: bool = False
    """The next block's Q and dO are copied after a block's S, whose MMAs then begin at once: an mbarrier says
    that all warps have used the block before. Not with one stage, nor with `query_parts`."""
    dq_row_mmas: int = 1
    """MMAs of 16 rows of dQ side by side that a warp has: what it reads of K serves them all."""
    scores_by_parts: bool = False
    """S is summed up in a loop over parts of D, so that ptxas reads fewer operands ahead, and spills less."""
    reads_ahead: bool = False
    """Whether float32 operands are read from SMEM a step ahead of their MMAs."""

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return 16 * self.key_mmas * self.warps // self.column_warps

    @property
    def cluster(self) -> int:
        """CTAs that take neighbouring tiles: there are no clusters."""
        return 1

    @property
    def copies_masks(self) -> bool:
        """Whether tiles of a floating mask are copied to SMEM as they lie, a query's keys side by side.
        Otherwise threads read the queries of a key."""
        return True

    @property
    def cluster_keys(self) -> int:
        """Keys of a tile: attn_mask's tables go by these."""
        return self.keys

    @property
    def scope(self) -> Scope:
        return Scope.KEY_TILE

    @property
    def preprocesses(self) -> bool:
        """Whether the kernel computes the row statistics itself."""
        return False

    @property
    def tmem_order(self) -> bool:
        """Whether dQ is summed up in TMEM's order, not in that of MMA accumulators."""
        return False

    @property
    def dq_by_register(self) -> bool:
        """Whether neighbouring sums of dQ are the same register of neighbouring threads."""
        return True

    @property
    def dq_warps(self) -> int:
        """Warps that share their rows of dQ: each has some columns."""
        return 16 * self.dq_row_mmas * self.warps // self.queries

    @property
    def q_parts(self) -> int:
        """Parts of the columns of Q and K, which are padded to whole MMAs for each."""
        return max(self.column_warps, self.dq_warps // self.dq_row_mmas)

    @property
    def dq_pieces(self) -> int:
        """Pieces in which a block of rows has its dQ added up: as many as make D a multiple of what is
        shared out."""
        return max(self.queries // 64, 1) * self.q_parts

    @property
    def weight_keys(self) -> int:
        """Keys of P and dS of float32 numbers in SMEM: whole chunks of 32."""
        return max(self.keys, 32)

    def shared_memory(self, features: Features) -> int:
        """Bytes: Q and dO in their stages, K, V, dS, and two or four numbers of each row.

        Several `column_warps` also share P. A floating mask has as many stages as Q. With dropout there is a
        bit for each weight of a block, but with several `query_parts`, whose bits lie where dS will be.
        """
        parts = (features.D, self.q_parts), (features.Dv, self.column_warps)
        D, Dv = (-(-n // (step := features.column_step * p)) * step for n, p in parts)
        rows = (self.stages * self.queries * n for n in (D, Dv))
        weights = (self.weight_keys if features.is_float32 else self.keys) * self.queries
        matrices = (*rows, self.keys * D, self.keys * Dv, weights, weights * (self.column_warps > 1))
        statistics = 4 * features.row_stats * self.queries * self.stages
        strips = -(-self.queries // self.column_warps // 32) * self.key_mmas
        has_bits = features.dropout and self.query_parts == 1
        bits = 16 * self.warps * tile_bits(32 * strips) if has_bits else 0
        each = 4 if features.is_float32 else 2
        whole = sum(-(-each * n // _ALIGNMENT) * _ALIGNMENT for n in matrices)
        numbers = self.stages * self.keys * self.queries
        mask = numbers * (4 if features.mask == "float32" else 2) if features.float_mask else 0
        return whole + mask + statistics + bits // 8 + 8 * self.copies_after_scores


class Sm90Backward(NamedTuple):
    """Tiles and switches of the Hopper backward kernel; `configs.sm90_backward` says which to take."""

    queries: int
    """Query rows in a block, 64 or 128."""
    q_stages: int = 2
    do_stages: int = 2
    kv_stages: int = 1
    """Stages of K and V; with two, those of the next tile arrive under this one."""
    ds_stages: int = 1
    """Stages of dS; with two, no warpgroup waits for another one's dQ before it writes its dS, except with
    `role_split`."""
    dq_stages: int = 1
    """Stages of each warpgroup's dQ on its way to global memory, 1 or 2; 1 with more than one of
    `dq_passes`."""
    next_tile: bool = False
    """The next tile's first scores are computed under this tile's epilogue; needs two `kv_stages`."""
    heads_inner: bool = False
    """Walks from the last block of rows to the first, each for all heads of the group, so that tiles of a KV
    head read the same rows at a time; else head after head, each from its first block on, as with masks."""
    dkv_via_dq_smem: bool = False
    """dK and dV leave through the two slots of a warpgroup's dQ, so that the next K and V arrive under a
    tile's end; else through K and V, as with packed sequences, sums in order, and dV wider than dK."""
    load_q_first: bool = False
    """A tile's first Q and dO are loaded before its K and V, which have no room yet; needs `heads_inner`."""
    unroll_stages: bool = False
    """Unrolls the loop over full blocks once per Q stage, which makes SMEM addresses compile-time constants;
    needs two stages of Q and of dO, and no `role_split`."""
    scope: Scope = Scope.KEY_TILE
    preprocesses: bool = False
    """The consumers compute the row statistics of a KV head before its first tile, which saves the launch of
    the preprocess kernel. Each CTA has one KV head; only with scope `kv_head`."""
    round_weights: bool = False
    """dS is computed from the rounded weights, which frees the registers of the unrounded ones."""
    ragged_k: bool = True
    """Sk may end inside a tile."""
    role_split: bool = False
    """Two warpgroups share 64 keys, for wide heads: one computes P and dV, the other dS and dK."""
    cluster: int = 1
    """CTAs that take neighbouring tiles, 1 or, with `role_split`, 2. Each of two loads half of every Q and dO
    for both, and adds half of the columns of both tiles' dQ."""
    v_in_regs: bool = False
    """V is an operand from registers, so that SMEM is read less; only with `role_split`."""
    dq_passes: int = 1
    """Parts of its dQ that a warpgroup makes one after another, to save registers; only with `role_split`."""

    @property
    def tmem_order(self) -> bool:
        """Whether dQ is summed up in TMEM's order, not in that of wgmma accumulators."""
        return False

    @property
    def dq_by_register(self) -> bool:
        """Whether neighbouring sums of dQ are the same register of neighbouring threads."""
        return False

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return 64 if self.role_split else 64 * WARPGROUPS

    @property
    def copies_masks(self) -> bool:
        """Whether tiles of a floating mask are copied to SMEM as they lie, a query's keys side by side.
        Otherwise threads read the queries of a key."""
        return False

    @property
    def cluster_keys(self) -> int:
        """Keys of a cluster's tiles, which visit the same blocks of rows: attn_mask's tables go by these."""
        return self.keys * self.cluster

    @property
    def dq_pieces(self) -> int:
        """Pieces in which a block of rows has its dQ added up."""
        return WARPGROUPS * self.cluster * self.dq_passes

    def shared_memory(self, features: Features) -> int:
        """Bytes: Q, dO, K, V and dS in their stages, dQ, two or four numbers of each row, and barriers.

        A CTA pair also has the peer's half of K and its dS. With `role_split` there is softcap's dtanh for
        dmask and score_mod, or in its place, if score_mod's derivative reads them, the scores in float32.
        With dropout there is a bit for each weight, of as many blocks as there are stages of Q.
        """
        parts = max(64 * self.dq_pieces // self.queries, 1)  # ranges of dQ's columns
        D, Dv = -(-features.D // (16 * parts)) * 16 * parts, tile_dim(features.Dv)
        dq = self.dq_stages * WARPGROUPS * 64 * D // parts
        rows = self.queries * (self.q_stages * D + self.do_stages * Dv)
        others = (self.cluster - 1) * D // self.cluster
        kv = self.kv_stages * self.keys * (D + Dv + others)
        scores = self.role_split and features.mods.derivative_reads_score
        takes_dtanh = features.softcap and (features.dmask or bool(features.mods.score_mod))
        dtanh = self.role_split and takes_dtanh and not scores
        ds = self.ds_stages * self.keys * self.queries * (self.cluster + dtanh)
        of_scores = features.row_stats - 1
        statistics = 4 * self.queries * (of_scores * self.q_stages + self.do_stages)
        bits = self.q_stages * self.keys * tile_bits(self.queries) if features.dropout else 0
        floats = dq + scores * self.keys * self.queries
        return 2 * (rows + kv + ds) + 4 * floats + statistics + bits // 8 + _BARRIERS


class Sm100Backward(NamedTuple):
    """Tiles and switches of the Blackwell backward: up to 128 keys a CTA, blocks of 128 query rows."""

    q_stages: int = 2
    do_stages: int = 1
    kv_stages: int = 1
    """Stages of K and V; with two, those of the next tile arrive under this one."""
    dq_slots: int = 2
    """Slots for pieces of 32 columns of dQ on their way to global memory, for each of four reduce warps."""
    ragged_k: bool = True
    """Sk may end inside a tile."""
    cluster: int = 1
    """CTAs that take neighbouring tiles, 1 or 2; each of two adds half of every block's rows to dQ."""
    keys: int = 128
    """Keys of a tile: 128, or 64 in CTA pairs for wide heads, where each half of a CTA's lanes has all 64
    keys and half of the columns."""
    half_block_stages: int = 0
    """CTA pairs: stages of half blocks of Q and dO, each for one MMA, in the order of the MMAs."""

    @property
    def scope(self) -> Scope:
        return Scope.KEY_TILE

    @property
    def preprocesses(self) -> bool:
        """Whether the kernel computes the row statistics itself."""
        return False

    @property
    def tmem_order(self) -> bool:
        """Whether dQ is summed up in TMEM's order, not in that of wgmma accumulators."""
        return True

    @property
    def dq_by_register(self) -> bool:
        """Whether neighbouring sums of dQ are the same register of neighbouring threads."""
        return False

    @property
    def queries(self) -> int:
        """Query rows in a block."""
        return 128

    @property
    def column_step(self) -> int:
        """Head sizes are zero-padded in SMEM to a multiple of this, for two CTAs to split the columns."""
        return {(1, 128): 16, (2, 128): 128, (2, 64): 64}[self.cluster, self.keys]

    @property
    def copies_masks(self) -> bool:
        """Whether tiles of a floating mask are copied to SMEM as they lie, a query's keys side by side.
        Otherwise threads read the queries of a key."""
        return False

    @property
    def cluster_keys(self) -> int:
        """Keys of a cluster's tiles, which visit the same blocks of rows: attn_mask's tables go by these."""
        return self.keys * self.cluster

    @property
    def dq_pieces(self) -> int:
        """Pieces in which a block of rows adds up dQ: bands of 32 rows, or in a CTA pair halves of bands."""
        return self.queries // 32 * self.cluster

    def shared_memory(self, features: Features) -> int:
        """Bytes: Q, dO, K and V in their stages, dS, dQ, two numbers of each row, and barriers.

        A CTA pair has half blocks of Q and dO in one ring of stages, and half of the columns of both tiles'
        K; for wide heads also P and dS of the own keys.
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
    """Whether two CTAs of the Blackwell forward may share an MMA: all tiles have to visit the same blocks.

    Each holds V for half of O's columns, and an MMA takes columns by 32s.
    """
    f = features
    return not (f.left or f.right or f.varlen or f.lists_blocks) and tile_dim(f.Dv) % 32 == 0


def widest_box(page_size: int, keys: int = 128) -> int:
    """The most keys of a box that divides a page, and a block of `keys` keys: a power of two, at most 128."""
    return math.gcd(page_size, keys, 128)


def tile_bits(keys: int) -> int:
    """Keep bits of dropout that a row takes: for every 64 keys, two words of 32."""
    return -(-keys // 64) * 64


def tile_dim(D: int) -> int:
    """Head size in shared memory: padded with zeros to what the tensor cores take."""
    return -(-D // 16) * 16


def halves(features: Features, D: int, parts: int = 1) -> int:
    """16-bit halves of a row in shared memory, where kernels by mma.sync have it in so many parts."""
    step = features.column_step * parts
    return -(-D // step) * step * (2 if features.is_float32 else 1)
