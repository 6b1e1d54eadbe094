"""Programs of score_mod and mask_mod as expressions over scores: the device side of `flex.program`.

A value is computed once for all that it depends on: once a tile, once a row of the tile, once a column of a
block, or for each score. Equal nodes are computed once. Nothing branches: what is hidden is computed, too,
with indices clamped into their tensors.

    tile = begin(lowering, arguments, batch, heads, positions)  # once a tile
    apply(lowering, arguments, tile, columns, score_at, put)  # each block

A derivative has more than one result: what `scores` yields has them all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Float64, Int32, Int64
from cutlass._mlir.dialects import arith
from cutlass._mlir.dialects import math as mlir_math

from ...flex import table
from ...flex.program import Node, Program, Ref
from . import integers
from .host import strided
from .lowering import LIBRARY, Level, Lowering, Ramp, constant, is_integer
from .scores import tanh

TYPES: dict[str, Any] = {
    "bool": Boolean,
    "uint8": cutlass.Uint8,
    "int8": cutlass.Int8,
    "int16": cutlass.Int16,
    "int32": Int32,
    "int64": cutlass.Int64,
    # Numbers of 16 bits are kept as float32 and rounded after each operation.
    "float16": Float32,
    "bfloat16": Float32,
    "float32": Float32,
    "float64": Float64,
}
"""Types of values in registers."""
STORED: dict[str, Any] = {
    **TYPES,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
}
"""Types of captured tensors' elements in memory."""
PASSED: dict[str, Any] = {
    **TYPES,
    **dict.fromkeys(("uint8", "int8", "int16"), Int32),
}
"""Types of scalars as arguments of a kernel."""
_LARGE = 2.0**125
"""Numbers above have reciprocals that may be rounded to 0."""
Values = tuple[Any, ...]
"""Numbers of one value in row-major order: one, or those of an array."""
Known = dict[int, Values]


class Arguments(NamedTuple):
    """A program's tensors, of at least one dimension each, and scalars."""

    tensors: tuple[cute.Tensor, ...]
    scalars: tuple[Any, ...]


class Captured(NamedTuple):
    """A program's arguments, as a kernel receives them; None for a program without any."""

    tensors: tuple[cute.Tensor, ...] | None
    """Those of one dimension at least; None if there are none."""
    scalars: tuple[Any, ...] | None

    @staticmethod
    def example(program: Program) -> Captured | None:
        """What stands for any other when a kernel is compiled."""
        tensors = tuple(strided(STORED[t.dtype], max(t.rank, 1)) for t in program.tensors)
        scalars = tuple(PASSED[dtype](0) for dtype in program.scalars)
        return Captured(tensors or None, scalars or None) if tensors or scalars else None


def arguments_of(captured: Captured | None) -> Arguments:
    """The arguments that a kernel received."""
    tensors, scalars = captured or (None, None)
    return Arguments(tensors or (), scalars or ())


class Columns(NamedTuple):
    """Positions of a fragment's columns: column c is at `first + offsets[c]`."""

    first: Int32
    offsets: tuple[int, ...]


class Tile(NamedTuple):
    """Values that scores of a tile share."""

    everywhere: tuple[Any, ...]
    rows: tuple[tuple[Any, ...], ...]
    """Values of each of a thread's rows."""


def begin(
    lowering: Lowering,
    arguments: Arguments,
    batch: Int32,
    heads: Sequence[Int32],
    positions: Sequence[Int32],
) -> Tile:
    """Everything that depends on rows alone: their heads and positions."""
    program, kept_rows = lowering.program, lowering.kept(Level.ROW)
    b, h = lowering.first_lane, lowering.first_lane + 1
    batch, *numbers = map(_plain, (batch, *heads, *positions))
    heads, positions = numbers[: len(heads)], numbers[len(heads) :]
    shared: Known = {b: (batch,)}
    for i, (dtype, scalar) in enumerate(zip(program.scalars, arguments.scalars, strict=True)):
        shared[program.first_scalar + i] = (_passed(dtype, scalar),)
    if lowering.levels[h] == Level.TILE:
        shared[h] = (heads[0],)
    _compute(lowering, arguments, Level.TILE, shared)
    rows = []
    for head, position in zip(heads, positions, strict=True):
        known = {**shared, lowering.row: (position,)}
        known.setdefault(h, (head,))
        _compute(lowering, arguments, Level.ROW, known)
        rows.append(_flat(known, kept_rows))
    return Tile(_flat(shared, lowering.kept(Level.TILE)), tuple(rows))


