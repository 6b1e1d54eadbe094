"""What a program's values depend on: a tile alone, a row of it, a column, or a score."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ...flex.program import Program, refs


class Level(IntEnum):
    """What a value is computed once for."""

    TILE = 0
    ROW = 1
    COLUMN = 2
    SCORE = 3


class Layout(NamedTuple):
    """What rows and columns of a tile of scores are."""

    packed: bool = False
    """Rows may be of several heads."""
    rows_are_keys: bool = False
    """Rows are keys and columns are queries, as in the backward; else it is the other way round."""


def joint(levels: set[Level]) -> Level:
    """The level of what depends on values of these levels."""
    return Level.SCORE if {Level.ROW, Level.COLUMN} <= levels else max(levels, default=Level.TILE)


def first_lane(program: Program) -> int:
    """The number of b; h, q_idx and kv_idx follow."""
    return min(len(program.inputs) - 4, 1)


def levels_of(program: Program, layout: Layout) -> tuple[Level, ...]:
    """The level of each value, by number."""
    position, other = (Level.COLUMN, Level.ROW) if layout.rows_are_keys else (Level.ROW, Level.COLUMN)
    lanes = [Level.TILE, Level.ROW if layout.packed else Level.TILE, position, other]
    levels = [Level.SCORE] * first_lane(program) + lanes
    levels += [Level.SCORE] * (len(program.inputs) - len(levels))
    levels += [Level.TILE] * (len(program.tensors) + len(program.scalars))
    for node in program.nodes:
        levels.append(joint({levels[ref.value] for ref in refs(node.args)}))
    return tuple(levels)
