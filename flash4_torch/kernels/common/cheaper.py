"""Programs in operations that cost a GPU less, with results within the rounding of torch's own kernels.

distance    (row, column): the column's position minus the row's, float32. A thread converts one
            difference for a row of its block, and adds a constant for each column
ramp        (x, row, column) or (x, column): x times that distance, or times the column's position, where x is
            of the tile or the row: a product for a row of a block, and an FMA for each column
quotient    (x, y): x / y in float32, to two units in the last place, as Triton divides
divided_by  (x, y, reciprocal of y): x / y in float32 as it would be rounded, without a branch
divider     (y, sign): the numbers by which an int32 y divides without a division, an array of `DIVIDER`
size_by     (x, divider): |x / y| of an int32 x >= 0, rounded down, or up if sign is negative
..._by      (x, y, divider): an int32 x divided by y, as the operation of that name
within      (x, offset, width): whether x + offset, as an unsigned number, is less than width: one addition
            and one comparison for the distance of a column's number from a row's
"""

from __future__ import annotations

from typing import Any

from ...flex import table
from ...flex.program import Derivative, Node, Program, Ref, refs
from .levels import Layout, Level, first_lane, joint, levels_of

_JUMPS = (
    table.COMPARISONS
    | table.LOGIC
    | {"floor", "ceil", "round", "trunc", "sign", "div_floor", "div_trunc", "remainder", "fmod"}
)
"""Operations whose result jumps where an operand has a certain value, so that the last bit matters."""


DIVIDER = (4,)
"""The shape of a divider: a multiplier, a shift, and the two words of what `size_by` adds to a product."""
_DIVISIONS = frozenset(["div_floor", "div_trunc", "remainder", "fmod"])
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def cheaper(derivative: Derivative, layout: Layout) -> Derivative:
    """The same with some nodes replaced, and those left out that nothing needs then."""
    return _needed(_Rewriting(derivative, layout).result())