def _plain(number: Int32) -> Int32:
    """The number as one whose arithmetic follows its dtype: those of layouts (cute's IntValue) are compared
    as signed ones even where they are Uint32.
    """
    return number.to(Int64).to(Int32)


def known_of_rows(lowering: Lowering, tile: Tile) -> list[Known]:
    """Values of each row."""
    shared = _unflat(lowering, Level.TILE, tile.everywhere)
    return [{**shared, **_unflat(lowering, Level.ROW, values)} for values in tile.rows]


def apply(
    lowering: Lowering,
    arguments: Arguments,
    tile: Tile,
    columns: Columns,
    score_at: Callable[[int, int], Any],
    put: Callable[[int, int, Any], None],
) -> None:
    """Call `put(row, column, result)` for each score."""
    (output,) = lowering.program.outputs

    def given(r: int, c: int) -> Known:
        return {0: (score_at(r, c),)} if lowering.first_lane else {}

    for r, c, known in scores(lowering, arguments, tile, columns, given):
        put(r, c, known[output.value][0])


def scores(
    lowering: Lowering,
    arguments: Arguments,
    tile: Tile,
    columns: Columns,
    given: Callable[[int, int], Known],
) -> Iterator[tuple[int, int, Known]]:
    """Yield row, column and all values of each score, one column after the other.

    `given(row, column)` has the values of the inputs that each score has for itself.
    """
    columns = columns._replace(first=_plain(columns.first))
    shared, of_rows = _unflat(lowering, Level.TILE, tile.everywhere), known_of_rows(lowering, tile)
    distance, in_columns = lowering.distance, lowering.ramps(Level.COLUMN)
    of_scores = lowering.ramps(Level.SCORE)
    begins = [
        (columns.first - row[lowering.row][0]).to(Float32)
        if distance is not None or any(ramp.is_distance for ramp in of_scores)
        else None
        for row in of_rows
    ]
    first = None if all(ramp.is_distance for ramp in (*in_columns, *of_scores)) else columns.first.to(Float32)
    bases = [
        {ramp.number: row[ramp.factor][0] * (begin if ramp.is_distance else first) for ramp in of_scores}
        for row, begin in zip(of_rows, begins, strict=True)
    ]
    shared_bases = {ramp.number: shared[ramp.factor][0] * first for ramp in in_columns}
    for c, offset in enumerate(columns.offsets):
        column = {**shared, lowering.column: (columns.first + offset,)}
        column |= _climbed(in_columns, shared, shared_bases, offset)
        _compute(lowering, arguments, Level.COLUMN, column)
        for r, begin in enumerate(begins):
            known = {**column, **of_rows[r], **given(r, c)}
            if distance is not None:
                known[distance] = (begin + Float32(offset),)
            known |= _climbed(of_scores, of_rows[r], bases[r], offset)
            _compute(lowering, arguments, Level.SCORE, known)
            yield r, c, known


def _climbed(ramps: Sequence[Ramp], known: Known, bases: dict[int, Any], offset: int) -> Known:
    """Values of ramps at a column, from those at the fragment's first position."""
    return {
        ramp.number: (_fma(known[ramp.factor][0], Float32(offset), bases[ramp.number]),)
        if offset
        else (bases[ramp.number],)
        for ramp in ramps
    }


def _flat(known: Known, numbers: Iterable[int]) -> tuple[Any, ...]:
    return tuple(x for n in numbers for x in known[n])


def _unflat(lowering: Lowering, level: Level, flat: tuple[Any, ...]) -> Known:
    left = iter(flat)
    return {n: tuple(itertools.islice(left, math.prod(lowering.shape(n)))) for n in lowering.kept(level)}


