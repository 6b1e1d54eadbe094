"""What all warps share, and the tile of a CTA."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...configs.decode import MMA_ROWS
from ..common.band import Band, Span
from ..common.ring import Ring
from .params import DecodeParams, Divisors
from .plan import VECTOR, DecodePlan


class NamedBarrier(IntEnum):
    """Hardware barriers where warps have roles."""

    COMPUTE = 1
    """All threads that compute."""
    Q = 2
    """One for each warpgroup that computes: its rows of Q are there."""


class Tensors(NamedTuple):
    """Tensors in global memory; see `launch.decode` for their shapes."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    block_table: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    causal: cute.Tensor | None
    sinks: cute.Tensor | None
    k_scale: cute.Tensor | None
    v_scale: cute.Tensor | None
    out: cute.Tensor
    lse: cute.Tensor
    partial_out: cute.Tensor | None
    partial_lse: cute.Tensor | None
    counters: cute.Tensor | None


class Tile(NamedTuple):
    """A CTA's rows and keys."""

    batch: Int32
    kv_head: Int32
    first_token: Int32
    """Place of the sequence's first token among all."""
    first_row: Int32
    num_rows: Int32
    """Rows of the sequence; row r is token r / group and query head r % group of the KV head's group."""
    tokens: tuple[Int32, Int32]
    """First and last token that the tile has rows of."""
    band: Band
    keys: tuple[Int32, Int32]
    """Keys from the first to the last that a row sees, `keys[0] <= j < keys[1]`."""
    blocks: Span
    """Blocks of this CTA's split; where it has groups, those of the tile."""
    split: Int32
    """This CTA's split; with groups, its cluster's number among those of the tile."""
    splits: Span
    """Splits that have blocks, or groups that have."""
    has_work: Boolean
    """Whether the CTA has rows and blocks."""
    merges: Boolean
    """Whether the CTA takes part in a merge: its cluster has some of the tile's splits, and not the only one.
    """
    k_scale: Float32
    v_scale: Float32

    @property
    def num_splits(self) -> Int32:
        return self.splits.last - self.splits.first


@dataclass(frozen=True)
class Context:
    """What every warp may use."""

    plan: DecodePlan
    params: DecodeParams
    divisors: Divisors
    tensors: Tensors
    tile: Tile
    warp: Int32
    lane: Int32
    sQ: cute.Tensor
    """(rows, D), or (rows, D, warpgroups) where warps have roles"""
    sK: cute.Tensor
    """(keys, D, stages); of FP8 numbers two are one: (keys, D / 2, stages)"""
    sV: cute.Tensor
    """(Dv, keys, stages), or (Dv / 2, keys, stages)"""
    sFactor: cute.Tensor | None
    """(rows,): factors of scores, where rows of Q are scaled"""
    sP: cute.Tensor | None
    """(rows, keys): weights, where warps divide a block's keys."""
    sMax: cute.Tensor | None
    """(rows, warps that share them)"""
    sSum: cute.Tensor | None
    """(lanes of a row, rows, parts)"""
    sO: cute.Tensor | None
    """(4, threads, vectors): each thread's columns of O in their order, two rows in turn; in the place of K
    and V. Those of several splits follow one another."""
    sLse: cute.Tensor | None
    """(rows,): lse of O's rows."""
    sGroup: cute.Tensor | None
    """(4, threads, vectors): what a group's splits are merged to, as sO has it."""
    sCount: cute.Tensor | None
    """(1,): how many clusters were done with this part of the tile before this one."""

    load_k: Ring | None = None
    """Stages of K from the load warps to the compute warps, where warps have roles."""
    load_v: Ring | None = None

    def sync(self) -> None:
        """Wait for all threads that compute."""
        if self.plan.has_load_warps:
            cute.arch.barrier(barrier_id=NamedBarrier.COMPUTE, number_of_threads=self.plan.threads)
        else:
            cute.arch.sync_threads()

    def place_of(self, row: Int32) -> tuple[Int32, Int32]:
        """The token, among all sequences', and the query head of a row."""
        tile, group = self.tile, self.divisors.group
        token, head = divmod(row, group)
        return tile.first_token + token, tile.kv_head * group.divisor + head

    def kept(self, thread: Int32, slot: int | Int32) -> cute.Tensor:
        """A thread's vectors (4, vectors) of a split's results, the last one's in the place of K and V, or
        all of them, where others have been in registers."""
        place, before = self.sO[None, thread, 0].iterator, self.plan.kept - 1
        if self.plan.form.group_in_regs:
            place = self.sO[None, thread, slot * self.plan.vectors].iterator
        elif before:
            index = cutlass.min(Int32(slot), before - 1) * self.plan.vectors
            other = self.sGroup[None, thread, index].iterator
            address = cutlass.select_(Int32(slot) == before, place.toint(), other.toint())
            place = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
        layout = cute.make_layout((VECTOR, self.plan.vectors), stride=(1, VECTOR * self.plan.threads))
        return cute.make_tensor(place, layout)

    @property
    def row_warp(self) -> Int32:
        """Number of the warp's 16 rows."""
        return self.warp // self.plan.key_warps

    @property
    def copied_keys(self) -> Int32:
        """The first of the 16 keys of a block that the warp copies."""
        return self.warp * MMA_ROWS

    @property
    def key_warp(self) -> Int32:
        """Place of the warp among those that share its rows."""
        return self.warp % self.plan.key_warps
