"""The issuing warp: S = Q K^T and O += P V of both tiles, by one thread.

    QK0 QK1  PV0 QK0' PV1 QK1'  PV0' QK0'' PV1' QK1''  ..

While softmax makes weights of one tile's scores, the tensor core works for the other tile. A product that
overwrites what the one before it reads needs no barrier: all are done in order.
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
    """Low words of descriptors, for the first stage or tile."""

    q: Int32
    k: Int32
    v: Int32


class Progress(NamedTuple):
    """Since the launch, from which follows where one is in each ring."""

    tiles: Int32
    loads: Int32
    phases: Int32
    """A bit for each of the two tiles: of how many blocks it had, the lowest bit."""


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
        # Tensor memory starts at 0, which the assembler does not know: else it would keep the descriptors of
        # all instructions that read Q from tile to tile, and spill them.
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
    """QK of the first block, then PV of each block and QK of the next one."""
    plan, whole = ctx.plan, visited.whole
    at, phases = ring.place(done.loads, plan.config.kv_stages), done.phases
    ring.wait_full(ctx.load_kv, at)
    for t in cutlass.range_constexpr(plan.q_tiles):  # in a loop, ptxas 13 dies of it for D 192
        ring.wait_full(ctx.load_q, Cursor(Int32(t), done.tiles & 1))
        _scores(ctx, operands, visited.own[t], whole.last - 1, Int32(t), at)
    umma.commit(ctx.load_kv.empty + at.stage, plan.cluster_size)
    at = ring.after(at, plan.config.kv_stages)
    for i in cutlass.range(whole.last - whole.first, unroll=1):
        at, phases = _block(ctx, operands, visited, whole.last - 1 - i, at, phases)


@cute.jit
def _block(ctx: Context, operands: Operands, visited: Spans, position: Int32, at: Cursor, phases: Int32):
    """PV of the block at a position, and QK of the one that comes next, if one does."""
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
    """S of a tile, which was read before the last PV; with the last one Q is free."""
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
    """O += P V of a tile, as soon as the early part of P is there."""
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