def _compute(lowering: Lowering, arguments: Arguments, level: Level, known: Known) -> None:
    """Add the values of the level's nodes."""
    program = lowering.program
    for number in lowering.nodes(level):
        node = program.nodes[number - program.first_node]
        if node.op in ("distance", "ramp"):
            continue  # they are given
        known[number] = _value(lowering, node, arguments, known)


def _value(lowering: Lowering, node: Node, arguments: Arguments, known: Known) -> Values:
    program, count = lowering.program, math.prod(node.shape)
    if node.op == "constant":
        return (_typed(node.dtype, node.args[0]),)
    if node.op == "gather":
        return _gather(program, node, arguments, known)
    if node.op == "divider":
        y, sign = (known[arg.value][0] for arg in node.args)
        return integers.divider(y, sign, constant(program, node.args[0]))
    if node.op in integers.DIVISIONS:
        x, y = (known[arg.value][0] for arg in node.args[:2])
        return (integers.DIVISIONS[node.op](x, y, known[node.args[2].value]),)
    if node.op == "size_by":
        x, divider = node.args
        return (integers.size_by(known[x.value][0], known[divider.value]),)
    operands = [
        None if arg is None else known[arg.value] for arg in node.args if arg is None or isinstance(arg, Ref)
    ]
    shapes = [
        () if arg is None else lowering.shape(arg.value)
        for arg in node.args
        if arg is None or isinstance(arg, Ref)
    ]
    if node.op == "view":
        return operands[0]
    if node.op == "sum":
        return _sum(node, operands[0], shapes[0])
    if node.op == "pow" and (exponent := constant(program, node.args[1])) is not None:
        return tuple(_rounded(node.dtype, _power(node.dtype, x, exponent)) for x in operands[0])
    source = lowering.dtype(node.args[0].value)
    found = []
    for place in range(count):
        own = [
            None if x is None else x[_at(node.shape, shape, place)]
            for x, shape in zip(operands, shapes, strict=True)
        ]
        found.append(_number(node, source, own))
    return tuple(found)


def _at(shape: tuple[int, ...], own: tuple[int, ...], place: int) -> int:
    """The place in an operand of sizes `own` that is broadcast to a place in an array of sizes `shape`."""
    index, step, of_own = 0, 1, 1
    own = (1,) * (len(shape) - len(own)) + own
    for size, own_size in zip(reversed(shape), reversed(own), strict=True):
        index += (place // step % size if own_size > 1 else 0) * of_own
        step, of_own = step * size, of_own * own_size
    return index


def _sum(node: Node, x: Values, shape: tuple[int, ...]) -> Values:
    """Sums over some dimensions, in the order of the elements."""
    _, dims, _ = node.args
    totals: dict[tuple[int, ...], Any] = {}
    for place, coordinate in enumerate(itertools.product(*map(range, shape))):
        kept = tuple(0 if dim in dims else i for dim, i in enumerate(coordinate))
        totals[kept] = totals[kept] + x[place] if kept in totals else x[place]
    zero = _typed(node.dtype, 0)
    return tuple(_rounded(node.dtype, x) for x in totals.values()) or (zero,) * math.prod(node.shape)


def _gather(program: Program, node: Node, arguments: Arguments, known: Known) -> Values:
    place = node.args[0].value - program.first_tensor
    tensor = arguments.tensors[place]
    if node.dtype == "bool":
        # A byte an element; the DSL's Boolean would be a bit in registers.
        tensor = cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=cutlass.Uint8), tensor.layout)
    found = []
    for coordinate in coordinates(node, program.tensors[place].rank, tensor.shape, known):
        x = tensor[coordinate]
        found.append(Boolean(x != 0) if node.dtype == "bool" else x.to(TYPES[node.dtype]))
    return tuple(found)


def coordinates(node: Node, rank: int, shape: tuple[Any, ...], known: Known) -> Iterator[tuple[Any, ...]]:
    """Places, in a tensor of these sizes, of the elements that a gather takes."""
    _, *positions = node.args
    positions += [None] * (rank - len(positions))
    fixed = [
        None if p is None else _index(known[p.value][0] if isinstance(p, Ref) else p, shape[dim])
        for dim, p in enumerate(positions)
    ]
    for own in itertools.product(*map(range, node.shape)):
        rest = iter(own)
        yield tuple(next(rest) if i is None else i for i in fixed) or (0,)


