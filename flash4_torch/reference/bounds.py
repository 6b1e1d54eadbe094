"""Bounds of a program's values over boxes of positions: interval arithmetic in plain torch.

A box is a range of each lane input, b, h, q_idx and kv_idx. What comes out for a mask_mod says of many boxes
at once that all of their scores are seen, that none is, or that neither is known. Bounds hold for the numbers
that torch computes, roundings included, since rounding keeps an order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..flex.program import Node, Program, Ref
from .programs import LANES

_WHOLE = {getattr(torch, name) for name in ("uint8", "int8", "int16", "int32", "int64")}
_REAL = {torch.float32, torch.float64}
_MOST = 1 << 62
"""Whole numbers are bounded in int64."""


class Bounds(NamedTuple):
    """lowest <= value <= highest in each box; bools are bounded as False <= True."""

    lowest: Tensor
    """Whole numbers are int64 here, whatever the value's dtype; others have the value's."""
    highest: Tensor
    least: float
    """What no box goes below; whole numbers are ints."""
    most: float


Known = Bounds | None
"""None: nothing is known of a value."""


def whole(lowest: Tensor, highest: Tensor, least: int, most: int) -> Bounds:
    """Bounds of positions."""
    return Bounds(lowest.long(), highest.long(), least, most)


def of_result(
    program: Program, inputs: Sequence[Bounds], tensors: Sequence[Tensor], scalars: Sequence[Tensor]
) -> Known:
    """Bounds of a program's result; `inputs` of those lanes, which broadcast against each other."""
    known: list[Known | Tensor] = [*inputs, *tensors, *map(_of_scalar, scalars)]
    for node in program.nodes:
        known.append(_of(node, known))
    found = known[program.outputs[0].value]
    return found if isinstance(found, Bounds) else None


def _of_scalar(x: Tensor) -> Known:
    return _point(x.dtype, x.item(), x.device)


def _point(dtype: torch.dtype, number: float, device: torch.device) -> Known:
    if dtype not in _WHOLE | _REAL | {torch.bool} or not math.isfinite(number):
        return None
    x = torch.full((1,) * LANES, number, dtype=torch.int64 if dtype in _WHOLE else dtype, device=device)
    return Bounds(x, x, number, number)


def _of(node: Node, known: Sequence[Known | Tensor]) -> Known:
    dtype: torch.dtype = getattr(torch, node.dtype)
    if node.shape or dtype not in _WHOLE | _REAL | {torch.bool}:
        return None
    if node.op == "constant":
        return _point(dtype, node.args[0], next(x for x in known if x is not None)[0].device)
    if node.op == "gather":
        return _of_gather(node, known)
    operands: list[Bounds] = []
    for arg in node.args:
        if arg is None and node.op == "clamp":
            continue
        x = known[arg.value] if isinstance(arg, Ref) else None
        if not isinstance(x, Bounds):
            return None
        operands.append(x)
    if node.op == "clamp":
        return _clamped(node, operands, dtype)
    rule = _RULES.get(node.op)
    return None if rule is None else rule(dtype, *operands)


def _checked(dtype: torch.dtype, lowest: Tensor, highest: Tensor, least: float, most: float) -> Known:
    """Bounds, unless a number may be out of the range of its dtype."""
    if dtype == torch.bool:
        return Bounds(lowest, highest, least, most)
    if not (math.isfinite(least) and math.isfinite(most)):
        return None
    if dtype in _WHOLE:
        info = torch.iinfo(dtype)
        fits = max(info.min, -_MOST) <= least and most <= min(info.max, _MOST)
        return Bounds(lowest, highest, least, most) if fits else None
    return Bounds(lowest, highest, least, most) if max(-least, most) < torch.finfo(dtype).max / 2 else None