class _Rewriting:
    def __init__(self, derivative: Derivative, layout: Layout) -> None:
        self._old, program = derivative, derivative.program
        self._program, self._jumps = program, _exact(program)
        self._first = program.first_node
        self._nodes: list[Node] = []
        self._levels = list(levels_of(program, layout)[: self._first])
        query = Ref(first_lane(program) + 2)
        key = Ref(query.value + 1)
        self._row, self._column = (key, query) if layout.rows_are_keys else (query, key)
        self._new = {n: Ref(n) for n in range(self._first)}
        self._sized: dict[Ref, tuple[Ref, Ref]] = {}
        """The size and the sign, a number of the tile or the row, of quotients of positions."""

    def result(self) -> Derivative:
        for number, node in enumerate(self._program.nodes, self._first):
            own = node._replace(args=self._renamed(node.args))
            self._new[number] = self._replaced(number, own) or self._add(own)
        gathers = tuple(
            gather._replace(node=gather.node._replace(args=self._renamed(gather.node.args)))
            for gather in self._old.gathers
        )
        outputs = self._renamed(self._program.outputs)
        return Derivative(self._program._replace(nodes=tuple(self._nodes), outputs=outputs), gathers)

    def _renamed(self, arg: Any) -> Any:
        if isinstance(arg, Ref):
            return self._new[arg.value]
        return tuple(map(self._renamed, arg)) if isinstance(arg, tuple) else arg

    def _add(self, node: Node) -> Ref:
        """The number of a node, which may be there already."""
        # A bool equals a number: what is written tells them apart.
        for i, known in enumerate(self._nodes):
            if known == node and repr(known) == repr(node):
                return Ref(self._first + i)
        self._nodes.append(node)
        self._levels.append(joint({self._levels[ref.value] for ref in refs(node.args)}))
        return Ref(self._first + len(self._nodes) - 1)

    def _made(self, op: str, *args: Any, dtype: str = "float32") -> Ref:
        return self._add(Node(op, args, dtype))

    def _whole(self, op: str, *args: Any) -> Ref:
        return self._made(op, *args, dtype="int32")

    def _node(self, ref: Ref) -> Node | None:
        return self._nodes[ref.value - self._first] if ref.value >= self._first else None

    def _replaced(self, number: int, node: Node) -> Ref | None:
        if node.shape:
            return None
        if node.op in _DIVISIONS and node.dtype == "int32":
            return self._divided_whole(node.op, *node.args)
        if node.op in table.COMPARISONS:
            return self._compared(node.op, *node.args)
        if node.dtype != "float32":
            return None
        if node.op == "convert":
            return self._distance(node.args[0])
        if node.op == "mul" and number not in self._jumps:
            return self._ramp(*node.args) or self._ramp(*reversed(node.args))
        if node.op == "div":
            return self._divided(*node.args, is_exact=number in self._jumps)
        if node.op == "reciprocal" and number not in self._jumps and self._is_often(node.args[0]):
            return self._made("quotient", self._made("constant", 1.0), node.args[0])
        return None

    def _distance(self, x: Ref) -> Ref | None:
        """An int32 as a float32, if it is a distance of positions, negative, or without its sign."""
        node = self._node(x)
        if node is None or node.dtype != "int32" or node.shape:
            return None
        if node.op == "sub" and node.args == (self._column, self._row):
            return self._made("distance", self._row, self._column)
        if node.op == "sub" and node.args == (self._row, self._column):
            return self._made("neg", self._made("distance", self._row, self._column))
        if node.op in ("abs", "neg"):
            inner = self._distance(node.args[0])
            return None if inner is None else self._made(node.op, inner)
        return None

    def _ramp(self, x: Ref, y: Ref) -> Ref | None:
        """x * y, if x is of the tile or the row, and y is linear in the column's position."""
        node = self._node(y)
        if node is None or self._levels[x.value] > Level.ROW:
            return None
        if node.op == "neg":
            return self._ramp(self._made("neg", x), node.args[0])
        if node.op == "ramp":
            factor, *places = node.args
            return self._made("ramp", self._made("mul", factor, x), *places)
        if node.op == "distance":
            return self._made("ramp", x, *node.args)
        is_position = node.op == "convert" and node.dtype == "float32" and node.args == (self._column,)
        return self._made("ramp", x, self._column) if is_position else None

    def _divided(self, x: Ref, y: Ref, *, is_exact: bool) -> Ref | None:
        node = self._node(x)
        if node is not None and node.shape:
            return None
        if self._is_often(y):
            return None if is_exact else self._made("quotient", x, y)
        if self._levels[x.value] <= self._levels[y.value]:
            return None
        reciprocal = self._made("reciprocal", y)
        if is_exact:
            return self._made("divided_by", x, y, reciprocal)
        return self._ramp(reciprocal, x) or self._made("mul", x, reciprocal)

    def _divided_whole(self, op: str, x: Ref, y: Ref) -> Ref | None:
        """A division by a number of the tile or the row, of what is computed in each block."""
        if self._is_array(x) or self._is_array(y) or self._is_often(y) or not self._is_often(x):
            return None
        own = self._sign(y)
        if op not in ("div_floor", "remainder") or (x != self._column and x not in self._sized):
            return self._whole(f"{op}_by", x, y, self._divider(y, own))
        # Without the steps that a number of unknown sign needs.
        size, sign = self._sized.get(x, (x, self._whole("constant", 1)))
        both = own if x == self._column else self._whole("mul", sign, own)
        quotient = self._whole("size_by", size, self._divider(y, both))
        if op == "div_floor":
            found = self._whole("mul", quotient, both)
            self._sized[found] = quotient, both
            return found
        step = self._whole("mul", self._whole("mul", y, own), self._whole("neg", sign))
        return self._whole("add", x, self._whole("mul", quotient, step))

    def _divider(self, y: Ref, sign: Ref) -> Ref:
        return self._add(Node("divider", (y, sign), "int32", DIVIDER))

    def _sign(self, y: Ref) -> Ref:
        """-1 of a negative number, 1 of any other one."""
        node, one = self._node(y), self._whole("constant", 1)
        if node is not None and node.op == "constant":
            return one if node.args[0] >= 0 else self._whole("constant", -1)
        high = self._whole("bitwise_right_shift", y, self._whole("constant", 31))
        return self._whole("bitwise_or", high, one)

    def _compared(self, op: str, x: Ref, y: Ref) -> Ref | None:
        if op in ("eq", "ne"):
            return self._congruent(op, x, y) or self._congruent(op, y, x)
        return self._near(op, x, y) or self._near(_SWAPPED[op], y, x)

    def _congruent(self, op: str, x: Ref, wanted: Ref) -> Ref | None:
        """Whether a distance of positions has a certain remainder: whether the column's has one of the row's.

        Positions are not negative, so that their distance is exact.
        """
        node = self._node(x)
        if node is None or node.op not in ("remainder", "remainder_by") or self._is_often(wanted):
            return None
        difference, y = self._node(node.args[0]), node.args[1]
        if difference is None or difference.op != "sub" or difference.dtype != "int32" or self._is_often(y):
            return None
        if difference.args == (self._row, self._column):
            own = self._whole("sub", self._whole("remainder", self._row, y), wanted)
        elif difference.args == (self._column, self._row):
            own = self._whole("add", self._whole("remainder", self._row, y), wanted)
        else:
            return None
        # No remainder is the divisor itself.
        is_one = self._made("eq", self._whole("remainder", wanted, y), wanted, dtype="bool")
        own = self._whole("where", is_one, self._whole("remainder", own, y), y)
        of_column = self._divided_whole("remainder", self._column, y)
        return self._made(op, of_column, own, dtype="bool")

    def _near(self, op: str, x: Ref, bound: Ref) -> Ref | None:
        """A distance in int32 beside a bound of the tile or the row; that of -2^31 counts as 2^31."""
        node = self._node(x)
        if node is None or node.op != "abs" or node.dtype != "int32" or node.shape or self._is_often(bound):
            return None
        difference = self._node(node.args[0])
        if difference is None or difference.op != "sub" or any(map(self._is_array, difference.args)):
            return None
        near, far = sorted(difference.args, key=self._is_often)
        if self._is_often(near) or not self._is_often(far):
            return None
        is_below = op in ("lt", "ge")
        one, zero = self._whole("constant", 1), self._whole("constant", 0)
        reach = self._whole("sub", bound, one) if is_below else bound
        is_none = self._made("le" if is_below else "lt", bound, zero, dtype="bool")
        width = self._whole("add", self._whole("add", reach, reach), one)
        width = self._whole("where", is_none, zero, width)
        found = self._made("within", far, self._whole("sub", reach, near), width, dtype="bool")
        return found if op in ("le", "lt") else self._made("logical_not", found, dtype="bool")

    def _is_array(self, x: Ref) -> bool:
        node = self._node(x)
        return node is not None and bool(node.shape)

    def _is_often(self, x: Ref) -> bool:
        """Whether a value is computed in each block, where a division's branch is in the way."""
        return self._levels[x.value] >= Level.COLUMN


