"""Attention whose scores a program changes and masks, in plain torch, tile by tile: O(S) memory, any device.

The algorithm is that of `tiled`. Between softcap and the band comes score_mod; mask_mod and the table of
blocks hide scores like the band does. Tiles of empty blocks are left out, and full blocks need no mask_mod.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..flex.program import Node, Program
from ..flex_problem import new_out
from ..masks import Band
from . import programs
from . import sinks as attention_sinks
from .scoring import Scoring, working_dtype
from .tiled import OnlineSoftmax, Tiles, Tiling, below, blocks

EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True)
class Blocks:
    """A table that says which blocks of scores are empty, partial or full."""

    state: Tensor
    """(B or 1, Hq or 1, blocks of rows, blocks of keys), uint8."""
    size: tuple[int, int]
    """Rows and keys of a block."""

    @classmethod
    def of(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        size: tuple[int, int],
    ) -> Blocks:
        """The table of a BlockMask's lists: kv_num_blocks (B or 1, Hq or 1, rows), kv_indices (.., keys)."""
        state = _listed(kv_num_blocks, kv_indices, PARTIAL)
        if full_kv_num_blocks is not None and full_kv_indices is not None:
            state = torch.maximum(state, _listed(full_kv_num_blocks, full_kv_indices, FULL))
        return cls(state, size)

    @cached_property
    def on_host(self) -> Tensor:
        return self.state.cpu()

    def spans(self, batch: range, rows: range, keys: range) -> tuple[slice, slice, slice, slice]:
        """The part of the table that a tile needs."""
        at = slice(batch.start, batch.stop) if self.state.shape[0] > 1 else slice(None)
        (row_size, key_size) = self.size
        by_row = slice(rows.start // row_size, -(-rows.stop // row_size))
        by_key = slice(keys.start // key_size, -(-keys.stop // key_size))
        return at, slice(None), by_row, by_key

    def each(self, batch: range, rows: range, keys: range) -> Tensor:
        """The state of each score of a tile, (b or 1, Hq or 1, rows, keys)."""
        part = self.state[self.spans(batch, rows, keys)]
        i, j = (
            torch.arange(span.start, span.stop, device=part.device) // size - span.start // size
            for span, size in zip((rows, keys), self.size, strict=True)
        )
        return part[:, :, i[:, None], j]


def _listed(counts: Tensor, indices: Tensor, state: int) -> Tensor:
    """A table that has `state` at the first `counts` of `indices` in each row, else EMPTY."""
    columns = indices.shape[-1]
    is_listed = torch.arange(columns, device=indices.device) < counts[..., None]
    # What is behind the list may be anything: it goes to one more column.
    places = torch.where(is_listed, indices, columns).long()
    made = places.new_zeros(*places.shape[:-1], columns + 1, dtype=torch.uint8)
    return made.scatter_(-1, places, state)[..., :columns]


class Derived(Protocol):
    """The derivative of a score program, see `flex.derive`."""

    @property
    def program(self) -> Program: ...
    @property
    def gathers(self) -> Sequence[tuple[int, Node]]: ...


@dataclass(frozen=True)
class Mod:
    """A program with its arguments."""

    program: Program
    tensors: Sequence[Tensor]
    scalars: Sequence[float]
    device: torch.device

    @cached_property
    def numbers(self) -> list[Tensor]:
        return programs.scalar_tensors(self.program, self.scalars, self.device)

    def result(self, inputs: Sequence[Tensor], clamps: bool = False) -> Tensor:
        """What the program gives for a tile, broadcastable to it."""
        return programs.evaluate(self.program, inputs, self.tensors, self.numbers, clamps)[0]

    @property
    def widest(self) -> int:
        """Elements of the largest array that the program has for a score."""
        return max((math.prod(node.shape) for node in self.program.nodes), default=1)


@dataclass(frozen=True)
class Flex:
    """What is done to the scores of a call: scale, softcap, score_mod, band, mask_mod and blocks, dropout."""

    scoring: Scoring
    """It has no attn_mask."""
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    blocks: Blocks | None = None
    tiling: Tiling | None = field(default=None, compare=False)
    first_batch: int = 0
    """What functions get for the first batch entry."""

    def of_sequence(self, b: int) -> Flex:
        """What is done to the scores of sequence b of packed ones, which is a batch of one."""
        scoring, table = self.scoring, self.blocks
        if scoring.dropout is not None:
            scoring = scoring._replace(dropout=scoring.dropout._replace(first_batch=b))
        if table is not None and table.state.shape[0] > 1:
            table = Blocks(table.state[b : b + 1], table.size)
        return replace(self, scoring=scoring, blocks=table, first_batch=b)

    def tiles(self, q: Tensor, k: Tensor) -> FlexTiles:
        plain = Scoring(self.scoring.scale, Band(), self.scoring.softcap, None, self.scoring.dropout)
        return FlexTiles(q, k, plain, self)

    def tiling_of(self, q: Tensor) -> Tiling:
        """Tile sizes, smaller where programs compute arrays for each score, or blocks may be left out."""
        if self.tiling is not None:
            return self.tiling
        tiling = Tiling.of(q, self.scoring.band) if self.blocks is None else Tiling()
        rows, keys = tiling.rows, tiling.keys
        widest = max((mod.widest for mod in (self.score_mod, self.mask_mod) if mod is not None), default=1)
        while q.shape[2] * rows * keys * widest > tiling.elements and rows * keys > 256:
            rows, keys = (rows, keys // 2) if keys >= rows else (rows // 2, keys)
        return Tiling(rows, keys, max(1, tiling.elements // widest))


class Visible(NamedTuple):
    """What of a tile is seen."""

    nothing: bool
    mask: Tensor | None = None
    """True where a score is seen; None if all are."""


@dataclass(frozen=True)
class FlexTiles(Tiles):
    """Tiles whose scores are modified and masked."""

    flex: Flex

    def lanes(self, batch: range, rows: range, keys: range) -> list[Tensor]:
        """b, h, q_idx and kv_idx of a tile, int32, each with one dimension of four that is not 1."""
        first = self.flex.first_batch
        spans = range(batch.start + first, batch.stop + first), range(self.q.shape[2]), rows, keys
        return [
            torch.arange(span.start, span.stop, dtype=torch.int32, device=self.q.device).view(
                [-1 if dim == at else 1 for dim in range(4)]
            )
            for at, span in enumerate(spans)
        ]

    def visible(self, lanes: list[Tensor], batch: range, rows: range, keys: range) -> Visible:
        """The scores of a tile that the blocks, mask_mod and the band show."""
        table, mod, band = self.flex.blocks, self.flex.mask_mod, self.flex.scoring.band
        Sq, Sk = self.q.shape[1], self.k.shape[1]
        mask: Tensor | None = None
        states = None if table is None else table.on_host[table.spans(batch, rows, keys)]
        if states is not None and not bool((states != EMPTY).any()):
            return Visible(nothing=True)
        if table is None or states is None or not bool((states == FULL).all()):
            mask = None if mod is None else mod.result(lanes)
            if table is not None and states is not None and not bool((states == PARTIAL).all()):
                each = table.each(batch, rows, keys)
                shown = each != EMPTY
                mask = shown if mask is None else shown & (mask | (each == FULL))
        if not band.covers(rows, keys, Sq, Sk):
            inside = torch.as_tensor(band.visible(lanes[2], lanes[3], Sq, Sk))
            mask = inside if mask is None else mask & inside
        return Visible(False, mask)

    def modified(self, scores: Tensor, lanes: list[Tensor], mask: Tensor | None) -> Tensor:
        """New folded scores: after score_mod, and -inf where they are hidden."""
        per_head = self.per_head(scores, lanes[2].shape[2])
        mod = self.flex.score_mod
        result = per_head if mod is None else mod.result([per_head, *lanes])
        if mask is not None:
            result = torch.where(mask, result, -torch.inf)
        return torch.empty_like(scores).copy_(self.folded(result.expand(per_head.shape)))


def forward(
    q: Tensor, k: Tensor, v: Tensor, flex: Flex, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, Sq, Hq, Dv), lse (B, Hq, Sq) and its rounding error; see `tiled.forward`."""
    tiling, tiles, scoring = flex.tiling_of(q), flex.tiles(q, k), flex.scoring
    (B, Sq, Hq, _), Sk, Dv = q.shape, k.shape[1], v.shape[3]
    out = new_out(q, Dv)
    lse = q.new_empty(B, Hq, Sq, dtype=working_dtype(q.dtype))
    low = torch.empty_like(lse)
    for batch in tiling.batches(B, Hq, Sq, Sk):
        at = slice(batch.start, batch.stop)
        for rows in blocks(range(Sq), tiling.rows):
            q_rows, span = tiles.scaled_rows(batch, rows), slice(rows.start, rows.stop)
            state = OnlineSoftmax.empty(q_rows, Dv, tiling, None)
            if sinks is not None:
                state.begin_with(tiles.folded(sinks[None, :, None].expand(len(batch), -1, len(rows))))
            for keys in blocks(scoring.band.keys(rows, Sq, Sk), tiling.keys):
                lanes = tiles.lanes(batch, rows, keys)
                visible = tiles.visible(lanes, batch, rows, keys)
                if visible.nothing:
                    continue
                scores = tiles.scores(q_rows, tiles.keys_of(k, batch, keys), batch, rows, keys).masked
                weights = state.step(tiles.modified(scores, lanes, visible.mask))
                if (kept := tiles.kept(batch, rows, keys)) is not None:
                    weights *= kept
                state.output.baddbmm_(weights, tiles.keys_of(v, batch, keys))
            result, row_lse, row_low = state.finish()
            out[at, span] = tiles.per_head(result, len(rows)).transpose(1, 2)
            lse[at, :, span] = tiles.per_head(row_lse, len(rows))
            low[at, :, span] = tiles.per_head(row_low, len(rows))
    return out, lse, low


def max_scores(q: Tensor, k: Tensor, flex: Flex) -> Tensor:
    """The largest score of each row after score_mod and masks, (B, Hq, Sq); -inf where it sees nothing."""
    tiling, tiles, scoring = flex.tiling_of(q), flex.tiles(q, k), flex.scoring
    (B, Sq, Hq, _), Sk = q.shape, k.shape[1]
    found = q.new_full((B, Hq, Sq), -torch.inf, dtype=working_dtype(q.dtype))
    for batch in tiling.batches(B, Hq, Sq, Sk):
        for rows in blocks(range(Sq), tiling.rows):
            q_rows = tiles.scaled_rows(batch, rows)
            own = found[batch.start : batch.stop, :, rows.start : rows.stop]
            for keys in blocks(scoring.band.keys(rows, Sq, Sk), tiling.keys):
                lanes = tiles.lanes(batch, rows, keys)
                visible = tiles.visible(lanes, batch, rows, keys)
                if visible.nothing:
                    continue
                scores = tiles.scores(q_rows, tiles.keys_of(k, batch, keys), batch, rows, keys).masked
                largest = tiles.modified(scores, lanes, visible.mask).amax(-1, keepdim=True)
                torch.maximum(own, tiles.per_head(largest, len(rows))[..., 0], out=own)
    return found


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    flex: Flex,
    captured: Captured | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the forward's out, lse and lse_low; those of score_mod's tensors go to `captured`.

    dout (B, Sq, Hq, Dv), dlse (B, Hq, Sq) or None. With s the scores before score_mod and w the weights::

        dmod = w * (dout v^T - rowsum(dout * out) + dlse);   ds, dcaptured = derivative of score_mod * dmod
    """
    tiling, tiles = flex.tiling_of(q), flex.tiles(q, k)
    (B, Sq, Hq, _), Sk, work = q.shape, k.shape[1], working_dtype(q.dtype)
    dq = q.new_zeros(q.shape, dtype=work)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    delta = attention_sinks.delta(dout, out, dlse, work)
    # A row without keys has lse = -inf; +inf makes its weights exp2(-inf) = 0 instead of NaN.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    for batch in tiling.batches(B, Hq, Sq, Sk):
        at = slice(batch.start, batch.stop)
        for keys in blocks(range(Sk), tiling.keys):
            k_keys, v_keys = tiles.keys_of(k, batch, keys), tiles.keys_of(v, batch, keys)
            dk_keys, dv_keys = k_keys.new_zeros(k_keys.shape), v_keys.new_zeros(v_keys.shape)
            for rows in blocks(range(Sq), tiling.rows):
                seen = flex.scoring.band.keys(rows, Sq, Sk)
                if max(seen.start, keys.start) >= min(seen.stop, keys.stop):
                    continue
                lanes = tiles.lanes(batch, rows, keys)
                visible = tiles.visible(lanes, batch, rows, keys)
                if visible.nothing:
                    continue
                span = slice(rows.start, rows.stop)
                q_rows, dout_rows = tiles.scaled_rows(batch, rows), tiles.rows_of(dout, batch, rows)
                scores = tiles.scores(q_rows, k_keys, batch, rows, keys)
                modified = tiles.modified(scores.masked, lanes, visible.mask)
                # A derivative may be infinite where a score is -inf, and its weight 0.
                is_seen = modified > -torch.inf
                weights = tiling.exp(below(modified, tiles, lse, lse_low, at, span))
                ds = dout_rows @ v_keys.transpose(1, 2)
                applied = weights
                if (kept := tiles.kept(batch, rows, keys)) is not None:
                    applied = weights * kept
                    ds *= kept
                ds.sub_(tiles.folded(delta[at, :, span, None])).mul_(weights)
                dv_keys.baddbmm_(applied.transpose(1, 2), dout_rows)
                if captured is not None:
                    n = len(rows)
                    before, grads, shown = (tiles.per_head(x, n) for x in (scores.masked, ds, is_seen))
                    ds = tiles.folded(captured.through(before, grads, shown, lanes))
                if scores.tanh is not None:
                    ds = ds - ds * scores.tanh.square()
                dq[at, span] += tiles.per_head(ds @ k_keys, len(rows)).transpose(1, 2)
                dk_keys.baddbmm_(ds.transpose(1, 2), q_rows)
            dk[at, keys.start : keys.stop] = dk_keys.unflatten(0, (len(batch), -1)).transpose(1, 2)
            dv[at, keys.start : keys.stop] = dv_keys.unflatten(0, (len(batch), -1)).transpose(1, 2)
    dq *= flex.scoring.scale
    return dq.to(q.dtype), dk, dv


@dataclass
class Captured:
    """Gradients of score_mod's tensors, summed up tile by tile."""

    mod: Mod
    derived: Derived
    totals: list[Tensor | None]

    @classmethod
    def of(
        cls,
        mod: Mod | None,
        derivative_of: Callable[[Program, tuple[bool, ...]], Derived],
        wanted: Sequence[bool],
        dtype: torch.dtype,
    ) -> Captured | None:
        """Nothing yet; `wanted` says which tensors get a gradient, `dtype` is what sums have at least."""
        if mod is None:
            return None
        totals = [
            x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, dtype)) if wants else None
            for x, wants in zip(mod.tensors, wanted, strict=True)
        ]
        return cls(mod, derivative_of(mod.program, tuple(wanted)), totals)

    def through(self, scores: Tensor, grads: Tensor, seen: Tensor, lanes: list[Tensor]) -> Tensor:
        """The gradient of scores (b, Hq, rows, keys) before score_mod, from that of scores after it."""
        program, mod = self.derived.program, self.mod
        known = programs.values(program, [scores, *lanes, grads], mod.tensors, mod.numbers)
        first, *others = (known[ref.value] for ref in program.outputs)
        for (tensor, node), gradient in zip(self.derived.gathers, others, strict=False):
            total = self.totals[tensor]
            if total is not None:
                own = gradient.shape[programs.LANES :]
                full = gradient.expand(*scores.shape, *own)
                programs.add_gradient(total, node, known, _where_seen(full, seen))
        return _where_seen(first.to(scores.dtype).expand(scores.shape), seen)

    def gradients(self) -> list[Tensor | None]:
        pairs = zip(self.totals, self.mod.tensors, strict=True)
        return [None if total is None else total.to(x.dtype) for total, x in pairs]


def _where_seen(x: Tensor, seen: Tensor) -> Tensor:
    """x (b, Hq, rows, keys, ...), and 0 where a score is hidden."""
    seen = seen.reshape(*seen.shape, *(1,) * (x.dim() - seen.dim()))
    return torch.where(seen, x, torch.zeros((), dtype=x.dtype, device=x.device))
