"""Score mods that add a ramp: what is linear in the positions of a key and its query, like ALiBi.

score + distance * (kv_idx - q_idx) + key * kv_idx + query * q_idx + rest, whose four coefficients depend on
b, h and captured values alone. Kernels add what differs within a row by one FMA a score, and the rest to the
softmax's own numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .program import Node, Program, Ref, parse, refs

COEFFICIENTS = ("distance", "key", "query", "rest")
"""What the outputs of a ramp's program are, each float32."""


@lru_cache(maxsize=256)
def of(text: str) -> str:
    """The program of a ramp's four coefficients, with the inputs of score_mod's; "" if it adds no ramp."""
    program = parse(text)
    finder = _Finder(program)
    form = finder.value(program.outputs[0])
    if not isinstance(form, _Form) or not form.has_score:
        return ""
    outputs = tuple(finder.zero() if x is None else x for x in form.coefficients)
    return program._replace(nodes=tuple(finder.nodes), outputs=outputs).text()


@lru_cache(maxsize=256)
def depends_on_distance_alone(text: str) -> bool:
    """Whether the coefficients of key and query of such a program are 0."""
    program = parse(text)
    nodes = [program.node(program.outputs[COEFFICIENTS.index(name)]) for name in ("key", "query")]
    return all(node is not None and node.op == "constant" and node.args[0] == 0.0 for node in nodes)


class _Whole(NamedTuple):
    """key * kv_idx + query * q_idx + rest in whole numbers."""

    key: int
    query: int
    rest: Ref | None = None


class _Form(NamedTuple):
    """A float32 number, maybe of the score and linear in positions; None is 0."""

    has_score: bool = False
    distance: Ref | None = None
    key: Ref | None = None
    query: Ref | None = None
    rest: Ref | None = None

    @property
    def coefficients(self) -> tuple[Ref | None, ...]:
        return self[1:]


_Value = Ref | _Whole | _Form | None
"""A value of the tile, a form, or None for anything else."""


class _Finder:
    """Forms of a program's values; `nodes` are its own nodes and those of the coefficients."""

    def __init__(self, program: Program) -> None:
        self._program, self.nodes = program, list(program.nodes)
        of_score, *lanes = range(len(program.inputs))
        b, h, query, key = lanes[:4]
        self._values: list[_Value] = [None] * program.first_node
        self._values[of_score] = _Form(has_score=True) if program.inputs[of_score] == "float32" else None
        for n in (b, h, *range(program.first_tensor, program.first_node)):
            self._values[n] = Ref(n)
        self._values[query], self._values[key] = _Whole(0, 1), _Whole(1, 0)
        for number, node in enumerate(program.nodes, program.first_node):
            self._values.append(self._found(number, node))

    def value(self, ref: Ref) -> _Value:
        return self._values[ref.value]

    def zero(self) -> Ref:
        return self._made("constant", 0.0)

    def _made(self, op: str, *args: object, dtype: str = "float32") -> Ref:
        self.nodes.append(Node(op, args, dtype))
        return Ref(self._program.first_node + len(self.nodes) - 1)

    def _found(self, number: int, node: Node) -> _Value:
        if all(isinstance(self.value(ref), Ref) for ref in refs(node.args)):
            return Ref(number)
        if node.shape:
            return None
        operands = [self.value(arg) for arg in node.args if isinstance(arg, Ref)]
        if None in operands:
            return None
        if node.op in ("detach", "view", "expand"):
            return operands[0]
        if node.op == "convert" and isinstance(operands[0], _Whole):
            return self._converted(operands[0], node.dtype)
        if node.dtype in ("int32", "int64"):
            return self._whole(node.op, operands, node.dtype)
        if node.dtype == "float32" and node.op in ("add", "sub", "mul", "div", "neg"):
            return self._floating(node.op, operands)
        return None

    def _converted(self, whole: _Whole, dtype: str) -> _Value:
        rest = None if whole.rest is None else self._made("convert", whole.rest, dtype=dtype)
        if dtype in ("int32", "int64"):
            return whole._replace(rest=rest)
        if dtype != "float32":
            return None
        is_distance = whole.key == -whole.query
        coefficients = (whole.key, 0, 0) if is_distance else (0, whole.key, whole.query)
        distance, key, query = (self._made("constant", float(n)) if n else None for n in coefficients)
        return _Form(False, distance, key, query, rest)

    def _whole(self, op: str, operands: list[_Value], dtype: str) -> _Value:
        """Sums and differences of positions and numbers of the tile."""
        if op == "neg":
            op, operands = "sub", [_Whole(0, 0), *operands]
        if op not in ("add", "sub"):
            return None
        x, y = (_Whole(0, 0, value) if isinstance(value, Ref) else value for value in operands)
        if not isinstance(x, _Whole) or not isinstance(y, _Whole):
            return None
        sign, rest = 1 if op == "add" else -1, self._sum(op, x.rest, y.rest, dtype)
        return _Whole(x.key + sign * y.key, x.query + sign * y.query, rest)

    def _floating(self, op: str, operands: list[_Value]) -> _Value:
        if op == "neg":
            (x,) = operands
            return self._each(x, "neg") if isinstance(x, _Form) and not x.has_score else None
        x, y = operands
        if op in ("mul", "div"):
            if op == "mul" and isinstance(x, Ref):
                x, y = y, x
            if not isinstance(x, _Form) or x.has_score or not isinstance(y, Ref):
                return None
            return self._each(x, op, y)
        x, y = (_Form(rest=value) if isinstance(value, Ref) else value for value in operands)
        if not isinstance(x, _Form) or not isinstance(y, _Form):
            return None
        if y.has_score and (x.has_score or op == "sub"):
            return None
        pairs = zip(x.coefficients, y.coefficients, strict=True)
        return _Form(x.has_score or y.has_score, *(self._sum(op, a, b) for a, b in pairs))

    def _each(self, form: _Form, op: str, *others: Ref) -> _Form:
        made = (None if x is None else self._made(op, x, *others) for x in form.coefficients)
        return _Form(False, *made)

    def _sum(self, op: str, x: Ref | None, y: Ref | None, dtype: str = "float32") -> Ref | None:
        if y is None:
            return x
        if x is None:
            return y if op == "add" else self._made("neg", y, dtype=dtype)
        return self._made(op, x, y, dtype=dtype)
