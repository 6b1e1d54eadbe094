"""FlashAttention-4's algorithm in plain torch, tile by tile: O(S) memory, every feature, any device.

The forward walks the keys of one block of rows and keeps, per row, a reference score `ref`, the sum of
exp(score - ref) and the unnormalised output. The backward walks the rows of one block of keys and recomputes
the weights from lse. Exponentials are taken in base 2, because exp2 is the instruction that exists.

Two ideas of FlashAttention-4 are switches of `Tiling`:

- conditional rescaling: `ref` follows the running maximum only once that has grown by more than a threshold.
  Until then a stale reference is exact, since output and sum share it; only the exponent range is used up.
- polynomial exp2: 2^floor(x) times a degree-3 polynomial in x - floor(x), for SMs that have more FMA
  throughput than MUFU throughput. Its relative error, 8.8e-5, vanishes in a bfloat16 weight.

The 'tiled' backend runs this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks import Band
from .scoring import Scoring, mask_tile, working_dtype

LOG2E = math.log2(math.e)

# A minimax polynomial for 2^f on [0, 1) with its constant term fixed to 1 (FlashAttention-4).
_EXP2_COEFFICIENTS = (0.077119089663, 0.227564394474, 0.695146143436, 1.0)


def exp2_poly3(x: Tensor) -> Tensor:
    """2^x as 2^floor(x) * p(x - floor(x)), for x <= 127; x below -127 counts as -127, but -inf gives 0."""
    whole = torch.floor(x.clamp(min=-127.0))
    part = x.clamp(min=-127.0) - whole
    p = torch.full_like(x, _EXP2_COEFFICIENTS[0])
    for c in _EXP2_COEFFICIENTS[1:]:
        p = p * part + c
    return torch.where(x == -torch.inf, 0.0, torch.ldexp(p, whole))


def exp_(x: Tensor) -> Tensor:
    """e^x in the place of x, if not by torch's own `exp_`: where float32 underflows, as where a mask hides
    keys, that takes 20 to 90 times as long on CPUs with MKL.
    """
    return x.mul_(LOG2E).exp2_()


def tanh_over_(x: Tensor, c: float) -> Tensor:
    """tanh(x / c) in the place of x: as exact as torch's, and twice as fast on a CPU."""
    # e / (e + 2) with e = exp(2 x / c) - 1; long before that overflows, the result is 1.
    e = x.mul_(2.0 / c).clamp_(max=80.0).expm1_()
    return e.div_(e + 2.0)


@dataclass
class RescaleCount:
    """Savings of conditional rescaling, counted in (row, key tile) steps after the first tile of a row."""

    steps: int = 0
    grown: int = 0
    """Steps in which the running maximum grew; there the plain online softmax changes its reference."""
    rescaled: int = 0
    """Steps in which it grew past the threshold, so that sum and output had to be multiplied."""

    @property
    def skipped(self) -> float:
        """The share of steps that needed no multiplication of the output."""
        return 1.0 - self.rescaled / self.steps if self.steps else 0.0


