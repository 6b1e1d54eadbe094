"""A graph of aten operations on numbers, as make_fx records it, rewritten as a program.

What depends on no index stays outside of the program: it is computed once a call, in plain torch, and enters
as a captured tensor. Numbers of the user's function become scalars, which are arguments, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from . import table
from .program import Node, Program, Ref, TensorType


class Symbol(NamedTuple):
    """A value that has no number yet: the n-th input, tensor, scalar or node."""

    kind: str
    place: int


class Lane(NamedTuple):
    """A value of the program."""

    symbol: Symbol
    dtype: torch.dtype
    shape: tuple[int, ...] = ()


class Number(NamedTuple):
    """A literal of the graph, Python's (without a dtype) or a tensor made from one."""

    value: bool | int | float
    dtype: torch.dtype | None = None


class Free(NamedTuple):
    """A tensor that depends on no index."""

    node: fx.Node


class Unsupported(Exception):
    """An operation outside of the table: `Unsupported(node, reason)`."""

    @property
    def node(self) -> fx.Node:
        return self.args[0]

    @property
    def reason(self) -> str:
        return self.args[1]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_EXACT_INT = 1 << 53
"""Integers up to here are the same as a float."""


@dataclass
class Builder:
    """A program in the making."""

    inputs: list[torch.dtype]
    tensors: list[TensorType] = field(default_factory=list)
    scalars: list[torch.dtype] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    lifts: bool = True
    """Whether numbers become scalars, as those of a user do, or constants, as those of a derivative."""
    free: list[fx.Node] = field(default_factory=list)
    """The nodes that compute the tensors."""
    values: list[float] = field(default_factory=list)
    """The scalars' values."""

    def add(self, op: str, args: tuple[Any, ...], dtype: torch.dtype, shape: Sequence[int] = ()) -> Lane:
        self.nodes.append(Node(op, args, name_of(dtype), tuple(shape)))
        return Lane(Symbol("node", len(self.nodes) - 1), dtype, tuple(shape))

    def converted(self, x: Lane, dtype: torch.dtype) -> Lane:
        return x if x.dtype == dtype else self.add("convert", (x.symbol,), dtype, x.shape)

    def number(self, x: Number, dtype: torch.dtype) -> Lane:
        """A literal as a scalar of that dtype, or as a constant."""
        is_exact = isinstance(x.value, float) or abs(x.value) <= _EXACT_INT
        if not self.lifts or dtype == torch.bool or not is_exact:
            return self.add("constant", (x.value,), dtype)
        self.scalars.append(dtype)
        self.values.append(float(x.value))
        return Lane(Symbol("scalar", len(self.scalars) - 1), dtype)

    def unrounded(self, x: Lane) -> Lane:
        """The value from which `x` was rounded to a narrower dtype, or x."""
        while x.symbol.kind == "node" and self.nodes[x.symbol.place].op == "convert":
            (source,) = self.nodes[x.symbol.place].args
            if source.kind != "node":
                break
            node = self.nodes[source.place]
            dtype = getattr(torch, node.dtype)
            if not dtype.is_floating_point or dtype.itemsize < x.dtype.itemsize:
                break
            x = Lane(source, dtype, x.shape)
        return x

    def tensor(self, x: Free) -> Symbol:
        """The tensor's symbol, the same for the same node."""
        if x.node not in self.free:
            value: Tensor = x.node.meta["val"]
            self.free.append(x.node)
            self.tensors.append(TensorType(name_of(value.dtype), value.dim()))
        return Symbol("tensor", self.free.index(x.node))

    def finish(self, outputs: Sequence[Lane]) -> Program:
        """The program of what `outputs` need."""
        needed: set[int] = set()
        todo = [lane.symbol for lane in outputs]
        while todo:
            symbol = todo.pop()
            if symbol.kind == "node" and symbol.place not in needed:
                needed.add(symbol.place)
                todo += _symbols(self.nodes[symbol.place].args)
        first = len(self.inputs) + len(self.tensors) + len(self.scalars)
        offsets = {"input": 0, "tensor": len(self.inputs), "scalar": first - len(self.scalars)}
        numbers = {index: first + n for n, index in enumerate(sorted(needed))}

        def ref(symbol: Symbol) -> Ref:
            is_node = symbol.kind == "node"
            return Ref(numbers[symbol.place] if is_node else offsets[symbol.kind] + symbol.place)

        def numbered(arg: Any) -> Any:
            if isinstance(arg, Symbol):
                return ref(arg)
            return tuple(numbered(x) for x in arg) if isinstance(arg, tuple) else arg

        nodes = tuple(self.nodes[i]._replace(args=numbered(self.nodes[i].args)) for i in sorted(needed))
        return Program(
            tuple(map(name_of, self.inputs)),
            tuple(self.tensors),
            tuple(map(name_of, self.scalars)),
            nodes,
            tuple(ref(lane.symbol) for lane in outputs),
        )


