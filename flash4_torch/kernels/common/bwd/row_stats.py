"""Statistics of query rows that the backward needs: lse in base 2, and delta = rowsum(out * dout) - dlse.

Eight warps have a block of rows of one head, which they take in parts. A few lanes share a row of O and dO,
16 bytes each at a time, and each sums up its part of their dot product. This is as fast as memory if enough
loads are in flight: rows are taken together up to `DEPTH` loads a lane.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import host
from ..attn_mask import vector_at
from ..scores import LOG2E
from ..warps import WARP
from .query_blocks import QueryBlock
from .row_blocks import PreprocessPlan

NUM_WARPS = 8
LOAD = 16
"""Bytes of a load."""
DEPTH = 8
"""Loads of a lane in flight."""


class RowInputs(NamedTuple):
    """out and dout (B, Sq, Hq, Dv) or packed (T, Hq, Dv); the others (B, Hq, Sq) or (Hq, T), float32."""

    out: cute.Tensor
    dout: cute.Tensor
    lse: cute.Tensor
    lse_low: cute.Tensor | None = None
    dlse: cute.Tensor | None = None


class Shape(NamedTuple):
    """How warps are laid over rows."""

    lanes: int
    """Neighbouring lanes on a row."""
    turns: int
    """Loads of each lane to cover a row."""
    rows: int
    """Rows of a lane in a part."""
    parts: int
    """Parts of a block."""

    def row(self, part: int, r: int, warp: Int32, lane: Int32) -> Int32:
        return ((part * self.rows + r) * NUM_WARPS + warp) * (WARP // self.lanes) + lane // self.lanes


class Part(NamedTuple):
    """A lane's share of a part of a block."""

    rows: list
    """Indices in the block."""
    out: cute.Tensor
    """(elements of a load, turns, rows)"""
    dout: cute.Tensor
    lses: list
    dlses: list


def shape_of(plan: PreprocessPlan) -> Shape:
    vectors = plan.Dv // step_of(plan)
    lanes = 4 if vectors <= 4 or vectors % 8 == 4 else 8
    # Four lanes would take more rows together than a small block has.
    lanes = max(lanes, NUM_WARPS * WARP // plan.blocks.queries)
    turns = -(-vectors // lanes)
    at_once = NUM_WARPS * WARP // lanes
    rows = max(1, min(DEPTH // (2 * turns), plan.blocks.queries // at_once))
    return Shape(lanes, turns, rows, plan.blocks.queries // (at_once * rows))


def step_of(plan: PreprocessPlan) -> int:
    """Elements of a load."""
    return LOAD * 8 // host.NUMERIC[plan.dtype].width


def load(
    inputs: RowInputs, own: QueryBlock, part: int, warp: Int32, lane: Int32, plan: PreprocessPlan
) -> Part:
    """Load a part of block `own`; `warp` counts the eight warps."""
    shape = shape_of(plan)
    rows = [shape.row(part, r, warp, lane) for r in range(shape.rows)]
    out, dout = (_load(x, own, rows, lane % shape.lanes, plan) for x in (inputs.out, inputs.dout))
    lses = [inputs.lse[_per_row(own, r, plan)] for r in rows]
    dlses = [inputs.dlse[_per_row(own, r, plan)] if plan.dlse else Float32(0.0) for r in rows]
    return Part(rows, out, dout, lses, dlses)


@cute.jit
def store(
    part: Part, inputs: RowInputs, stats: cute.Tensor, own: QueryBlock, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Store the statistics of a part of block `own` in the workspace."""
    shape, rows = shape_of(plan), part.rows
    base2, delta, *exact = _own_stats(stats, own, plan)
    sign = -1.0 if plan.negated else 1.0
    for r in cutlass.range_constexpr(shape.rows):
        total = _product(part.out[None, None, r], part.dout[None, None, r], lane, plan)
        sees = own.has(rows[r]) & (part.lses[r] != -Float32.inf)
        if lane % shape.lanes == 0:
            nothing = Float32(sign * math.inf)
            base2[rows[r]] = cutlass.select_(sees, part.lses[r] * (sign * LOG2E), nothing)
            if cutlass.const_expr(plan.large_scores):
                low = inputs.lse_low[_per_row(own, rows[r], plan)]
                exact[0][rows[r]] = cutlass.select_(sees, sign * part.lses[r], nothing)
                exact[1][rows[r]] = cutlass.select_(sees, low * (sign * LOG2E), Float32(0.0))
            delta[rows[r]] = cutlass.select_(sees, _signed(total, part.dlses[r], plan), Float32(0.0))


def _signed(total: Float32, dlse: Float32, plan: PreprocessPlan) -> Float32:
    return dlse - total if plan.negated else total - dlse


def _own_stats(stats: cute.Tensor, own: QueryBlock, plan: PreprocessPlan) -> tuple[cute.Tensor, ...]:
    """The block's numbers, (m,) each: lse in base 2 and delta; with a floating mask also lse and lse_low."""
    each = Int64(1)
    for n in stats.shape[1:]:
        each = each * n
    layout = cute.make_layout(plan.blocks.queries)
    start = own.number * plan.blocks.queries
    return tuple(cute.make_tensor(stats.iterator + (i * each + start), layout) for i in range(plan.stats))


def _per_row(own: QueryBlock, r: Int32, plan: PreprocessPlan) -> tuple:
    row = own.row(r)
    return (own.head, row) if plan.is_packed else (own.batch, own.head, row)


def _load(x: cute.Tensor, own: QueryBlock, rows: list, lane: Int32, plan: PreprocessPlan) -> cute.Tensor:
    """The lane's numbers, (step, turns, rows); in the last turn one with nothing of a row loads its end."""
    shape, step = shape_of(plan), step_of(plan)
    loaded = cute.make_rmem_tensor((step, shape.turns, shape.rows), x.element_type)
    for r, row in enumerate(rows):
        at = (own.row(row), own.head) if plan.is_packed else (own.batch, own.row(row), own.head)
        source = x[(*at, None)].iterator
        for t in range(shape.turns):
            column = cutlass.min((t * shape.lanes + lane) * step, plan.Dv - step)
            cute.autovec_copy(vector_at(source + column, step), loaded[None, t, r])
    return loaded


def _product(o: cute.Tensor, do: cute.Tensor, lane: Int32, plan: PreprocessPlan) -> Float32:
    """The row's rowsum(O * dO), in all of its lanes."""
    shape, step = shape_of(plan), step_of(plan)
    total = Float32(0.0)
    for t in range(shape.turns):
        products = Float32(0.0)
        for i in range(step):
            products = products + o[i, t].to(Float32) * do[i, t].to(Float32)
        if (t + 1) * shape.lanes * step > plan.Dv:
            inside = (t * shape.lanes + lane % shape.lanes) * step < plan.Dv
            products = cutlass.select_(inside, products, Float32(0.0))
        total = total + products
    distance = shape.lanes // 2
    while distance:
        total = total + cute.arch.shuffle_sync_bfly(total, distance)
        distance //= 2
    return total
