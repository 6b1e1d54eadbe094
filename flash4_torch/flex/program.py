"""A traced score_mod or mask_mod as plain data: no torch in it, so that any lowering may read it.

A program computes numbers for one score, from that score and its indices (the *lane inputs*), elements of
captured tensors, and scalars. A value is a number, or a small array of fixed sizes for each score, such as
the row of an embedding table that two indices select.

Values are numbered: first the lane inputs, then the tensors, the scalars, and the nodes in an order in which
each node comes after what it uses. The values of scalars, the data, sizes and strides of tensors are
arguments of a call and no part of a program, unless they decided its structure.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Any, NamedTuple


class Ref(NamedTuple):
    """The number of a value."""

    value: int


class Node(NamedTuple):
    """One operation of `table.OPERATIONS`."""

    op: str
    args: tuple[Any, ...]
    """References to values, literals (None, bools, numbers, names of dtypes), and tuples of them."""
    dtype: str
    shape: tuple[int, ...] = ()
    """Sizes of the array that it gives for each score; () is a number."""


class TensorType(NamedTuple):
    """What a program knows of a captured tensor."""

    dtype: str
    rank: int


class Program(NamedTuple):
    """The computation of one score, or of whether it is seen; equal programs need one kernel."""

    inputs: tuple[str, ...]
    """The dtypes of the lane inputs: [score,] b, h, q_idx, kv_idx [, gradient of the result]."""
    tensors: tuple[TensorType, ...]
    scalars: tuple[str, ...]
    """The scalars' dtypes."""
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]

    @property
    def first_tensor(self) -> int:
        return len(self.inputs)

    @property
    def first_scalar(self) -> int:
        return self.first_tensor + len(self.tensors)

    @property
    def first_node(self) -> int:
        """The number of the first node's value."""
        return self.first_scalar + len(self.scalars)

    def reads(self, value: int) -> bool:
        """Whether a node or an output is, or is made from, the value of that number."""
        return any(ref.value == value for ref in refs((*self.outputs, *(node.args for node in self.nodes))))

    @property
    def key(self) -> str:
        """A hash of the program, the same in every process."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def text(self) -> str:
        """The program as JSON, which `parse` reads."""
        nodes = [[n.op, _to_json(n.args), n.dtype, n.shape] for n in self.nodes]
        outputs = [ref.value for ref in self.outputs]
        return json.dumps([self.inputs, self.tensors, self.scalars, nodes, outputs], separators=(",", ":"))

    def node(self, ref: Ref) -> Node | None:
        """The node that computes a value, None for a lane input, a tensor or a scalar."""
        at = ref.value - self.first_node
        return self.nodes[at] if at >= 0 else None


def parse(text: str) -> Program:
    """The program that `Program.text` wrote."""
    inputs, tensors, scalars, nodes, outputs = json.loads(text)
    return Program(
        tuple(inputs),
        tuple(TensorType(dtype, rank) for dtype, rank in tensors),
        tuple(scalars),
        tuple(Node(op, _from_json(args), dtype, tuple(shape)) for op, args, dtype, shape in nodes),
        tuple(Ref(value) for value in outputs),
    )


class Gather(NamedTuple):
    """A gather whose elements have a gradient."""

    tensor: int
    """The captured tensor's place among the program's tensors."""
    node: Node
    """The node in the derivative's program; its references to indices are among the program's outputs."""


class Derivative(NamedTuple):
    """The program of all gradients of one score.

    Its inputs are the forward's and last the gradient of the result; its outputs the gradient of the score,
    one for each of `gathers`, and then the indices of these.
    """

    program: Program
    gathers: tuple[Gather, ...]

    @property
    def tensors(self) -> tuple[int, ...]:
        """Places of the captured tensors that gradients are added to, in ascending order."""
        return tuple(sorted({gather.tensor for gather in self.gathers}))

    def text(self) -> str:
        """The derivative as JSON, which `parse_derivative` reads."""
        gathers = [[tensor, [n.op, _to_json(n.args), n.dtype, n.shape]] for tensor, n in self.gathers]
        return json.dumps([self.program.text(), gathers], separators=(",", ":"))


@lru_cache(maxsize=256)
def parse_derivative(text: str) -> Derivative:
    """The derivative that `Derivative.text` wrote."""
    program, gathers = json.loads(text)
    found = (
        Gather(tensor, Node(op, _from_json(args), dtype, tuple(shape)))
        for tensor, (op, args, dtype, shape) in gathers
    )
    return Derivative(parse(program), tuple(found))


@lru_cache(maxsize=256)
def reads_score(derivative: str) -> bool:
    """Whether the derivative of that text depends on the score, which kernels then keep."""
    return parse_derivative(derivative).program.reads(0)


def refs(args: Any) -> list[Ref]:
    """All references among a node's arguments, in order."""
    if isinstance(args, Ref):
        return [args]
    return [ref for arg in args for ref in refs(arg)] if isinstance(args, tuple) else []


def _to_json(arg: Any) -> Any:
    if isinstance(arg, Ref):
        return {"ref": arg.value}
    return [_to_json(x) for x in arg] if isinstance(arg, tuple) else arg


def _from_json(arg: Any) -> Any:
    if isinstance(arg, dict):
        return Ref(arg["ref"])
    return tuple(_from_json(x) for x in arg) if isinstance(arg, list) else arg