def _corners(function: Callable[..., Tensor], numbers: Callable[..., float]) -> Callable[..., Known]:
    """The rule of a function whose extremes over a box are at its corners."""

    def rule(dtype: torch.dtype, *operands: Bounds) -> Known:
        if dtype == torch.bool:
            return None
        ends = [(x.least, x.most) for x in operands]
        outer = [numbers(*corner) for corner in itertools.product(*ends)]
        if not all(math.isfinite(x) and abs(x) < _MOST for x in outer):
            return None
        found = [function(*corner) for corner in itertools.product(*(x[:2] for x in operands))]
        lowest, highest = found[0], found[0]
        for x in found[1:]:
            lowest, highest = torch.minimum(lowest, x), torch.maximum(highest, x)
        return _checked(dtype, lowest, highest, min(outer), max(outer))

    return rule


def _add(dtype: torch.dtype, x: Bounds, y: Bounds) -> Known:
    if dtype == torch.bool:
        return _or(dtype, x, y)
    return _checked(dtype, x.lowest + y.lowest, x.highest + y.highest, x.least + y.least, x.most + y.most)


def _sub(dtype: torch.dtype, x: Bounds, y: Bounds) -> Known:
    return _add(dtype, x, _negative(y)) if dtype != torch.bool else None


def _negative(x: Bounds) -> Bounds:
    return Bounds(-x.highest, -x.lowest, -x.most, -x.least)


def _neg(dtype: torch.dtype, x: Bounds) -> Known:
    return None if dtype == torch.bool else _checked(dtype, *_negative(x))


def _mul(dtype: torch.dtype, x: Bounds, y: Bounds) -> Known:
    return _and(dtype, x, y) if dtype == torch.bool else _TIMES(dtype, x, y)


def _abs(dtype: torch.dtype, x: Bounds) -> Known:
    if dtype == torch.bool:
        return x
    zero = torch.zeros_like(x.lowest)
    lowest = torch.maximum(torch.maximum(x.lowest, -x.highest), zero)
    highest = torch.maximum(-x.lowest, x.highest)
    return _checked(dtype, lowest, highest, 0, max(-x.least, x.most))


def _maximum(dtype: torch.dtype, x: Bounds, y: Bounds) -> Known:
    if dtype == torch.bool:
        return _or(dtype, x, y)
    ends = torch.maximum(x.lowest, y.lowest), torch.maximum(x.highest, y.highest)
    return Bounds(*ends, max(x.least, y.least), max(x.most, y.most))


def _minimum(dtype: torch.dtype, x: Bounds, y: Bounds) -> Known:
    if dtype == torch.bool:
        return _and(dtype, x, y)
    ends = torch.minimum(x.lowest, y.lowest), torch.minimum(x.highest, y.highest)
    return Bounds(*ends, min(x.least, y.least), min(x.most, y.most))


def _clamped(node: Node, operands: list[Bounds], dtype: torch.dtype) -> Known:
    if dtype == torch.bool:
        return None
    x, *limits = operands
    found: Known = x
    for arg, rule in zip(node.args[1:], (_maximum, _minimum), strict=False):
        if arg is not None and found is not None:
            found = rule(dtype, found, limits.pop(0))
    return found


def _quotient(rounding: str) -> Callable[..., Known]:
    """The rule of a quotient of whole numbers, rounded: it has an order where the divisor has one sign."""

    def exact(x: float, y: float) -> float:
        down = int(x) // int(y)
        return down + 1 if rounding == "trunc" and down < 0 and down * y != x else down

    at_corners = _corners(lambda x, y: torch.div(x, y, rounding_mode=rounding), exact)

    def rule(dtype: torch.dtype, x: Bounds, y: Bounds) -> Known:
        return at_corners(dtype, x, y) if dtype in _WHOLE and (y.least > 0 or y.most < 0) else None

    return rule


def _remainder(dtype: torch.dtype, x: Bounds, y: Bounds) -> Known:
    """The remainder of whole numbers by one positive number: in order while the quotient is one number."""
    if dtype not in _WHOLE or y.least != y.most or y.least <= 0:
        return None
    divisor = int(y.most)
    is_one = x.lowest // divisor == x.highest // divisor
    lowest = torch.where(is_one, x.lowest % divisor, 0)
    highest = torch.where(is_one, x.highest % divisor, divisor - 1)
    return Bounds(lowest, highest, 0, divisor - 1)