def _symbols(arg: Any) -> list[Symbol]:
    if isinstance(arg, Symbol):
        return [arg]
    return [found for x in arg for found in _symbols(x)] if isinstance(arg, tuple) else []


def resumed(program: Program, lifts: bool) -> tuple[Builder, Callable[[Ref], Symbol]]:
    """A builder that has the program's values already, and their symbols."""

    def symbol(ref: Ref) -> Symbol:
        for kind, first in (
            ("node", program.first_node),
            ("scalar", program.first_scalar),
            ("tensor", program.first_tensor),
        ):
            if ref.value >= first:
                return Symbol(kind, ref.value - first)
        return Symbol("input", ref.value)

    def named(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return symbol(arg)
        return tuple(named(x) for x in arg) if isinstance(arg, tuple) else arg

    builder = Builder([getattr(torch, name) for name in program.inputs], lifts=lifts)
    builder.tensors = list(program.tensors)
    builder.scalars = [getattr(torch, name) for name in program.scalars]
    builder.nodes = [node._replace(args=named(node.args)) for node in program.nodes]
    return builder, symbol


Value = Any
"""A Lane, Number, Free, or a literal that is no number."""


def translate(graph: fx.Graph, builder: Builder, placeholders: Sequence[Value]) -> list[Value]:
    """The graph's outputs, with what they need added to `builder`; raises Unsupported."""
    live = _live(graph)
    known: dict[fx.Node, Value] = {}
    arguments, attributes = iter(placeholders), dict[Any, Free]()
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(arguments)
        elif node.op == "get_attr":
            known[node] = attributes.setdefault(node.target, Free(node))
        elif builder.lifts and _depends_on_tensors_alone(node, known):
            if node.target is not operator.getitem:
                _refuse_side_effects(node)
            known[node] = Free(node)
        elif node.op == "call_function":
            target = known.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
            # Only a derivative's graph may change a value that it has computed itself.
            changes = not builder.lifts and isinstance(target, Lane) and node.target in _IN_PLACE
            if not changes:
                _refuse_side_effects(node)
            if node in live or changes:
                known[node] = _Translation(builder, node, known).value()
            if changes:
                known[node.args[0]] = known[node]
    return [known.get(x, x) for x in _outputs(graph)]


def _depends_on_tensors_alone(node: fx.Node, known: dict[fx.Node, Value]) -> bool:
    """Whether a call takes captured tensors and no number of a score; its result may then be anything."""
    inputs = [known.get(x) for x in node.all_input_nodes]
    return node.op == "call_function" and bool(inputs) and all(isinstance(x, Free) for x in inputs)


def _outputs(graph: fx.Graph) -> tuple[Any, ...]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    result = output.args[0]
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _live(graph: fx.Graph) -> set[fx.Node]:
    live: set[fx.Node] = set()
    todo = [x for x in _outputs(graph) if isinstance(x, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in live:
            live.add(node)
            todo += node.all_input_nodes
    return live


def _refuse_side_effects(node: fx.Node) -> None:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise Unsupported(node, "it is no operation of torch.ops")
    if reason := side_effect(node.target):
        raise Unsupported(node, reason)


def side_effect(target: torch._ops.OpOverload) -> str:
    """Why an operation does more than compute a result, '' if it does not."""
    if target._schema.is_mutable:
        return "it changes a tensor in place; make a new tensor instead"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "it generates random numbers, and a backward would get others"
    return ""


_IN_PLACE = frozenset([torch.ops.aten.masked_fill_.Scalar, torch.ops.aten.masked_fill_.Tensor])
_RENAMED = {
    "remainder": "remainder",
    "bitwise_left_shift": "bitwise_left_shift",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "floor_divide": "div_floor",
    "sgn": "sign",
    "special_expm1": "expm1",
    "special_erf": "erf",
    "absolute": "abs",
    "multiply": "mul",
    "true_divide": "div",
}
_COPIES = frozenset(["alias", "clone", "lift_fresh", "lift_fresh_copy", "contiguous", "positive"])
_MADE_LIKE = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1, "zeros": 0, "ones": 1}
_CONVERSIONS = frozenset(("_to_copy", "to", "convert_element_type"))
_VIEWS = frozenset(["unsqueeze", "squeeze", "view", "_unsafe_view", "reshape"])
_BEYOND = {"lt": (True, False), "le": (True, False), "gt": (False, True), "ge": (False, True)}
"""Whether a comparison holds with a number above, and below, all numbers of the other operand's dtype."""


class _Translation:
    """One node of the graph."""

    _OTHERS = frozenset(("where", "masked_fill", "clamp", "clamp_min", "clamp_max", "sum", "mean", "dot"))
    _OTHERS |= {"expand", "embedding", "index", "select"}
    """Operations with a method of their own here."""

    def __init__(self, builder: Builder, node: fx.Node, known: dict[fx.Node, Value]) -> None:
        self.builder, self.node = builder, node
        self.op = node.target.__name__.split(".")[0]  # type: ignore[union-attr]
        self.args = [self._known(x, known) for x in node.args]
        self.kwargs = {name: self._known(x, known) for name, x in node.kwargs.items()}
        result = node.meta.get("val")
        if not isinstance(result, Tensor):
            raise Unsupported(node, "its result is not one tensor")
        self.dtype, self.shape = result.dtype, tuple(result.shape)

    def _known(self, x: Any, known: dict[fx.Node, Value]) -> Value:
        if isinstance(x, fx.Node):
            return known[x]
        if isinstance(x, (bool, int, float)):
            return Number(x)
        return [self._known(y, known) for y in x] if isinstance(x, (list, tuple)) else x

    def value(self) -> Value:
        made = self._made()
        if made is not None:
            return made
        if self.op in _COPIES or (self.op == "detach" and not self.builder.lifts):
            return self.args[0]
        if not _has_lane([*self.args, *self.kwargs.values()]):
            if not self.builder.lifts or _all_numbers(self.args):
                return self._folded()
            if not any(isinstance(x, Number) and x.dtype for x in self.args):
                return Free(self.node)
        op = _RENAMED.get(self.op, self.op)
        if op in _CONVERSIONS:
            return self.builder.converted(self.lane(0), self.dtype)
        if op == "rsub":
            return self._arithmetic("sub", [self.args[1], self.args[0]])
        if op == "div" and self.kwargs.get("rounding_mode"):
            op = f"div_{self.kwargs['rounding_mode']}"
        if op in table.ARITHMETIC:
            return self._arithmetic(op, self.args[:2])
        if op in table.COMPARISONS:
            return self._compare(op)
        if op in table.LOGIC:
            return self._add(op, [self.lane(i) for i in range(len(self.args))])
        if op == "round" and "decimals" in self.kwargs:
            return self._round_to(self.kwargs["decimals"].value)
        if op in table.FLOATING or op in table.UNARY:
            if len(self.args) > 1 or self.kwargs:
                raise Unsupported(self.node, "a kernel has it for one operand, without other arguments")
            return self._add(op, [self.builder.converted(self.lane(0), self.dtype)])
        if op == "detach":
            return self._add(op, [self.lane(0)])
        if op.strip("_") in self._OTHERS:
            lane: Lane = getattr(self, f"_{op.strip('_')}")()
            return lane
        if op in _VIEWS and self.dtype == self.lane(0).dtype:
            return self._add("view", [self.lane(0)])
        raise Unsupported(self.node, "it is none of the operations that a kernel has for each score")

    def _made(self) -> Value:
        """What a call makes of a number: a tensor of one value, None for any other call."""
        args = self.args
        value: Any = None
        if self.op == "scalar_tensor":
            value = args[0]
        elif self.op in _MADE_LIKE:
            value = Number(_MADE_LIKE[self.op])
        elif self.op in ("full", "full_like", "new_full"):
            value = args[-1]
        if not isinstance(value, Number):
            return None
        if self.shape == ():
            return Number(value.value, self.dtype)
        if not _has_lane(args):
            return None
        return self._add("expand", [self.builder.number(value, self.dtype)])

    def _folded(self) -> Number:
        """The number that an operation makes of numbers."""

        def known(x: Value) -> Any:
            return torch.tensor(x.value, dtype=x.dtype) if isinstance(x, Number) and x.dtype else x

        def literal(x: Value) -> Any:
            if type(x) in (list, tuple):
                return [literal(y) for y in x]  # sizes
            x = known(x)
            return x.value if isinstance(x, Number) else x

        result = self.node.target(*map(literal, self.args), **{k: literal(x) for k, x in self.kwargs.items()})  # type: ignore[operator]
        return Number(result.item(), self.dtype)

    def lane(self, i: int, dtype: torch.dtype | None = None) -> Lane:
        """An operand as a value of the program."""
        return self._as_lane(self.args[i], dtype)

    def _as_lane(self, x: Value, dtype: torch.dtype | None = None) -> Lane:
        if isinstance(x, Number):
            wanted = x.dtype or dtype or torch.tensor(x.value).dtype
            if _is_beyond(x.value, wanted):
                name = str(wanted).removeprefix("torch.")
                raise Unsupported(self.node, f"{x.value} is no {name}, as indices are")
            lane = self.builder.number(x, wanted)
        elif isinstance(x, Free):
            lane = self.gathered(x)
        elif isinstance(x, Lane):
            lane = x
        else:
            raise Unsupported(self.node, "an operand is neither a tensor nor a number")
        return lane if dtype is None else self.builder.converted(lane, dtype)

    def gathered(self, x: Free) -> Lane:
        """A whole tensor, which is the same for every score."""
        value: Tensor = x.node.meta["val"]
        return self.builder.add("gather", (self.builder.tensor(x),), value.dtype, value.shape)

    def _add(self, op: str, lanes: list[Lane]) -> Lane:
        return self.builder.add(op, tuple(lane.symbol for lane in lanes), self.dtype, self.shape)

    def _arithmetic(self, op: str, operands: list[Value]) -> Lane:
        x, y = operands
        alpha = self.kwargs.get("alpha", Number(1))
        if self.op == "rsub" and len(self.args) > 2:
            alpha = self.args[2]
        if not isinstance(alpha, Number):
            raise Unsupported(self.node, "alpha is no number")
        left = self._as_lane(x, self.dtype)
        if op == "pow" and isinstance(y, Number):
            # A known exponent is a multiplication or a root; its value decides on the code.
            right = self.builder.add("constant", (y.value,), self.dtype)
        else:
            right = self._as_lane(y, self.dtype)
        if alpha.value != 1:
            factor = self.builder.number(alpha, self.dtype)
            right = self.builder.add("mul", (right.symbol, factor.symbol), self.dtype, right.shape)
        return self._add(op, [left, right])

    def _compare(self, op: str) -> Lane:
        dtype = torch.result_type(*(_example(x) for x in self.args[:2]))
        other = self.args[1]
        if isinstance(other, Number) and _is_beyond(other.value, dtype):
            # As of a window without an end: `q_idx - kv_idx < sys.maxsize`.
            holds = _BEYOND.get(op, (op == "ne",) * 2)[other.value < 0]
            known = self.builder.number(Number(holds, torch.bool), torch.bool)
            return self._add("expand", [known])
        return self._add(op, [self.lane(0, dtype), self.lane(1, dtype)])

    def _where(self) -> Lane:
        return self._add("where", [*self._choice(0, 1, 2)])

    def _masked_fill(self) -> Lane:
        return self._add("where", [*self._choice(1, 2, 0)])

    def _choice(self, condition: int, x: int, y: int) -> tuple[Lane, Lane, Lane]:
        return self.lane(condition, torch.bool), self.lane(x, self.dtype), self.lane(y, self.dtype)

    def _clamp(self) -> Lane:
        bounds = [*self.args[1:], None, None][:2]
        return self._clamped(*bounds)

    def _clamp_min(self) -> Lane:
        return self._clamped(self.args[1], None)

    def _clamp_max(self) -> Lane:
        return self._clamped(None, self.args[1])

    def _clamped(self, lowest: Value, highest: Value) -> Lane:
        lowest, highest = (
            None if bound is None else self._as_lane(bound, self.dtype).symbol for bound in (lowest, highest)
        )
        args = (self.lane(0, self.dtype).symbol, lowest, highest)
        return self.builder.add("clamp", args, self.dtype, self.shape)

    def _round_to(self, decimals: int) -> Lane:
        factor = self.builder.number(Number(10.0 ** abs(decimals)), self.dtype)
        to, back = ("mul", "div") if decimals > 0 else ("div", "mul")
        scaled = self._add(to, [self.builder.converted(self.lane(0), self.dtype), factor])
        return self._add(back, [self._add("round", [scaled]), factor])

    def _sum(self) -> Lane:
        x = self.lane(0, self.dtype)
        dims = self.args[1] if len(self.args) > 1 else None
        rank = len(x.shape)
        listed = tuple(d.value % rank for d in dims) if dims and rank else tuple(range(rank))
        keeps = len(self.args) > 2 and bool(self.args[2].value)
        return self.builder.add("sum", (x.symbol, listed, keeps), self.dtype, self.shape)

    def _mean(self) -> Lane:
        total, x = self._sum(), self.lane(0)
        count = 1
        for size in x.shape:
            count *= size
        for size in self.shape:
            count //= size
        divisor = self.builder.add("constant", (count,), self.dtype)
        return self._add("div", [total, divisor])

    def _dot(self) -> Lane:
        x, y = self.lane(0), self.lane(1)
        products = self.builder.add("mul", (x.symbol, y.symbol), self.dtype, x.shape)
        return self.builder.add("sum", (products.symbol, (0,), False), self.dtype)

    def _expand(self) -> Lane:
        return self._add("expand", [self.lane(0)])

    def _embedding(self) -> Lane:
        table_of, index, *options = self.args
        padding, by_frequency = (
            options[i].value if len(options) > i else default for i, default in ((0, -1), (1, False))
        )
        if by_frequency:
            raise Unsupported(self.node, "scale_grad_by_freq counts the indices of all scores")
        found = self._gather(table_of, [index])
        if padding < 0:
            return found
        # A row that gets no gradient.
        own = self._as_lane(index)
        at = self.builder.number(Number(padding), own.dtype)
        is_padding = self.builder.add("eq", (own.symbol, at.symbol), torch.bool)
        return self._add("where", [is_padding, self._add("detach", [found]), found])

    def _index(self) -> Lane:
        return self._gather(self.args[0], self.args[1])

    def _select(self) -> Lane:
        dim, index = self.args[1].value, self.args[2].value
        rank = len(self.shape) + 1
        return self._gather(self.args[0], [None] * (dim % rank) + [Number(index)])

    def _gather(self, source: Value, indices: list[Value]) -> Lane:
        """Elements of a captured tensor, or of an array that was gathered from one."""
        positions: list[Any] = []
        if isinstance(source, Lane):
            node = self.builder.nodes[source.symbol.place] if source.symbol.kind == "node" else None
            if node is None or node.op != "gather":
                raise Unsupported(self.node, "only a captured tensor can be indexed, not a computed array")
            tensor, *positions = node.args
        elif isinstance(source, Free):
            tensor = self.builder.tensor(source)
        else:
            raise Unsupported(self.node, "only a captured tensor can be indexed")
        rank = self.builder.tensors[tensor.place].rank
        positions += [None] * (rank - len(positions))
        open_dims = [dim for dim, index in enumerate(positions) if index is None]
        for dim, index in zip(open_dims, indices, strict=False):
            if index is not None:
                positions[dim] = self._position(index)
        while positions and positions[-1] is None:
            positions.pop()
        return self.builder.add("gather", (tensor, *positions), self.dtype, self.shape)

    def _position(self, index: Value) -> Any:
        if isinstance(index, Number) and index.dtype is None:
            return index.value
        lane = self._as_lane(index)
        if lane.shape or lane.dtype.is_floating_point or lane.dtype == torch.bool:
            raise Unsupported(self.node, "an index is no integer for each score")
        return lane.symbol


def _is_beyond(value: Any, dtype: torch.dtype) -> bool:
    """Whether an integer is none of an integral dtype."""
    if dtype.is_floating_point or dtype == torch.bool or not isinstance(value, int):
        return False
    limits = torch.iinfo(dtype)
    return not limits.min <= value <= limits.max


def _has_lane(values: Any) -> bool:
    if isinstance(values, (list, tuple)) and not isinstance(values, (Lane, Number, Free)):
        return any(_has_lane(x) for x in values)
    return isinstance(values, Lane)


def _all_numbers(args: Sequence[Value]) -> bool:
    """Whether an operation is one of numbers, at least one of which was a tensor."""
    made = [x for x in args if isinstance(x, Number)]
    return any(x.dtype for x in made) and not any(isinstance(x, (Free, list)) for x in args)


def _example(x: Value) -> Any:
    """Something that takes part in type promotion like the value."""
    if isinstance(x, Lane):
        return torch.empty((1,) * len(x.shape), dtype=x.dtype, device="meta")
    if isinstance(x, Free):
        value: Tensor = x.node.meta["val"]
        return torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
    return x.value if x.dtype is None else torch.empty((), dtype=x.dtype, device="meta")