GPU_ELEMENTS = 1 << 25
"""Scores held at once on a GPU: 128 MiB in float32, and a few times that for the tensors made from them."""


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and the algorithm's switches.

    `rescale_threshold` is in base-2 units: 8 allows weights up to 2^8, 0 rescales at every new maximum.
    `elements` bounds the scores held at once, over all heads of the batch entries that fit.
    """

    rows: int = 128
    keys: int = 256
    elements: int = 1 << 19
    rescale_threshold: float = 8.0
    exp2: Callable[[Tensor], Tensor] = torch.exp2_
    """The exponential in base 2; it may work in place."""

    def exp(self, x: Tensor) -> Tensor:
        """e^x in the place of x."""
        return self.exp2(x.mul_(LOG2E))

    @classmethod
    def of(cls, q: Tensor, band: Band) -> Tiling:
        """Larger tiles for few heads, so that a step is worth its calls, except where a window skips tiles.

        GPU launches need much larger tiles than a CPU's cache. The batch size does not matter, so that
        results do not depend on it.
        """
        Hq, rows, keys = q.shape[2], cls.rows, cls.keys
        elements = cls.elements if q.device.type == "cpu" else GPU_ELEMENTS
        is_window = band.left is not None and band.right is not None
        while not is_window and 2 * Hq * rows * keys <= elements:
            rows, keys = (2 * rows, keys) if rows < keys else (rows, 2 * keys)
        return cls(rows, keys, elements)

    def batches(self, B: int, Hq: int, Sq: int, Sk: int) -> Iterator[range]:
        tile = Hq * min(self.rows, Sq) * min(self.keys, Sk)
        return blocks(range(B), max(1, self.elements // max(1, tile)))


def blocks(span: range, size: int) -> Iterator[range]:
    """`span` split into ranges of `size`; the last one may be shorter."""
    for start in range(span.start, span.stop, size):
        yield range(start, min(start + size, span.stop))


@dataclass(frozen=True)
class Tiles:
    """One call's geometry: how (B, S, H, D) tensors are split into tiles, and the scores of one tile.

    A tile is folded: one matrix for each batch entry and KV head, (b * Hk, group * rows, ...). Query heads
    that share a KV head are further rows of it, so that GQA is a larger matmul and needs no repeated keys.
    Masks and dropout use the unfolded form, `per_head`.
    """

    q: Tensor
    k: Tensor
    scoring: Scoring

    def rows_of(self, x: Tensor, batch: range, rows: range) -> Tensor:
        """Rows of a (B, Sq, Hq, D) tensor as (b * Hk, group * rows, D) in the working dtype."""
        part = x[batch.start : batch.stop, rows.start : rows.stop].to(working_dtype(x.dtype))
        return self.folded(part.transpose(1, 2))

    def keys_of(self, x: Tensor, batch: range, keys: range) -> Tensor:
        """Keys of a (B, Sk, Hk, D) tensor as (b * Hk, keys, D) in the working dtype."""
        part = x[batch.start : batch.stop, keys.start : keys.stop].to(working_dtype(x.dtype))
        return part.transpose(1, 2).flatten(0, 1)

    def folded(self, x: Tensor) -> Tensor:
        """(b, Hq, rows, ...) as (b * Hk, group * rows, ...)."""
        b, Hq, n = x.shape[:3]
        Hk = self.k.shape[2]
        return x.reshape(b * Hk, Hq // Hk * n, *x.shape[3:])

    def per_head(self, x: Tensor, n: int) -> Tensor:
        """The inverse of `folded`, for `n` rows; a view."""
        return x.view(-1, self.q.shape[2], n, *x.shape[2:])

    def scaled_rows(self, batch: range, rows: range) -> Tensor:
        """`rows_of` q times scale."""
        return self.rows_of(self.q, batch, rows) * self.scoring.scale

    def scores(self, q_rows: Tensor, k_keys: Tensor, batch: range, rows: range, keys: range) -> Scores:
        """The scores of a tile from `scaled_rows` and `keys_of` k."""
        scores = q_rows @ k_keys.transpose(1, 2)
        tanh = None
        if self.scoring.softcap:
            tanh = tanh_over_(scores, self.scoring.softcap)
            scores = tanh * self.scoring.softcap
        per_head = self.per_head(scores, len(rows))
        for bias in self.scoring.biases(scores, self.q.shape[1], self.k.shape[1], batch, rows, keys):
            per_head += bias
        return Scores(scores, tanh)

    def kept(self, batch: range, rows: range, keys: range) -> Tensor | None:
        """The factor dropout puts on each weight of a tile, or None."""
        dropout = self.scoring.dropout
        if dropout is None:
            return None
        B, Sq, Hq, _ = self.q.shape
        keep = dropout.tile((B, Hq, Sq, self.k.shape[1]), batch, rows, keys)
        return self.folded(dropout.factors(keep, working_dtype(self.q.dtype)))


@dataclass(frozen=True)
class Scores:
    """Scores of one tile, (b * Hk, group * rows, keys)."""

    masked: Tensor
    tanh: Tensor | None
    """Softcap only: the scores before the mask, divided by softcap; their derivative is 1 - tanh^2."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    tiling: Tiling | None = None,
    count: RescaleCount | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) in q's dtype; lse (B, Hq, Sq), natural log, float32 (float64 for float64); lse_low.

    lse_low, shaped like lse, is the rounding error of lse. Where scores are -1e9, because a large mask was
    added to all of them, lse = max + log(sum) keeps nothing of the sum, but lse_low does.
    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv). `count` counts the rescales that were skipped.
    sinks (Hq,) are a first key of every head, whose value is 0.
    """
    tiling = tiling or Tiling.of(q, scoring.band)
    (B, Sq, Hq, _), Sk, Dv = q.shape, k.shape[1], v.shape[3]
    out = q.new_empty(B, Sq, Hq, Dv)
    lse = q.new_empty(B, Hq, Sq, dtype=working_dtype(q.dtype))
    low = torch.empty_like(lse)
    tiles = Tiles(q, k, scoring)
    for batch in tiling.batches(B, Hq, Sq, Sk):
        for rows in blocks(range(Sq), tiling.rows):
            q_rows = tiles.scaled_rows(batch, rows)
            state = OnlineSoftmax.empty(q_rows, Dv, tiling, count)
            if sinks is not None:
                state.begin_with(tiles.folded(sinks[None, :, None].expand(len(batch), -1, len(rows))))
            for keys in blocks(scoring.band.keys(rows, Sq, Sk), tiling.keys):
                scores = tiles.scores(q_rows, tiles.keys_of(k, batch, keys), batch, rows, keys)
                weights = state.step(scores.masked)
                if (kept := tiles.kept(batch, rows, keys)) is not None:
                    weights *= kept
                state.output.baddbmm_(weights, tiles.keys_of(v, batch, keys))
            at, span = slice(batch.start, batch.stop), slice(rows.start, rows.stop)
            result, row_lse, row_low = state.finish()
            out[at, span] = tiles.per_head(result, len(rows)).transpose(1, 2)
            lse[at, :, span] = tiles.per_head(row_lse, len(rows))
            low[at, :, span] = tiles.per_head(row_low, len(rows))
    return out, lse, low


@dataclass
class OnlineSoftmax:
    """Running state of a block of folded rows: reference score, sum of weights, unnormalised output."""

    ref: Tensor
    total: Tensor
    output: Tensor
    tiling: Tiling
    count: RescaleCount | None
    highest: Tensor | None = None

    @classmethod
    def empty(cls, q_rows: Tensor, Dv: int, tiling: Tiling, count: RescaleCount | None) -> OnlineSoftmax:
        # Before its first score a row's reference is the lowest finite number: -inf - -inf would be NaN.
        shape = q_rows.shape[:-1]
        ref = q_rows.new_full(shape, torch.finfo(q_rows.dtype).min)
        return cls(ref, q_rows.new_zeros(shape), q_rows.new_zeros(*shape, Dv), tiling, count)

    def begin_with(self, sink: Tensor) -> None:
        """Makes `sink`, a score for each row, the first key, of value 0."""
        self.ref = torch.maximum(self.ref, sink.to(self.ref.dtype))
        self.total = torch.where(sink == -torch.inf, 0.0, torch.ones_like(self.total))

    def step(self, scores: Tensor) -> Tensor:
        """Adds the next tile of scores, and turns them in place into weights relative to `ref`."""
        highest = torch.maximum(self.ref, scores.amax(-1))
        adopt = highest - self.ref > self.tiling.rescale_threshold / LOG2E
        self._tally(scores, adopt)
        ref = torch.where(adopt, highest, self.ref)
        factor = self.tiling.exp(self.ref - ref)
        self.ref = ref
        weights = self.tiling.exp(scores.sub_(ref[..., None]))
        self.total.mul_(factor).add_(weights.sum(-1))
        self.output.mul_(factor[..., None])
        return weights

    def _tally(self, scores: Tensor, adopt: Tensor) -> None:
        if self.count is None:
            return
        seen = scores.amax(-1)
        if self.highest is not None:
            later = self.highest > -torch.inf
            self.count.steps += int(later.sum())
            self.count.grown += int((later & (seen > self.highest)).sum())
            self.count.rescaled += int((later & adopt).sum())
        self.highest = seen if self.highest is None else torch.maximum(self.highest, seen)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised output (b * Hk, group * rows, Dv), lse and lse_low (b * Hk, group * rows)."""
        nothing = self.total == 0
        total = self.total.masked_fill(nothing, 1.0)
        log_sum = torch.log(total)
        lse = self.ref + log_sum
        # Knuth's TwoSum: exact, whichever of the two is larger.
        part = lse - self.ref
        low = (self.ref - (lse - part)) + (log_sum - part)
        output = self.output.div_(total[..., None])
        return output, lse.masked_fill_(nothing, -torch.inf), low.masked_fill_(nothing, 0.0)