def _index(index: Any, size: Any) -> Any:
    """An index that is not negative and below the size."""
    if isinstance(index, int):
        index = Int32(index)
    wide = type(index) if type(index).width > 32 else Int32
    index, size = index.to(wide), wide(size)
    index = cutlass.select_(index < 0, index + size, index)
    return Int32(cutlass.max(cutlass.min(index, size - 1), wide(0)))


def _typed(dtype: str, number: Any) -> Any:
    kind = TYPES[dtype]
    if kind is Boolean:
        return Boolean(bool(number))
    return _rounded(dtype, kind(float(number) if dtype.startswith(("float", "bfloat")) else int(number)))


def _passed(dtype: str, scalar: Any) -> Any:
    return _rounded(dtype, scalar.to(TYPES[dtype]))


def _rounded(dtype: str, x: Any) -> Any:
    """A result in the type of its dtype, rounded to it."""
    kind = TYPES[dtype]
    x = x if type(x) is kind else kind(x)
    return x.to(STORED[dtype]).to(Float32) if dtype in ("float16", "bfloat16") else x


def _number(node: Node, source: str, operands: list[Any]) -> Any:
    """One number of an operation's result; `source` is the dtype of its operands."""
    op, dtype = node.op, node.dtype
    if op == "expand":
        return operands[0]
    if op == "convert":
        return _converted(operands[0], source, dtype)
    if op == "where":
        return _rounded(dtype, cutlass.select_(*operands))
    if op == "clamp":
        x, lowest, highest = operands
        x = x if lowest is None else _larger(x, lowest)
        return _rounded(dtype, x if highest is None else _smaller(_rounded(dtype, x), highest))
    if op == "within":
        x, offset, width = operands
        return (x + offset).to(cutlass.Uint32) < width.to(cutlass.Uint32)
    if op in table.COMPARISONS:
        return _rounded(dtype, _COMPARE[op](*operands))
    if op in table.LOGIC:
        return _rounded(dtype, _LOGIC[op](*(_is_true(x) for x in operands)))
    if op in LIBRARY:
        return _rounded(dtype, _LIBRARY[op](*operands))
    if op == "div_trunc" and not is_integer(dtype):
        x, y = operands
        return _rounded(dtype, cute.math.trunc(_rounded(dtype, x / y)))
    functions = _BOOLEAN if dtype == "bool" else _INTEGER if is_integer(dtype) else _FLOATING
    return _rounded(dtype, (functions.get(op) or _ANY[op])(*operands))


def _is_true(x: Any) -> Any:
    return x if type(x) is Boolean else x != type(x)(0)


def _converted(x: Any, source: str, dtype: str) -> Any:
    if dtype == "bool":
        return _rounded(dtype, _is_true(x))
    if source == "bool":
        kind = TYPES[dtype]
        return _rounded(dtype, cutlass.select_(x, kind(1), kind(0)))
    if dtype in ("uint8", "int8", "int16") and not is_integer(source):
        # torch's conversion of a number out of range wraps around.
        x = x.to(Int32)
    return _rounded(dtype, x)


def _larger(x: Any, y: Any) -> Any:
    """The larger number; NaN if one of them is NaN."""
    if type(x) is Float32:
        return cute.arch.fmax(x, y, nan=True)
    return cutlass.select_((x > y) | (x != x), x, y)


def _smaller(x: Any, y: Any) -> Any:
    if type(x) is Float32:
        return -cute.arch.fmax(-x, -y, nan=True)
    return cutlass.select_((x < y) | (x != x), x, y)


def _with(function: Callable[..., Any], x: Any, y: Any) -> Any:
    """An MLIR operation on two integers."""
    return type(x)(function(x.ir_value(), y.ir_value()))


def _quotient(x: Any, y: Any) -> Any:
    return _with(arith.divsi if type(x).signed else arith.divui, x, y)


def _rest(x: Any, y: Any) -> Any:
    return _with(arith.remsi if type(x).signed else arith.remui, x, y)