def _true_quotient(dtype: torch.dtype, x: Bounds, y: Bounds) -> Known:
    if dtype not in _REAL or not max(y.least, -y.most) >= torch.finfo(dtype).tiny:
        return None
    return _DIVIDED(dtype, x, y)


def _convert(dtype: torch.dtype, x: Bounds) -> Known:
    source = x.lowest.dtype
    if source == torch.bool:
        return x if dtype == torch.bool else _from_bool(dtype, x)
    if dtype == torch.bool:
        return _ne(dtype, x, Bounds(torch.zeros_like(x.lowest), torch.zeros_like(x.lowest), 0, 0))
    if dtype in _WHOLE:
        ends = (x.lowest.long(), x.highest.long()) if source in _REAL else x[:2]
        return _checked(dtype, *ends, math.trunc(x.least), math.trunc(x.most)) if abs_of(x) < _MOST else None
    # Rounding of a whole number or to a narrower dtype keeps the order, but may leave the outer bounds.
    least, most = (torch.tensor(n, dtype=torch.float64).to(dtype).item() for n in (x.least, x.most))
    return _checked(dtype, x.lowest.to(dtype), x.highest.to(dtype), least, most)


def abs_of(x: Bounds) -> float:
    """What no box's absolute numbers go above."""
    return max(-x.least, x.most)


def _from_bool(dtype: torch.dtype, x: Bounds) -> Bounds:
    kind = torch.int64 if dtype in _WHOLE else dtype
    return Bounds(x.lowest.to(kind), x.highest.to(kind), 0, 1)


def _bools(lowest: Tensor, highest: Tensor) -> Bounds:
    return Bounds(lowest, highest, 0, 1)


def _lt(_: torch.dtype, x: Bounds, y: Bounds) -> Bounds:
    return _bools(x.highest < y.lowest, x.lowest < y.highest)


def _le(_: torch.dtype, x: Bounds, y: Bounds) -> Bounds:
    return _bools(x.highest <= y.lowest, x.lowest <= y.highest)


def _eq(_: torch.dtype, x: Bounds, y: Bounds) -> Bounds:
    always = (x.lowest == y.highest) & (x.highest == y.lowest)
    return _bools(always, (x.lowest <= y.highest) & (y.lowest <= x.highest))


def _not(_: torch.dtype, x: Bounds) -> Bounds:
    shown = _truth(x)
    return _bools(~shown.highest, ~shown.lowest)


def _ne(dtype: torch.dtype, x: Bounds, y: Bounds) -> Bounds:
    return _not(dtype, _eq(dtype, x, y))


def _truth(x: Bounds) -> Bounds:
    """Whether a value is not 0."""
    if x.lowest.dtype == torch.bool:
        return x
    return _bools((x.lowest > 0) | (x.highest < 0), (x.lowest != 0) | (x.highest != 0))


def _and(_: torch.dtype, x: Bounds, y: Bounds) -> Bounds:
    x, y = _truth(x), _truth(y)
    return _bools(x.lowest & y.lowest, x.highest & y.highest)


def _or(_: torch.dtype, x: Bounds, y: Bounds) -> Bounds:
    x, y = _truth(x), _truth(y)
    return _bools(x.lowest | y.lowest, x.highest | y.highest)


def _xor(dtype: torch.dtype, x: Bounds, y: Bounds) -> Bounds:
    return _ne(dtype, _truth(x), _truth(y))


def _only_bools(rule: Callable[..., Bounds]) -> Callable[..., Known]:
    return lambda dtype, *operands: rule(dtype, *operands) if dtype == torch.bool else None


