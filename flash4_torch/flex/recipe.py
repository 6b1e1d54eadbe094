"""The tensors of a call, computed anew from captured ones as they were when a function was traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from .program import Program


class _Value(NamedTuple):
    """The number of a captured tensor, or of a step's result after these."""

    number: int


class _Step(NamedTuple):
    target: Callable[..., Any]
    args: Any
    kwargs: Any


class Recipe(NamedTuple):
    """A program, and how its arguments come from the tensors that a function reads."""

    program: Program
    text: str
    scalars: tuple[float, ...]
    steps: tuple[_Step, ...]
    wanted: tuple[_Value, ...]

    @classmethod
    def of(
        cls,
        program: Program,
        scalars: tuple[float, ...],
        wanted: Sequence[fx.Node],
        place_of: Callable[[fx.Node], int | None],
        captured: int,
    ) -> Recipe | None:
        """A recipe for nodes of a graph; None if one reads what is not among the `captured` tensors.

        `place_of` tells a captured tensor's place by the node that reads it.
        """
        numbers: dict[fx.Node, _Value] = {}
        steps: list[_Step] = []

        def add(node: fx.Node) -> bool:
            if node in numbers:
                return True
            if node.op == "get_attr":
                place = place_of(node)
                if place is None:
                    return False
                numbers[node] = _Value(place)
                return True
            if node.op != "call_function" or not all(map(add, node.all_input_nodes)):
                return False
            args, kwargs = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
            numbers[node] = _Value(captured + len(steps))
            steps.append(_Step(node.target, args, kwargs))  # type: ignore[arg-type]
            return True

        if not all(map(add, wanted)):
            return None
        return cls(program, program.text(), scalars, tuple(steps), tuple(numbers[node] for node in wanted))

    def tensors(self, captured: Sequence[Tensor]) -> list[Tensor]:
        values: list[Any] = list(captured)
        for step in self.steps:
            args, kwargs = _filled((step.args, step.kwargs), values)
            values.append(step.target(*args, **kwargs))
        return [values[value.number] for value in self.wanted]


def _filled(x: Any, values: Sequence[Any]) -> Any:
    """Arguments with values in the places of their numbers."""
    if isinstance(x, _Value):
        return values[x.number]
    if isinstance(x, (tuple, list)):
        return type(x)([_filled(each, values) for each in x])
    if isinstance(x, dict):
        return {name: _filled(each, values) for name, each in x.items()}
    return x
