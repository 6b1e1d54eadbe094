"""What a consumer warpgroup works on: registers, a tile and a head, and its cursors in the rings."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...common import attn_mask, ring
from ...common.band import Band, Span
from ...common.bwd import tiles
from ...common.bwd.tiles import Blocks, Tile
from ...common.ring import Cursor
from ...common.warps import WARP
from ..warps import LANES, WARP_ROWS
from .context import Context


class Thread(NamedTuple):
    """A thread of a consumer warpgroup, and what it keeps in registers from block to block."""

    warpgroup: Int32
    index: Int32
    S: cute.Tensor
    dK: cute.Tensor
    dV: cute.Tensor
    v_regs: cute.Tensor | None = None
    """V, where it is an operand from registers (`v_in_regs`)."""

    @property
    def lane(self) -> Int32:
        return self.index % WARP

    @property
    def row(self) -> Int32:
        """The first of its two keys among the warpgroup's 64; the second is eight keys further on."""
        return self.index // WARP * WARP_ROWS + self.lane // LANES


class TileState(NamedTuple):
    """A tile and one of its query heads, as one thread sees them."""

    tile: Tile
    kv: Cursor
    band: Band
    span: Span
    order: tiles.DqOrder | None
    """The dQ order, if sums have one and the work tile does not bring it."""
    positions: tuple[Int32, Int32]
    """Positions of the thread's keys."""
    head: Int32
    blocks: Blocks


class Cursors(NamedTuple):
    q: Cursor
    do: Cursor | None
    """None if it always equals the cursor of Q."""
    ds: Cursor
    dq: Int32 | None = None
    """The slot in which the warpgroup leaves its dQ. None if it has only one, with `role_split`, or if the
    slot is the one that belongs to the stage of Q."""
    words: attn_mask.Words = ()
    """A bool mask's words of the block at `q`, which `weights.fetch_words` has begun to load."""


def start(ctx: Context, t: Thread) -> Cursors:
    """The first cursors; with `unroll_stages` as few as possible (ptxas.md, P12)."""
    config, together = ctx.plan.config, ctx.plan.config.unroll_stages
    do = None if together else ring.start()
    slots_too = together and config.dq_stages == config.q_stages
    words = attn_mask.all_ones(ctx.plan.mask, 2) if ctx.plan.fetches_words else ()
    return Cursors(ring.start(), do, ring.start(), None if slots_too else t.warpgroup, words)


@cute.jit
def after_block(ctx: Context, at: Cursors) -> Cursors:
    """The cursors of the next block."""
    config = ctx.plan.config
    q, do, dq = ring.after(at.q, config.q_stages), None, None
    if cutlass.const_expr(at.do is not None):
        do = ring.after(at.do, config.do_stages)
    if cutlass.const_expr(at.dq is not None):
        dq = other_slot(ctx, at.dq)
    return Cursors(q, do, ring.after(at.ds, config.ds_stages), dq, at.words)


def at_stage(at: Cursors, stage: int) -> Cursors:
    """The cursors where the stage of Q is a constant."""
    return at._replace(q=Cursor(stage, at.q.phase))


def at_any_stage(at: Cursors) -> Cursors:
    return at._replace(q=Cursor(Int32(at.q.stage), at.q.phase))


def rows_at(at: Cursors) -> Cursor:
    """The cursor of dO."""
    return at.q if at.do is None else at.do


def slot_at(ctx: Context, t: Thread, at: Cursors) -> Int32:
    return t.warpgroup + ctx.plan.warpgroups * at.q.stage if at.dq is None else at.dq


@cute.jit
def other_slot(ctx: Context, slot: Int32) -> Int32:
    """The same warpgroup's other slot, or this one if it has only one."""
    if cutlass.const_expr(ctx.plan.config.dq_stages == 1):
        return slot
    return slot + ctx.plan.warpgroups if slot < ctx.plan.warpgroups else slot - ctx.plan.warpgroups
