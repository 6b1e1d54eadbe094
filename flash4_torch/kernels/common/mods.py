"""score_mod, mask_mod and block masks on the device: blocks that a tile visits, and what is done to scores.

A role that holds scores does

    own = rows_of(mods, plan, batch, heads, positions)  # once a tile
    modify(mods, plan, own, fragment)                   # scaled, capped scores, in natural units
    mask(mods, plan, own, n, fragment)                  # where the block may be partial

and in the backward, where rows are keys,

    own = derivative_rows(mods, plan, batch, head, positions)
    differentiate(mods, plan, own, scores, fragment, mates)  # gradients of modified scores
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import if_generate

from ...flex import ramp as ramps
from . import attn_mask, programs
from .attn_mask import AnyContext, Mask, MaskArgs, within
from .band import Band, Stack
from .captured import Additions
from .fragment import Fragment, Mates
from .host import any_sizes, compact, strided
from .lowering import Layout, Lowering, constant, lower, lower_derivative
from .mask_tables import MaskPlan
from .programs import Arguments, Columns, Known
from .scores import LOG2E

_BOUNDS: dict[str, Callable[[], cute.Tensor | Stack | None]] = {
    "": lambda: None,
    "table": lambda: strided(Int32, 3),
    "stacked": lambda: Stack(Int32(1), Int32(1), Uint32(1), Int32(1)),
}
"""What stands for any bounds of rows."""
EMPTY, PARTIAL, FULL = 0, 1, 2
"""States of a block mask's blocks."""


class BlockArgs(NamedTuple):
    """A block mask, as a kernel receives it."""

    visible: cute.Tensor
    """(Bm, HB, MB, NB) int32: `mask_tables`'s blocks, of the kernel's tiles."""
    rank: cute.Tensor
    """(Bm, HB, MB, NB + 1) int32: likewise."""
    states: cute.Tensor
    """(Bm, Hm, rows, columns) uint8: the state of each of the mask's own blocks. In the backward it is
    transposed: rows are keys."""
    rows: Int32
    columns: Int32
    """Positions of a block."""


class ModArgs(NamedTuple):
    """What a launch takes for the mods of `Features`."""

    tensors: tuple[cute.Tensor, ...] | None
    """Those of score_mod, then of mask_mod; None if there are none."""
    scalars: tuple[Any, ...] | None
    blocks: BlockArgs | None
    totals: tuple[cute.Tensor, ...] | None = None
    """Backward: gradients of `Derivative.tensors`, which are added to: float32, or (.., FIELDS) int64, exact
    sums (`exact_sums`)."""
    bounds: cute.Tensor | Stack | None = None
    """(B or 1, rows, 2) int32: the first and the last column that each row sees; neither ever decreases. Or
    the entries that rows see."""


class Ramp(NamedTuple):
    """A ramp in a thread's rows, in base 2: each field has a number for each row."""

    steps: tuple[Float32, ...]
    """What a step of one column adds."""
    of_distance: tuple[Float32 | None, ...]
    """Factors of the column's position minus the row's; None is 0."""
    of_column: tuple[Float32 | None, ...]
    rest: tuple[Float32 | None, ...]
    positions: tuple[Float32, ...]
    """Those of rows. As whole numbers they made ptxas serialise the forward's wgmmas (ptxas.md, P2)."""


class Rows(NamedTuple):
    """What a thread keeps of its rows."""

    score: programs.Tile | None
    mask: programs.Tile | None
    states: tuple[cute.Tensor, ...]
    """(columns,) for each row, with block lists."""
    ramp: Ramp | None
    """What stands for score_mod if that is a ramp."""
    are_there: tuple[Boolean, ...]
    """Whether any thread of the warp has a row there, for each of a thread's; empty where nobody asks."""


