"""Programs of score_mod and mask_mod in plain torch, evaluated for a tile of scores at once.

A value that a program computes for each score is a tensor (b, Hq, rows, keys, ...): four lane dimensions,
each of size 1 where the value does not depend on it, then the value's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..flex import table
from ..flex.program import Node, Program, Ref, refs

LANES = 4

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "neg": lambda x: ~x if x.dtype == torch.bool else -x,
    "sign": torch.sgn,
}


def function_of(op: str) -> Callable[..., Tensor]:
    """The elementwise function of that name in `table`."""
    found: Callable[..., Tensor] = _FUNCTIONS.get(op) or getattr(torch, op)
    return found


_ELEMENTWISE = (
    table.ARITHMETIC | table.COMPARISONS | table.LOGIC | table.FLOATING | table.UNARY | {"where", "clamp"}
)


def values(
    program: Program,
    inputs: Sequence[Tensor],
    tensors: Sequence[Tensor],
    scalars: Sequence[Tensor],
    lanes: int = LANES,
    gathers: Mapping[int, Tensor] | None = None,
    clamps: bool = False,
) -> list[Tensor]:
    """All values of a program, by number.

    `inputs` have `lanes` dimensions, which broadcast against each other; scalars are 0-dim tensors of their
    dtypes, or anything that broadcasts. `gathers` are values of nodes, by number, that are given. With
    `clamps`, indices outside of their tensors are clamped into them.
    """
    known = [*inputs, *tensors, *scalars]
    ranks = [0] * len(known)
    for number, node in enumerate(program.nodes, len(known)):
        given = None if gathers is None else gathers.get(number)
        known.append(_value(node, known, ranks, lanes, clamps) if given is None else given)
        ranks.append(len(node.shape))
    return known


def evaluate(
    program: Program,
    inputs: Sequence[Tensor],
    tensors: Sequence[Tensor],
    scalars: Sequence[Tensor],
    clamps: bool = False,
) -> list[Tensor]:
    """The outputs of a program for a tile: `inputs` are (b, Hq, rows, keys) or broadcast to it."""
    known = values(program, inputs, tensors, scalars, clamps=clamps)
    return [known[ref.value] for ref in program.outputs]


def scalar_tensors(program: Program, scalars: Sequence[float], device: torch.device) -> list[Tensor]:
    """The scalars as tensors of their dtypes."""
    pairs = zip(program.scalars, scalars, strict=True)
    return [_cast(value, getattr(torch, name), device) for name, value in pairs]


def _cast(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    number = value if dtype.is_floating_point else int(value)
    return torch.tensor(number, dtype=dtype, device=device).view((1,) * LANES)


def _value(node: Node, known: list[Tensor], ranks: list[int], lanes: int, clamps: bool) -> Tensor:
    dtype: torch.dtype = getattr(torch, node.dtype)
    if node.op == "constant":
        device = known[0].device
        return torch.full((1,) * lanes, node.args[0], dtype=dtype, device=device)
    if node.op == "gather":
        return gathered(node, known, lanes, clamps)
    x = known[node.args[0].value]
    if node.op == "convert":
        return x.to(dtype)
    if node.op == "detach":
        return x.detach()
    if node.op == "sum":
        _, dims, keeps = node.args
        return x if not dims else x.sum([dim + lanes for dim in dims], keepdim=keeps).to(dtype)
    if node.op == "view":
        return x.reshape((*x.shape[:lanes], *node.shape))
    if node.op == "expand":
        rank = len(node.shape)
        return _aligned(x, ranks[node.args[0].value], rank, lanes).expand((*x.shape[:lanes], *node.shape))
    if node.op not in _ELEMENTWISE:
        raise AssertionError(f"{node.op} is not in the table")
    rank = len(node.shape)
    operands = [
        _aligned(known[arg.value], ranks[arg.value], rank, lanes) if isinstance(arg, Ref) else arg
        for arg in node.args
    ]
    return function_of(node.op)(*operands).to(dtype)


def _aligned(x: Tensor, own: int, rank: int, lanes: int) -> Tensor:
    """An operand with own dimensions of size 1 inserted behind the lanes, up to `rank`."""
    return x if own == rank else x.reshape((*x.shape[:lanes], *(1,) * (rank - own), *x.shape[lanes:]))


def gathered(node: Node, known: Sequence[Tensor], lanes: int = LANES, clamps: bool = False) -> Tensor:
    """Elements of a captured tensor for each score."""
    tensor, indices, rest = _by_index(node, known)
    if clamps:
        sizes = zip((i.long() for i in indices), tensor.shape, strict=False)
        indices = tuple(torch.where(i < 0, i + n, i).clamp(0, n - 1) for i, n in sizes)
    if not indices:
        return rest.reshape((*(1,) * lanes, *rest.shape))
    found: Tensor = tensor[indices]
    return found


def _by_index(node: Node, known: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """The tensor with fixed indices taken and indexed dimensions first, their indices, and the former."""
    source, *positions = node.args
    tensor = known[source.value]
    dims: list[int] = []
    indices: list[Tensor] = []
    dim = 0
    for position in positions:
        if isinstance(position, int) and not isinstance(position, Ref):
            tensor = tensor.select(dim, position)
            continue
        if position is not None:
            dims.append(dim)
            indices.append(known[position.value])
        dim += 1
    return tensor.movedim(dims, tuple(range(len(dims)))), tuple(indices), tensor


def add_gradient(total: Tensor, node: Node, known: Sequence[Tensor], gradient: Tensor) -> None:
    """Adds to `total`, shaped like a captured tensor, the gradient of what a gather node took from it.

    `gradient` is (b, Hq, rows, keys, ...). `known` holds the values of the node's indices; that of the tensor
    is not read.
    """
    source, *_ = node.args
    values_of = {ref.value: known[ref.value] for ref in refs(node.args) if ref != source}
    tensor, indices, _ = _by_index(node, _Sparse({**values_of, source.value: total}))
    if not indices:
        tensor += gradient.sum(tuple(range(LANES))).to(total.dtype)
        return
    lanes = torch.broadcast_shapes(*(index.shape for index in indices))
    reduced = gradient.sum_to_size(*lanes, *gradient.shape[LANES:]).to(total.dtype)
    tensor.index_put_(tuple(index.long() for index in indices), reduced, accumulate=True)


class _Sparse(Sequence[Tensor]):
    """Values of which only some are known."""

    def __init__(self, known: Mapping[int, Tensor]) -> None:
        self._known = known

    def __getitem__(self, number: Any) -> Any:
        return self._known[number]

    def __len__(self) -> int:
        return max(self._known) + 1