def _is_off(rest: Any, y: Any) -> Any:
    """Whether a division rounded towards 0 has to be one less to be rounded down."""
    zero = type(y)(0)
    return (rest != zero) & ((rest < zero) != (y < zero))


def _int_div_floor(x: Any, y: Any) -> Any:
    quotient = _quotient(x, y)
    return cutlass.select_(_is_off(x - quotient * y, y), quotient - type(x)(1), quotient)


def _int_remainder(x: Any, y: Any) -> Any:
    rest = _rest(x, y)
    return cutlass.select_(_is_off(rest, y), rest + y, rest)


def _float_remainder(x: Any, y: Any) -> Any:
    rest = _float_rest(x, y)
    return cutlass.select_(_is_off(rest, y), rest + y, rest)


def _float_rest(x: Any, y: Any) -> Any:
    return type(x)(arith.remf(x.ir_value(), y.ir_value()))


def _float_div_floor(x: Any, y: Any) -> Any:
    """torch's: the quotient of what a remainder leaves, which is whole but for rounding."""
    kind, rest = type(x), _float_rest(x, y)
    whole = (x - rest) / y
    whole = cutlass.select_(_is_off(rest, y), whole - kind(1), whole)
    down = cute.math.floor(whole)
    down = cutlass.select_(whole - down > kind(0.5), down + kind(1), down)
    return cutlass.select_(y == kind(0), x / y, down)


def _shift_left(x: Any, y: Any) -> Any:
    kind = type(x)
    fits = (y >= kind(0)) & (y < kind(kind.width))
    return cutlass.select_(fits, _with(arith.shli, x, cutlass.select_(fits, y, kind(0))), kind(0))


def _shift_right(x: Any, y: Any) -> Any:
    kind = type(x)
    most = kind(kind.width - 1)
    own = cutlass.select_((y >= kind(0)) & (y < kind(kind.width)), y, most)
    shifted = _with(arith.shrsi if kind.signed else arith.shrui, x, own)
    return shifted if kind.signed else cutlass.select_(own == y, shifted, kind(0))


def _sign(x: Any) -> Any:
    kind = type(x)
    one, zero = kind(1), kind(0)
    negative = cutlass.select_(x < zero, zero - one, zero)
    return cutlass.select_(x > zero, one, negative)


def _sigmoid(x: Any) -> Any:
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-x))


def _divided_by(x: Any, y: Any, reciprocal: Any) -> Any:
    """x / y, rounded to nearest but for results below the normal numbers."""
    quotient = x * reciprocal
    better = _fma(_fma(-quotient, y, x), reciprocal, quotient)
    # Next to infinite numbers, and zeros below, what is left of x is not a number.
    return cutlass.select_(cute.math.abs(better) < Float32.inf, better, quotient)


def _fma(x: Any, y: Any, z: Any) -> Any:
    return Float32(mlir_math.fma(x.ir_value(), y.ir_value(), z.ir_value()))


def _fast_quotient(x: Any, y: Any) -> Any:
    """x / y to two units in the last place; a reciprocal below the normal numbers would be 0."""
    factor = cutlass.select_(cute.math.abs(y) > _LARGE, Float32(0.25), Float32(1.0))
    return x * factor * cute.arch.rcp_approx(y * factor)


def _sin_and_cos(x: Any, quarters: int) -> Any:
    """sin(x + quarters * pi / 2) in float32, by its series; exact to rounding up to 2^27 at least.

    The library's function for large numbers has an array in local memory.
    """
    wide = x.to(Float64)
    turns = cute.math.roundeven(wide * Float64(2.0 / math.pi))
    rest = (wide - turns * Float64(math.pi / 2.0)).to(Float32)
    quarter = (turns.to(cutlass.Int64) + quarters).to(Int32) & 3
    square = rest * rest
    sine, cosine = (
        _series(square, [(-1.0) ** n / math.factorial(2 * n + odd) for n in range(6)]) for odd in (1, 0)
    )
    found = cutlass.select_((quarter & 1) == 1, cosine, sine * rest)
    return cutlass.select_(quarter >= 2, -found, found)


def _series(x: Any, coefficients: Sequence[float]) -> Any:
    result = Float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + Float32(coefficient)
    return result


