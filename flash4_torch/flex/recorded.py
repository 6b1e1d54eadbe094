"""A user's function as Dynamo records it: a graph, whose arguments are what the function captures.

What depends on no index is computed at once, in the modes of the caller, so that symbols and gradients stay
what they are. The rest is a function again, of the indices and of these results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TraceError
from .build import side_effect

_LINE = re.compile(r'File "(.*)", line (\d+), in (.*)\n\s*(.*)')


class _Pure(TorchDispatchMode):
    """Refuses operations whose results or effects a backward could not repeat."""

    def __init__(self, refuse: Callable[[Any, str], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if reason := side_effect(function):
            self._refuse(function, reason)
        return function(*args, **(kwargs or {}))


class Recorded(fx.Interpreter):
    """The part of a graph that depends on indices: a function of them, and of `extra` after them."""

    def __init__(self, graph: fx.GraphModule, kind: str, lanes: int, captured: Sequence[Any]) -> None:
        """kind: score_mod or mask_mod. captured: the graph's arguments after its `lanes`."""
        super().__init__(graph)
        self._kind = kind
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._lanes = placeholders[:lanes]
        self._current: fx.Node | None = None
        known: dict[fx.Node, Any] = dict(zip(placeholders[lanes:], captured, strict=True))
        depends = set(self._lanes)
        self._steps: list[fx.Node] = []
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if any(x in depends for x in node.all_input_nodes):
                depends.add(node)
                self._steps.append(node)
            else:
                self.env, self._current = dict(known), node
                with _Pure(self._refuse):
                    known[node] = self.run_node(node)
        (self._output,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        if isinstance(self._output, (tuple, list)):
            (self._output,) = self._output
        wanted = {x for node in self._steps for x in node.all_input_nodes if x in known}
        if isinstance(self._output, fx.Node) and self._output in known:
            wanted.add(self._output)
        self._beside = [node for node in known if node in wanted and isinstance(known[node], Tensor)]
        self._known = {node: known[node] for node in wanted if node not in self._beside}
        self.extra = tuple(known[node] for node in self._beside)

    def __call__(self, *arguments: Tensor) -> Any:
        self.env = {**self._known, **dict(zip([*self._lanes, *self._beside], arguments, strict=True))}
        for node in self._steps:
            self._current = node
            self.env[node] = self.run_node(node)
        output = self._output
        return self.env[output] if isinstance(output, fx.Node) else output

    def _refuse(self, operation: Any, reason: str) -> None:
        raise TraceError(self._kind, self.label, str(operation), reason, self.where)

    @property
    def where(self) -> str:
        """File, line and text of the user's line that is being run, '' if unknown."""
        return "{}:{}: {}".format(*line[:2], line[3]) if (line := self._line()) else ""

    @property
    def label(self) -> str:
        """The user's function's name for messages."""
        return line[2] if (line := self._line()) else "in a compiled call"

    def _line(self) -> tuple[str, ...]:
        lines = _LINE.findall((self._current and self._current.meta.get("stack_trace")) or "")
        return lines[-1] if lines else ()
