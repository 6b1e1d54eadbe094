"""The MMA warp: one thread issues S = Q K^T and O += P V of both tiles.

    QK0 QK1  PV0 QK0' PV1 QK1'  PV0' QK0'' PV1' QK1''  ..

While softmax turns one tile's scores into P, the tensor core works for the other tile. An MMA that overwrites
what the one before it reads needs no barrier: all complete in order.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common import ring
from ...common.band import Span
from ...common.fwd import tiles
from ...common.ring import Cursor
from ...common.role import role
from .. import tmem, umma
from . import spans
from .context import Context
from .plan import TILE_STAGES
from .spans import Spans


class Operands(NamedTuple):
    """Low words of the operands' descriptors, for the first stage or tile."""

    q: Int32
    k: Int32
    v: Int32


class Progress(NamedTuple):
    """Counts since the launch, from which the cursor in each ring follows."""

    tiles: Int32
    loads: Int32
    phases: Int32
    """One bit for each of the two tiles: the lowest bit of its number of blocks."""


@role(produces=("s_p", "o"), consumes=("tile", "load_q", "load_kv", "s_p", "late"))
@cute.jit
def mma(ctx: Context) -> None:
    plan = ctx.plan
    words = Operands(
        umma.word(plan.scores.a, ctx.sQ.iterator),
        umma.word(plan.scores.b, ctx.sKV),
        umma.word(plan.output.b, ctx.sKV),
    )
    at = ring.start()
    done = Progress(Int32(0), Int32(0), Int32(0))
    tile = tiles.read(ctx, ctx.tile, at)
    while tile.index >= 0:
        ring.release(ctx.tile, at)
        visited = spans.spans_of(ctx, tile)
        # TMEM starts at 0, which ptxas does not know: else it would keep the descriptors of all instructions
        # that read Q from tile to tile, and spill them (ptxas.md, P16).
        operands = Operands(words.q + cute.arch.load(ctx.tmem_holder, Int32), words.k, words.v)
        with cute.arch.elect_one():
            _tile(ctx, operands, visited, done)
        phases = done.phases
        for t in cutlass.range_constexpr(plan.q_tiles):
            phases = phases ^ ((visited.own[t].last - visited.own[t].first & 1) << t)
        loads = done.loads + 2 * (visited.whole.last - visited.whole.first)
        done = Progress(done.tiles + 1, loads, phases)
        at = ring.after(at, TILE_STAGES)
        tile = tiles.read(ctx, ctx.tile, at)


@cute.jit
def _tile(ctx: Context, operands: Operands, visited: Spans, done: Progress) -> None:
    """QK^T of the first block, then PV of each block and QK^T of the next one."""
    plan, whole = ctx.plan, visited.whole
    at, phases = ring.place(done.loads, plan.config.kv_stages), done.phases
    ring.wait_full(ctx.load_kv, at)
    # Unrolled: CUDA 13's ptxas fails on the rolled loop at D 192 (ptxas.md, P27).
    for t in cutlass.range_constexpr(plan.q_tiles):
        ring.wait_full(ctx.load_q, Cursor(Int32(t), done.tiles & 1))
        _scores(ctx, operands, visited.own[t], whole.last - 1, Int32(t), at)
    umma.commit(ctx.load_kv.empty + at.stage, plan.cluster_size)
    at = ring.after(at, plan.config.kv_stages)
    for i in cutlass.range(whole.last - whole.first, unroll=1):
        at, phases = _block(ctx, operands, visited, whole.last - 1 - i, at, phases)


@cute.jit
def _block(ctx: Context, operands: Operands, visited: Spans, position: Int32, at: Cursor, phases: Int32):
    """PV of the block at a position, and QK^T of the one that comes next, if there is one."""
    plan = ctx.plan
    k_at = ring.after(at, plan.config.kv_stages)
    ring.wait_full(ctx.load_kv, at)
    for t in cutlass.range(plan.q_tiles, unroll=1):
        own = spans.of(ctx, visited, t)
        phases = _output(ctx, operands, own, position, t, at, phases)
        if t == plan.q_tiles - 1:
            umma.commit(ctx.load_kv.empty + at.stage, plan.cluster_size)
        if position > visited.whole.first:
            ring.wait_full(ctx.load_kv, k_at)
            _scores(ctx, operands, own, position - 1, t, k_at)
    if position > visited.whole.first:
        umma.commit(ctx.load_kv.empty + k_at.stage, plan.cluster_size)
    return ring.after(k_at, plan.config.kv_stages), phases


@cute.jit
def _scores(ctx: Context, operands: Operands, own: Span, position: Int32, t: Int32, at: Cursor) -> None:
    """S of a tile. The S before it was read before the last PV was issued; the last S of a tile frees Q."""
    plan = ctx.plan
    if spans.visits(ctx, own, position):
        q, word = operands.q + t * plan.scores.a.units, operands.k + at.stage * _stage_units(ctx)
        umma.issue(plan.scores, t * plan.keys, q, word, False)
        umma.commit(ctx.s_p.full + t, plan.cluster_size)
        if cutlass.const_expr(not plan.config.o_over_q):
            if position == own.first:
                umma.commit(ctx.load_q.empty + t, plan.cluster_size)


@cute.jit
def _output(
    ctx: Context, operands: Operands, own: Span, position: Int32, t: Int32, at: Cursor, phases: Int32
) -> Int32:
    """O += P V of a tile, issued as soon as the early part of P is there."""
    plan = ctx.plan
    if spans.visits(ctx, own, position):
        o, p, phase = plan.o_columns[0] + t * plan.Dv, t * plan.keys, phases >> t & 1
        word, early = operands.v + at.stage * _stage_units(ctx), plan.early_steps
        cute.arch.mbarrier_wait(ctx.s_p.empty + t, phase)
        tmem.fence_after()
        umma.issue(plan.output, o, p, word, position != own.last - 1, last=early)
        cute.arch.mbarrier_wait(ctx.late.full + t, phase)
        tmem.fence_after()
        umma.issue(plan.output, o, p, word, True, first=early)
        if position == own.first:
            umma.commit(ctx.o.full + t, plan.cluster_size)
        phases = phases ^ (1 << t)
    return phases


def _stage_units(ctx: Context) -> int:
    return ctx.plan.kv_elements * umma.BYTES // umma.UNIT