def _exact(program: Program) -> set[int]:
    """Numbers of the values whose last bit may decide on something."""
    found: set[int] = set()
    for number, node in reversed(list(enumerate(program.nodes, program.first_node))):
        to_integer = node.op == "convert" and not node.dtype.startswith(("float", "bfloat"))
        if node.op in _JUMPS or to_integer or number in found:
            found |= {ref.value for ref in refs(node.args)}
        elif node.op == "where":
            found.add(node.args[0].value)
    return found


def _needed(derivative: Derivative) -> Derivative:
    """The program without nodes that no output needs."""
    program, first = derivative.program, derivative.program.first_node
    roots = (*program.outputs, *(g.node.args for g in derivative.gathers))
    needed = {ref.value for ref in refs(roots)}
    for number, node in reversed(list(enumerate(program.nodes, first))):
        if number in needed:
            needed |= {ref.value for ref in refs(node.args)}
    kept = [n for n in range(first, first + len(program.nodes)) if n in needed]
    number_of = {n: n for n in range(first)} | {n: first + i for i, n in enumerate(kept)}

    def renamed(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return Ref(number_of[arg.value])
        return tuple(map(renamed, arg)) if isinstance(arg, tuple) else arg

    nodes = tuple(node._replace(args=renamed(node.args)) for node in (program.nodes[n - first] for n in kept))
    gathers = tuple(g._replace(node=g.node._replace(args=renamed(g.node.args))) for g in derivative.gathers)
    return Derivative(program._replace(nodes=nodes, outputs=renamed(program.outputs)), gathers)