@dataclass(frozen=True)
class Gradients:
    """Gradients in the inputs' dtypes and shapes; `dmask` only if it was requested."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dmask: Tensor | None


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scoring: Scoring,
    mask_grad: bool = False,
    tiling: Tiling | None = None,
    lse_low: Tensor | None = None,
) -> Gradients:
    """Gradients of q, k, v and, with `mask_grad`, of a floating attn_mask, from the forward's out and lse.

    dout (B, Sq, Hq, Dv); dlse (B, Hq, Sq) or None; lse_low the forward's, or None for zeros; the rest as in
    `forward`. Weights are recomputed as exp(scores - lse - lse_low), so nothing of size Sq * Sk is stored::

        ds = w * (dout v^T - rowsum(dout * out) + dlse)
        dv = w^T dout;   dq = scale * ds k;   dk = scale * ds^T q
    """
    tiling = tiling or Tiling.of(q, scoring.band)
    (B, Sq, Hq, _), Sk = q.shape, k.shape[1]
    work = working_dtype(q.dtype)
    dq = q.new_zeros(q.shape, dtype=work)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    mask = scoring.attn_mask
    dmask = mask.new_zeros(mask.shape, dtype=work) if mask_grad and mask is not None else None
    delta = (dout.to(work) * out.to(work)).sum(-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    # A row without keys has lse = -inf; +inf makes its weights exp2(-inf) = 0 instead of NaN.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    tiles = Tiles(q, k, scoring)
    for batch in tiling.batches(B, Hq, Sq, Sk):
        at = slice(batch.start, batch.stop)
        for keys in blocks(range(Sk), tiling.keys):
            k_keys, v_keys = tiles.keys_of(k, batch, keys), tiles.keys_of(v, batch, keys)
            dk_keys, dv_keys = k_keys.new_zeros(k_keys.shape), v_keys.new_zeros(v_keys.shape)
            for rows in _rows_that_see(keys, scoring, Sq, Sk, tiling.rows):
                span = slice(rows.start, rows.stop)
                q_rows, dout_rows = tiles.scaled_rows(batch, rows), tiles.rows_of(dout, batch, rows)
                scores = tiles.scores(q_rows, k_keys, batch, rows, keys)
                weights = tiling.exp(below(scores.masked, tiles, lse, lse_low, at, span))
                ds = dout_rows @ v_keys.transpose(1, 2)
                applied = weights
                if (kept := tiles.kept(batch, rows, keys)) is not None:
                    applied = weights * kept
                    ds *= kept
                ds.sub_(tiles.folded(delta[at, :, span, None])).mul_(weights)
                dv_keys.baddbmm_(applied.transpose(1, 2), dout_rows)
                if dmask is not None:
                    tile = mask_tile(dmask, batch, rows, keys)
                    tile += tiles.per_head(ds, len(rows)).sum_to_size(tile.shape)
                if scores.tanh is not None:
                    ds -= scores.tanh.square_().mul_(ds)
                dq[at, span] += tiles.per_head(ds @ k_keys, len(rows)).transpose(1, 2)
                dk_keys.baddbmm_(ds.transpose(1, 2), q_rows)
            dk[at, keys.start : keys.stop] = dk_keys.unflatten(0, (len(batch), -1)).transpose(1, 2)
            dv[at, keys.start : keys.stop] = dv_keys.unflatten(0, (len(batch), -1)).transpose(1, 2)
    dq *= scoring.scale
    return Gradients(dq.to(q.dtype), dk, dv, None if dmask is None or mask is None else dmask.to(mask.dtype))


def below(
    scores: Tensor, tiles: Tiles, lse: Tensor, lse_low: Tensor | None, batch: slice, rows: slice
) -> Tensor:
    """scores - lse - lse_low, in place: lse first, as both may share a large part, then its error."""
    scores.sub_(tiles.folded(lse[batch, :, rows, None]))
    return scores if lse_low is None else scores.sub_(tiles.folded(lse_low[batch, :, rows, None]))


_FAITHFUL = 2.0**6
"""Largest |lse| whose rounding error changes no weight by more than 4e-6."""


def is_faithful(lse: Tensor) -> bool:
    """Whether every lse is so small that its rounding error does not matter."""
    largest: float = lse.abs().max().item() if lse.numel() else 0.0
    return largest < _FAITHFUL


def lse_low(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scoring: Scoring,
    tiling: Tiling | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The rounding error of an lse that another kernel than `forward` computed, in lse's shape and dtype.

    Scores are recomputed for blocks of rows in which some lse is above 64 or below -64; elsewhere it is 0.
    """
    low = torch.zeros_like(lse)
    is_large = (lse.abs() >= _FAITHFUL) & lse.isfinite()
    if not is_large.any():
        return low
    tiling = tiling or Tiling.of(q, scoring.band)
    (B, Sq, Hq, _), Sk = q.shape, k.shape[1]
    tiles = Tiles(q, k, scoring)
    for batch in tiling.batches(B, Hq, Sq, Sk):
        for rows in blocks(range(Sq), tiling.rows):
            at, span = slice(batch.start, batch.stop), slice(rows.start, rows.stop)
            if not is_large[at, :, span].any():
                continue
            q_rows, total = tiles.scaled_rows(batch, rows), torch.zeros_like(lse[at, :, span])
            if sinks is not None:
                total += tiling.exp(sinks[:, None].to(lse.dtype) - lse[at, :, span])
            for keys in blocks(scoring.band.keys(rows, Sq, Sk), tiling.keys):
                scores = tiles.scores(q_rows, tiles.keys_of(k, batch, keys), batch, rows, keys)
                weights = tiling.exp(below(scores.masked, tiles, lse, None, at, span))
                total += tiles.per_head(weights.sum(-1), len(rows))
            low[at, :, span] = total.log_().masked_fill_(~is_large[at, :, span], 0.0)
    return low


def _rows_that_see(keys: range, scoring: Scoring, Sq: int, Sk: int, size: int) -> Iterator[range]:
    """Blocks of rows in which at least one row sees a key of `keys`."""
    for rows in blocks(range(Sq), size):
        seen = scoring.band.keys(rows, Sq, Sk)
        if max(seen.start, keys.start) < min(seen.stop, keys.stop):
            yield rows