def _power(dtype: str, x: Any, exponent: Any) -> Any:
    """A power with a known exponent, by the operations that torch has for it."""
    kind = type(x)
    if is_integer(dtype):
        result = kind(1)
        for _ in range(int(exponent)):
            result = _rounded(dtype, result * x)
        return result
    # Those of POWERS.
    known: dict[float, Callable[[], Any]] = {
        0.0: lambda: kind(1.0),
        0.5: lambda: cute.math.sqrt(x),
        1.0: lambda: x,
        2.0: lambda: x * x,
        3.0: lambda: x * x * x,
        -0.5: lambda: kind(1.0) / cute.math.sqrt(x),
        -1.0: lambda: kind(1.0) / x,
        -2.0: lambda: kind(1.0) / (x * x),
    }
    made = known.get(float(exponent))
    return cute.math.pow(x, kind(float(exponent))) if made is None else made()


_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
_LOGIC: dict[str, Callable[..., Any]] = {
    "logical_and": lambda x, y: x & y,
    "logical_or": lambda x, y: x | y,
    "logical_xor": lambda x, y: x ^ y,
    "logical_not": lambda x: x ^ Boolean(True),
}
_LIBRARY: dict[str, Callable[..., Any]] = {
    "exp": cute.math.exp,
    "exp2": cute.math.exp2,
    "expm1": cute.math.expm1,
    "log": cute.math.log,
    "log2": cute.math.log2,
    "log1p": cute.math.log1p,
    "log10": cute.math.log10,
    "tanh": tanh,
    "sigmoid": _sigmoid,
    "erf": cute.math.erf,
    "sin": lambda x: _sin_and_cos(x, 0),
    "cos": lambda x: _sin_and_cos(x, 1),
    "tan": lambda x: _sin_and_cos(x, 0) / _sin_and_cos(x, 1),
    "sinh": cute.math.sinh,
    "cosh": cute.math.cosh,
    "asin": cute.math.asin,
    "acos": cute.math.acos,
    "atan": cute.math.atan,
    "atan2": cute.math.atan2,
}
"""Functions in float32."""
_ANY: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "maximum": _larger,
    "minimum": _smaller,
    "abs": lambda x: cutlass.select_(x < type(x)(0), -x, x),
    "neg": lambda x: -x,
    "sign": _sign,
    "relu": lambda x: _larger(x, type(x)(0)),
}
_INTEGER: dict[str, Callable[..., Any]] = {
    "div_floor": _int_div_floor,
    "div_trunc": _quotient,
    "remainder": _int_remainder,
    "fmod": _rest,
    "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_xor": lambda x, y: x ^ y,
    "bitwise_not": lambda x: x ^ type(x)(-1 if type(x).signed else 255),
    "bitwise_left_shift": _shift_left,
    "bitwise_right_shift": _shift_right,
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), lambda x: x),
}
_FLOATING: dict[str, Callable[..., Any]] = {
    "abs": lambda x: cute.math.abs(x),
    "div": lambda x, y: x / y,
    "divided_by": _divided_by,
    "quotient": _fast_quotient,
    "div_floor": _float_div_floor,
    "remainder": _float_remainder,
    "fmod": _float_rest,
    "pow": cute.math.pow,
    "reciprocal": lambda x: type(x)(1.0) / x,
    "sqrt": cute.math.sqrt,
    "rsqrt": lambda x: type(x)(1.0) / cute.math.sqrt(x),
    "floor": cute.math.floor,
    "ceil": cute.math.ceil,
    "round": cute.math.roundeven,
    "trunc": cute.math.trunc,
}
_BOOLEAN: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x | y,
    "mul": lambda x, y: x & y,
    "maximum": lambda x, y: x | y,
    "minimum": lambda x, y: x & y,
    "bitwise_and": lambda x, y: x & y,
    "bitwise_or": lambda x, y: x | y,
    "bitwise_xor": lambda x, y: x ^ y,
    "bitwise_not": lambda x: x ^ Boolean(True),
    "abs": lambda x: x,
    "neg": lambda x: x ^ Boolean(True),
}