def example_args(plan: Any) -> ModArgs:
    """Arguments that stand for any others when a kernel is compiled."""
    tensors: list[cute.Tensor] = []
    scalars: list[Any] = []
    for text in (plan.features.mods.score_mod, plan.features.mods.mask_mod):
        if text:
            program = lower(text, Layout()).program
            tensors += [strided(programs.STORED[t.dtype], max(t.rank, 1)) for t in program.tensors]
            scalars += [programs.PASSED[dtype](0) for dtype in program.scalars]
    blocks = None
    if plan.features.mods.blocks:
        visible, rank = (compact(Int32, any_sizes(4)) for _ in range(2))
        blocks = BlockArgs(visible, rank, strided(cutlass.Uint8, 4), Int32(1), Int32(1))
    totals = None
    if text := plan.features.mods.derivative:
        lowering = lower_derivative(text, plan.layout)
        ranks = [lowering.program.tensors[i].rank for i in sorted({g.tensor for g in lowering.gathers})]
        is_exact = plan.features.deterministic
        dtype, fields = (Int64, 1) if is_exact else (Float32, 0)
        totals = tuple(strided(dtype, max(rank, 1) + fields) for rank in ranks) or None
    bounds = _BOUNDS[plan.features.mods.bounds]()
    return ModArgs(tuple(tensors) or None, tuple(scalars) or None, blocks, totals, bounds)


def with_mask(ctx: AnyContext, args: MaskArgs | ModArgs | None) -> AnyContext:
    """The context of one role, with attn_mask, or with score_mod, mask_mod and a block mask."""
    if any(ctx.plan.features.mods):
        return replace(ctx, mods=args, mask=visited(args, ctx.plan.mask))
    return attn_mask.with_mask(ctx, args)


def visited(args: ModArgs | None, plan: MaskPlan) -> Mask | None:
    """The table of the blocks that tiles visit, None if they visit all."""
    if args is None or args.blocks is None:
        return None
    return Mask(plan, args.blocks.states, None, args.blocks.visible, args.blocks.rank)


def band_of(args: ModArgs, batch: Int32, columns: Int32) -> Band:
    """The band of a batch entry by the bounds of its rows, which are in a table."""
    table = args.bounds[within(batch, args.bounds.shape[0]), None, None]
    return Band(columns, Int32(0), Int32(0), table)