def _where(dtype: torch.dtype, condition: Bounds, x: Bounds, y: Bounds) -> Known:
    shown = _truth(condition)
    lower, higher = (
        (torch.logical_and, torch.logical_or) if dtype == torch.bool else (torch.minimum, torch.maximum)
    )
    either = lower(x.lowest, y.lowest), higher(x.highest, y.highest)
    lowest, highest = (
        torch.where(shown.lowest, of_x, torch.where(shown.highest, of_both, of_y))
        for of_x, of_both, of_y in zip(x[:2], either, y[:2], strict=True)
    )
    return Bounds(lowest, highest, min(x.least, y.least), max(x.most, y.most))


def _of_gather(node: Node, known: Sequence[Known | Tensor]) -> Known:
    """Elements at one index that may be any of a range; other indices are one number for all boxes."""
    source, *positions = node.args
    tensor = known[source.value]
    assert isinstance(tensor, Tensor)
    if len(positions) != tensor.dim() or tensor.dtype not in _WHOLE | _REAL | {torch.bool}:
        return None
    ranged: Bounds | None = None
    left = tensor
    # From the last dimension on, so that those before it keep their places.
    for dim in reversed(range(len(positions))):
        position = positions[dim]
        index = known[position.value] if isinstance(position, Ref) else position
        if isinstance(index, Bounds) and index.least == index.most:
            index = int(index.most)
        if isinstance(index, int):
            if not -left.shape[dim] <= index < left.shape[dim]:
                return None
            left = left.select(dim, index)
        elif isinstance(index, Bounds) and ranged is None:
            ranged = index
        else:
            return None
    if ranged is None:
        return _point(tensor.dtype, left.item(), tensor.device)
    if not (0 <= ranged.least and ranged.most < left.shape[0]):
        return None
    return _extremes(left, ranged)


def _extremes(line: Tensor, index: Bounds) -> Known:
    """The least and greatest element of each range of a line, by ranges of powers of two."""
    if line.dtype != torch.bool and not line.isfinite().all():
        return None
    numbers = line.to(torch.uint8) if line.dtype == torch.bool else line
    width = int((index.highest - index.lowest).max()) + 1
    low, high = index.lowest, index.highest
    count = (high - low + 1).double().log2().floor().long()
    ends = []
    for best in (torch.minimum, torch.maximum):
        found, own = torch.zeros_like(low, dtype=numbers.dtype), numbers
        for level in range(width.bit_length()):
            step = 1 << level
            limit = own.shape[0] - 1
            here = best(own[low.clamp(max=limit)], own[(high - step + 1).clamp(0, limit)])
            found = torch.where(count == level, here, found)
            if own.shape[0] <= step:
                break
            own = best(own[:-step], own[step:])
        ends.append(found)
    lowest, highest = ends
    if line.dtype == torch.bool:
        return _bools(lowest.bool(), highest.bool())
    if line.dtype in _WHOLE:
        lowest, highest = lowest.long(), highest.long()
    return Bounds(lowest, highest, numbers.min().item(), numbers.max().item())


_TIMES = _corners(lambda x, y: x * y, lambda x, y: x * y)
_DIVIDED = _corners(lambda x, y: x / y, lambda x, y: x / y)
_RULES: dict[str, Callable[..., Known]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "maximum": _maximum,
    "minimum": _minimum,
    "div": _true_quotient,
    "div_floor": _quotient("floor"),
    "div_trunc": _quotient("trunc"),
    "remainder": _remainder,
    "convert": _convert,
    "detach": lambda _, x: x,
    "lt": _lt,
    "le": _le,
    "gt": lambda dtype, x, y: _lt(dtype, y, x),
    "ge": lambda dtype, x, y: _le(dtype, y, x),
    "eq": _eq,
    "ne": _ne,
    "logical_and": _and,
    "logical_or": _or,
    "logical_xor": _xor,
    "logical_not": _not,
    "bitwise_and": _only_bools(_and),
    "bitwise_or": _only_bools(_or),
    "bitwise_xor": _only_bools(_xor),
    "bitwise_not": _only_bools(_not),
    "where": _where,
}
