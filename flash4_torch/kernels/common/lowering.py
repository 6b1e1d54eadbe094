"""What a kernel computes of a program, and once for what: equal nodes once, each as seldom as possible.

Nothing here needs a compiler; `programs` makes expressions of it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from ...flex import table
from ...flex.program import Derivative, Gather, Node, Program, Ref, parse, parse_derivative, refs
from .cheaper import cheaper
from .levels import Layout, Level, first_lane, joint, levels_of

__all__ = [
    "Layout",
    "Level",
    "Lowering",
    "constant",
    "is_integer",
    "joint",
    "limits",
    "lower",
    "lower_derivative",
]

MOST_NUMBERS = 1024
"""Numbers that a program computes for each score, at most: they are code for every score of a tile."""
DTYPES = frozenset(
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
)
LIBRARY = (table.FLOATING - {"sqrt", "rsqrt", "reciprocal"}) | {"atan2"}
"""Functions that kernels have in float32."""
POWERS = frozenset([0.0, 0.5, 1.0, 2.0, 3.0, -0.5, -1.0, -2.0])
"""Exponents of powers that are roots, products and quotients."""


class Ramp(NamedTuple):
    """A value that is linear in the column's position."""

    number: int
    factor: int
    """The number of the value that a step of one column adds."""
    is_distance: bool
    """Whether it is 0 where the column is the row; else where the column is 0."""


class Lowering(NamedTuple):
    """A program without equal nodes, and what each of its values depends on."""

    program: Program
    levels: tuple[Level, ...]
    layout: Layout = Layout()
    gathers: tuple[Gather, ...] = ()
    """A derivative's."""

    @property
    def first_lane(self) -> int:
        """The number of b; h, q_idx and kv_idx follow."""
        return first_lane(self.program)

    @property
    def row(self) -> int:
        """The number of the rows' position."""
        return self.first_lane + (3 if self.layout.rows_are_keys else 2)

    @property
    def column(self) -> int:
        return self.first_lane + (2 if self.layout.rows_are_keys else 3)

    @property
    def distance(self) -> int | None:
        """The number of the columns' positions minus the rows', if the program needs it."""
        nodes = enumerate(self.program.nodes, self.program.first_node)
        return next((number for number, node in nodes if node.op == "distance"), None)

    def ramps(self, level: Level) -> list[Ramp]:
        """Products with a position or a distance that are made for each `level`."""
        found = ((number, self.program.node(Ref(number))) for number in self.nodes(level))
        return [
            Ramp(number, node.args[0].value, len(node.args) == 3)
            for number, node in found
            if node is not None and node.op == "ramp"
        ]

    @property
    def reads_score(self) -> bool:
        """Whether a derivative depends on the score, and not on its place alone."""
        return self.program.reads(0)

    @property
    def is_identity(self) -> bool:
        """Whether a derivative leaves the gradient as it is, and adds to no captured tensor's."""
        return not self.gathers and self.program.outputs[0].value == len(self.program.inputs) - 1

    def level_of(self, node: Node) -> Level:
        """What the place that a gather reads depends on."""
        return joint({self.levels[ref.value] for ref in refs(node.args)})

    def nodes(self, level: Level) -> list[int]:
        """Numbers of the nodes that are computed once for each `level`."""
        first = self.program.first_node
        return [first + i for i in range(len(self.program.nodes)) if self.levels[first + i] == level]

    def kept(self, level: Level) -> list[int]:
        """Numbers of the values of `level` that are read at later levels, or are results; no tensors."""
        program = self.program
        first, needed = program.first_node, {ref.value for ref in program.outputs}
        for i, node in enumerate(program.nodes):
            if self.levels[first + i] > level:
                needed |= {ref.value for ref in refs(node.args)}
        tensors = range(program.first_tensor, program.first_scalar)
        return [n for n in sorted(needed) if self.levels[n] == level and n not in tensors]

    def shape(self, number: int) -> tuple[int, ...]:
        node = self.program.node(Ref(number))
        return () if node is None else node.shape

    def dtype(self, number: int) -> str:
        program = self.program
        if number < program.first_tensor:
            return program.inputs[number]
        if number < program.first_scalar:
            return program.tensors[number - program.first_tensor].dtype
        if number < program.first_node:
            return program.scalars[number - program.first_scalar]
        return program.nodes[number - program.first_node].dtype


@lru_cache(maxsize=256)
def lower(text: str, layout: Layout) -> Lowering:
    """The lowering of a program."""
    return _lowered(Derivative(parse(text), ()), layout)


@lru_cache(maxsize=256)
def lower_derivative(text: str, layout: Layout) -> Lowering:
    """The lowering of a derivative."""
    return _lowered(parse_derivative(text), layout)


def _lowered(derivative: Derivative, layout: Layout) -> Lowering:
    program, gathers = cheaper(_without_copies(derivative), layout)
    return Lowering(program, levels_of(program, layout), layout, gathers)


def _without_copies(derivative: Derivative) -> Derivative:
    """The program with each node once, and without nodes that change nothing."""
    program = derivative.program
    first = program.first_node
    number = {n: n for n in range(first)}
    made: dict[tuple[str, Node], int] = {}
    """Keys have what is written, too, which tells a bool from the number that it equals."""

    def renamed(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return Ref(number[arg.value])
        return tuple(map(renamed, arg)) if isinstance(arg, tuple) else arg

    for i, node in enumerate(program.nodes):
        own = node._replace(args=renamed(node.args))
        if node.op == "detach":
            number[first + i] = own.args[0].value
        else:
            number[first + i] = made.setdefault((repr(own), own), first + len(made))
    nodes = tuple(node for _, node in made)
    gathers = (Gather(tensor, node._replace(args=renamed(node.args))) for tensor, node in derivative.gathers)
    return Derivative(program._replace(nodes=nodes, outputs=renamed(program.outputs)), tuple(gathers))


def limits(name: str, program: Program) -> list[str]:
    """Why kernels cannot compute a program, whose function has that name."""
    why = []
    numbers = sum(math.prod(node.shape) for node in program.nodes)
    if numbers > MOST_NUMBERS:
        why.append(f"{name} computes {numbers} numbers for each score, and kernels compute {MOST_NUMBERS}")
    dtypes = {*program.inputs, *program.scalars, *(t.dtype for t in program.tensors)}
    dtypes |= {node.dtype for node in program.nodes}
    if unknown := sorted(dtypes - DTYPES):
        why.append(f"{name} has values of {', '.join(unknown)}, and kernels have {', '.join(sorted(DTYPES))}")
    for node in program.nodes:
        operand = next((_dtype_of(program, ref) for ref in refs(node.args)), node.dtype)
        is_function = node.op in LIBRARY or (
            node.op == "pow" and constant(program, node.args[1]) not in POWERS
        )
        if operand == "float64" and is_function:
            why.append(f"{name} computes {node.op} in float64, and kernels do so in float32")
        if node.op == "pow" and is_integer(node.dtype) and not _is_small_power(program, node):
            why.append(f"{name} computes an integer's power, whose exponent must be known and from 0 to 64")
    return why


def _dtype_of(program: Program, ref: Ref) -> str:
    return Lowering(program, ()).dtype(ref.value)


def is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _is_small_power(program: Program, node: Node) -> bool:
    exponent = constant(program, node.args[1])
    return exponent is not None and exponent in range(65)


def constant(program: Program, ref: Ref) -> Any:
    """The number that a constant node has, None for anything else."""
    node = program.node(ref)
    return node.args[0] if node is not None and node.op == "constant" else None