def rows_of(
    args: ModArgs,
    plan: Any,
    batch: Int32,
    heads: tuple[Int32, ...],
    positions: tuple[Int32, ...],
    Sq: Int32 | None = None,
) -> Rows:
    """A thread's rows, by their query heads and positions, in ascending order. Sq: None in the backward."""
    own = [
        None if found is None else programs.begin(*found, batch, heads, positions)
        for found in (None if plan.features.mods.ramp else _score_mod(args, plan), _mask_mod(args, plan))
    ]
    ramp = _ramp(args, plan, batch, heads, positions) if plan.features.mods.ramp else None
    states: tuple[cute.Tensor, ...] = ()
    if args.blocks is not None:
        table = args.blocks.states
        b = within(batch, table.shape[0])
        states = tuple(
            table[b, within(h, table.shape[1]), within(i // args.blocks.rows, table.shape[2]), None]
            for h, i in zip(heads, positions, strict=True)
        )
    return Rows(own[0], own[1], states, ramp, _are_there(plan, positions, Sq))


def _are_there(plan: Any, positions: tuple[Int32, ...], Sq: Int32 | None) -> tuple[Boolean, ...]:
    """Splits serve few rows, of which most warps of a tile have none, and others the first of each thread: a
    table with a number for each score would be read for all 64.
    """
    if Sq is None or not plan.features.splits:
        return ()
    return tuple(cute.arch.vote_any_sync(position < Sq) for position in positions)


def _where_rows_are(own: Rows, change: Callable[[], None]) -> None:
    """Change scores where the warp has rows."""
    if own.are_there:
        if_generate(own.are_there[0], change)
    else:
        change()


def _ramp(
    args: ModArgs, plan: Any, batch: Int32, heads: tuple[Int32, ...], positions: tuple[Int32, ...]
) -> Ramp:
    text = ramps.of(plan.features.mods.score_mod)
    lowering, arguments = _with_arguments(args, lower(text, plan.layout), 0, 0)
    tile, program = programs.begin(lowering, arguments, batch, heads, positions), lowering.program
    rows = []
    for known, position in zip(programs.known_of_rows(lowering, tile), positions, strict=True):
        distance, key, query, rest = (
            None if constant(program, ref) == 0.0 else known[ref.value][0] * LOG2E for ref in program.outputs
        )
        if plan.layout.rows_are_keys:
            # The distance is the column's position minus the row's.
            distance, row, column = None if distance is None else -distance, key, query
        else:
            row, column = query, key
        place = position.to(Float32)
        rest = _sum(rest, None if row is None else row * place)
        step = _sum(distance, column)
        rows.append((Float32(0.0) if step is None else step, distance, column, rest, place))
    return Ramp(*zip(*rows, strict=True))


def _sum(x: Float32 | None, y: Float32 | None) -> Float32 | None:
    if x is None or y is None:
        return y if x is None else x
    return x + y


def bases_of(ramp: Ramp, first: Int32) -> tuple[Float32, ...]:
    """What a ramp adds to the rows' scores at column `first`, in base 2."""
    place, bases = first.to(Float32), []
    for distance, column, rest, position in zip(*ramp[1:], strict=True):
        base = None if distance is None else distance * (place - position)
        base = _sum(_sum(base, None if column is None else column * place), rest)
        bases.append(Float32(0.0) if base is None else base)
    return tuple(bases)


def step_and_bases(own: Rows, first: Int32) -> tuple[Float32, tuple[Float32, ...]]:
    """What a ramp adds to rows of one head from column to column, and to each at column `first`, in base 2.

    In the backward, where a column's lse is subtracted anyway.
    """
    return own.ramp.steps[0], bases_of(own.ramp, first)


def step_of(own: Rows, scale: Float32, row: int) -> Float32:
    """What a ramp adds to a row's scores from column to column, before they are multiplied by `scale`."""
    return own.ramp.steps[row] * cute.arch.rcp_approx(scale)


def climb(own: Rows, scale: Float32, fragment: Fragment) -> tuple[Float32, ...]:
    """Add to scores what a ramp adds from column to column, and return what is left to add to the rows' ones
    when they are scaled, in base 2; () without a ramp.

    scale: the factor by which these scores are multiplied to have them in base 2.
    """
    if own.ramp is None:
        return ()
    scores = fragment.values
    for r in range(len(own.ramp.steps)):
        own_step = step_of(own, scale, r)
        for c, offset in enumerate(fragment.offsets):
            scores[r, c] = scores[r, c] + own_step * Float32(offset)
    return bases_of(own.ramp, fragment.key)


def modify(args: ModArgs, plan: Any, own: Rows, fragment: Fragment, end: Int32 | None = None) -> None:
    """Apply score_mod to scores in natural units, in place; hide columns from position `end` on."""
    found = _score_mod(args, plan)
    if found is None or plan.features.mods.ramp:
        return
    scores, columns = fragment.values, _columns(fragment)

    def put(r: int, c: int, result: Any) -> None:
        result = result.to(Float32)
        is_there = None if end is None else columns.first + columns.offsets[c] < end
        scores[r, c] = result if is_there is None else cutlass.select_(is_there, result, -Float32.inf)

    def apply(rows: programs.Tile) -> None:
        programs.apply(*found, rows, columns, lambda r, c: scores[r, c], put)

    def apply_there() -> None:
        if len(own.are_there) > 1:
            # Of a few rows most threads have the first one alone.
            first = own.score._replace(rows=own.score.rows[:1])
            if_generate(own.are_there[1], lambda: apply(own.score), lambda: apply(first))
        else:
            apply(own.score)

    _where_rows_are(own, apply_there)


def mask(args: ModArgs, plan: Any, own: Rows, first: Int32, fragment: Fragment) -> None:
    """Hide what mask_mod and the block mask hide; `first` is the first column of the kernel's block."""
    found, rows, columns = _mask_mod(args, plan), len(fragment.rows), _columns(fragment)
    scores, blocks = fragment.values, plan.features.mods.blocks
    shared = ()
    if blocks == "rows":
        column = within(first // args.blocks.columns, args.blocks.states.shape[3])
        shared = tuple(row[column].to(Int32) for row in own.states)

    def state(r: int, c: int) -> Int32:
        if blocks == "rows":
            return shared[r]
        position = columns.first + columns.offsets[c]
        column = within(position // args.blocks.columns, args.blocks.states.shape[3])
        return own.states[r][column].to(Int32)

    def put(r: int, c: int, shown: Boolean | None) -> None:
        if blocks:
            found = state(r, c)
            listed = found != EMPTY
            shown = listed if shown is None else listed & (shown | (found == FULL))
        scores[r, c] = cutlass.select_(shown, scores[r, c], -Float32.inf)

    def show(r: int, c: int, shown: Boolean) -> None:
        scores[r, c] = cutlass.select_(shown, scores[r, c], -Float32.inf)

    def apply(put: Callable[[int, int, Any], None]) -> None:
        programs.apply(*found, own.mask, columns, lambda r, c: None, put)

    if found is not None and blocks == "rows":
        # Nearly always, and then mask_mod alone decides, without a state beside each score.
        is_partial = functools.reduce(operator.and_, (x == PARTIAL for x in shared))
        one = cute.arch.vote_all_sync(is_partial)
        _where_rows_are(own, lambda: if_generate(one, lambda: apply(show), lambda: apply(put)))
    elif found is not None:
        _where_rows_are(own, lambda: apply(put))
    elif blocks:
        for c in range(len(columns.offsets)):
            for r in range(rows):
                put(r, c, None)


def derivative_rows(
    args: ModArgs, plan: Any, batch: Int32, head: Int32, positions: tuple[Int32, ...]
) -> programs.Tile:
    """What the derivative needs of a thread's rows."""
    return programs.begin(*_derivative(args, plan), batch, (head,) * len(positions), positions)


def differentiate(
    args: ModArgs, plan: Any, own: programs.Tile, scores: cute.Tensor | None, fragment: Fragment, mates: Mates
) -> None:
    """Turn gradients of modified scores into those of scores before, in place; add those of captured tensors.

    scores: scores before score_mod, like the fragment's values; None if the derivative does not read them.
    """
    lowering, arguments = _derivative(args, plan)
    values, rows, result = fragment.values, len(fragment.rows), lowering.program.outputs[0]
    tensors = sorted({gather.tensor for gather in lowering.gathers})
    additions = [
        Additions(lowering, gather, output, args.totals[tensors.index(gather.tensor)], rows, mates)
        for gather, output in zip(lowering.gathers, lowering.program.outputs[1:], strict=False)
    ]

    def given(r: int, c: int) -> Known:
        known = {len(lowering.program.inputs) - 1: (values[r, c],)}
        return known if scores is None else {0: (scores[r, c],), **known}

    for r, c, known in programs.scores(lowering, arguments, own, _columns(fragment), given):
        # All gradients are 0 where this one is, as where a score is hidden: a derivative may be NaN there.
        keeps = values[r, c] != Float32(0.0)
        for each in additions:
            each.take(r, known, keeps)
        values[r, c] = cutlass.select_(keeps, known[result.value][0].to(Float32), Float32(0.0))
    for each in additions:
        each.finish()


def _columns(fragment: Fragment) -> Columns:
    return Columns(fragment.key, fragment.offsets)


def _score_mod(args: ModArgs, plan: Any) -> tuple[Lowering, Arguments] | None:
    return _function(args, plan.features.mods.score_mod, plan, 0, 0)


def _mask_mod(args: ModArgs, plan: Any) -> tuple[Lowering, Arguments] | None:
    before = plan.features.mods.score_mod
    program = lower(before, Layout()).program if before else None
    skipped = (0, 0) if program is None else (len(program.tensors), len(program.scalars))
    return _function(args, plan.features.mods.mask_mod, plan, *skipped)


def _function(
    args: ModArgs, text: str, plan: Any, tensors: int, scalars: int
) -> tuple[Lowering, Arguments] | None:
    """A program and its own among the arguments of all."""
    if not text:
        return None
    return _with_arguments(args, lower(text, plan.layout), tensors, scalars)


def _derivative(args: ModArgs, plan: Any) -> tuple[Lowering, Arguments]:
    """score_mod's derivative, whose tensors and scalars are score_mod's."""
    return _with_arguments(args, lower_derivative(plan.features.mods.derivative, plan.layout), 0, 0)


def _with_arguments(
    args: ModArgs, lowering: Lowering, tensors: int, scalars: int
) -> tuple[Lowering, Arguments]:
    program = lowering.program
    own_tensors = (args.tensors or ())[tensors : tensors + len(program.tensors)]
    own_scalars = (args.scalars or ())[scalars : scalars + len(program.scalars)]
    return lowering, Arguments(tuple(own_tensors), tuple(own_scalars))
