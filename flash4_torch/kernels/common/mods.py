"""score_mod, mask_mod and block masks on the device: blocks that a tile visits, and what is done to scores.

A role that holds scores does

    own = rows_of(mods, plan, batch, heads, positions)  # once a tile
    modify(mods, plan, own, fragment)                   # scaled, capped scores, in natural units
    mask(mods, plan, own, n, fragment)                  # where the block may be partial
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from . import programs
from .attn_mask import Mask, within
from .fragment import Fragment
from .host import any_sizes, compact, strided
from .lowering import Lowering, lower
from .mask_tables import MaskPlan
from .programs import Arguments

EMPTY, PARTIAL, FULL = 0, 1, 2
"""States of a block mask's blocks."""


class BlockArgs(NamedTuple):
    """A block mask, as a kernel receives it."""

    visible: cute.Tensor
    """(Bm, HB, MB, NB) int32: `mask_tables`'s blocks, of the kernel's tiles."""
    rank: cute.Tensor
    """(Bm, HB, MB, NB + 1) int32: likewise."""
    states: cute.Tensor
    """(Bm, Hm, rows, columns) uint8: the state of each of the mask's own blocks."""
    q_block: Int32
    kv_block: Int32
    """Query and key positions of a block."""


class ModArgs(NamedTuple):
    """What a launch takes for the mods of `Features`."""

    tensors: tuple[cute.Tensor, ...] | None
    """Those of score_mod, then of mask_mod; None if there are none."""
    scalars: tuple[Any, ...] | None
    blocks: BlockArgs | None


class Rows(NamedTuple):
    """What a thread keeps of its rows."""

    score: programs.Tile | None
    mask: programs.Tile | None
    states: tuple[cute.Tensor, ...]
    """(columns,) for each row, with block lists."""


def example_args(plan: Any) -> ModArgs:
    """Arguments that stand for any others when a kernel is compiled."""
    tensors: list[cute.Tensor] = []
    scalars: list[Any] = []
    for text in (plan.features.mods.score_mod, plan.features.mods.mask_mod):
        if text:
            program = lower(text, False).program
            tensors += [strided(programs.STORED[t.dtype], max(t.rank, 1)) for t in program.tensors]
            scalars += [programs.PASSED[dtype](0) for dtype in program.scalars]
    blocks = None
    if plan.features.mods.blocks:
        visible, rank = (compact(Int32, any_sizes(4)) for _ in range(2))
        blocks = BlockArgs(visible, rank, strided(cutlass.Uint8, 4), Int32(1), Int32(1))
    return ModArgs(tuple(tensors) or None, tuple(scalars) or None, blocks)


def visited(args: ModArgs | None, plan: MaskPlan) -> Mask | None:
    """The table of the blocks that tiles visit, None if they visit all."""
    if args is None or args.blocks is None:
        return None
    return Mask(plan, args.blocks.states, None, args.blocks.visible, args.blocks.rank)


def rows_of(
    args: ModArgs, plan: Any, batch: Int32, heads: tuple[Int32, ...], positions: tuple[Int32, ...]
) -> Rows:
    """A thread's rows, by their query heads and positions."""
    own = [
        None if found is None else programs.begin(*found, batch, heads, positions)
        for found in (_score_mod(args, plan), _mask_mod(args, plan))
    ]
    states: tuple[cute.Tensor, ...] = ()
    if args.blocks is not None:
        table = args.blocks.states
        b = within(batch, table.shape[0])
        states = tuple(
            table[b, within(h, table.shape[1]), within(i // args.blocks.q_block, table.shape[2]), None]
            for h, i in zip(heads, positions, strict=True)
        )
    return Rows(own[0], own[1], states)


def modify(args: ModArgs, plan: Any, own: Rows, fragment: Fragment) -> None:
    """Apply score_mod to scores in natural units, in place."""
    found = _score_mod(args, plan)
    if found is None:
        return
    scores = fragment.values

    def put(r: int, c: int, result: Any) -> None:
        scores[r, c] = result.to(Float32)

    programs.apply(*found, own.score, len(fragment.rows), _keys(fragment), lambda r, c: scores[r, c], put)


def mask(args: ModArgs, plan: Any, own: Rows, first_key: Int32, fragment: Fragment) -> None:
    """Hide what mask_mod and the block mask hide; `first_key` is the first of the kernel's block."""
    found, rows, keys = _mask_mod(args, plan), len(fragment.rows), list(_keys(fragment))
    scores, blocks = fragment.values, plan.features.mods.blocks
    shared = ()
    if blocks == "rows":
        column = within(first_key // args.blocks.kv_block, args.blocks.states.shape[3])
        shared = tuple(row[column].to(Int32) for row in own.states)

    def state(r: int, c: int) -> Int32:
        if blocks == "rows":
            return shared[r]
        column = within(keys[c] // args.blocks.kv_block, args.blocks.states.shape[3])
        return own.states[r][column].to(Int32)

    def put(r: int, c: int, shown: Boolean | None) -> None:
        if blocks:
            found = state(r, c)
            listed = found != EMPTY
            shown = listed if shown is None else listed & (shown | (found == FULL))
        scores[r, c] = cutlass.select_(shown, scores[r, c], -Float32.inf)

    if found is not None:
        programs.apply(*found, own.mask, rows, keys, lambda r, c: None, put)
    elif blocks:
        for c in range(len(keys)):
            for r in range(rows):
                put(r, c, None)


def _keys(fragment: Fragment) -> tuple[Int32, ...]:
    return tuple(fragment.key + offset for offset in fragment.offsets)


def _score_mod(args: ModArgs, plan: Any) -> tuple[Lowering, Arguments] | None:
    return _function(args, plan.features.mods.score_mod, plan, 0, 0)


def _mask_mod(args: ModArgs, plan: Any) -> tuple[Lowering, Arguments] | None:
    before = plan.features.mods.score_mod
    program = lower(before, False).program if before else None
    skipped = (0, 0) if program is None else (len(program.tensors), len(program.scalars))
    return _function(args, plan.features.mods.mask_mod, plan, *skipped)


def _function(
    args: ModArgs, text: str, plan: Any, tensors: int, scalars: int
) -> tuple[Lowering, Arguments] | None:
    """A program and its own among the arguments of all."""
    if not text:
        return None
    lowering = lower(text, plan.pack_gqa > 1)
    program = lowering.program
    own_tensors = (args.tensors or ())[tensors : tensors + len(program.tensors)]
    own_scalars = (args.scalars or ())[scalars : scalars + len(program.scalars)]
    return lowering, Arguments(tuple(own_tensors), tuple(own_scalars))
