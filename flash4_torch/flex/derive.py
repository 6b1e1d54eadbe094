"""The derivative of a score program, again a program: it recomputes what it needs of the forward.

Differentiated are the score and every element that the program takes from a captured tensor. What is computed
for one score is then a sum over scores: a kernel adds each element's gradient to the place it came from.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import TraceError
from ..reference.programs import values
from .build import Lane, Symbol, Unsupported, resumed, translate
from .program import Derivative, Gather, Program, Ref
from .trace import recorded


@lru_cache(maxsize=256)
def derivative(program: Program, wanted: tuple[bool, ...]) -> Derivative:
    """The derivative of a score program, for the captured tensors that want a gradient."""
    # An operator's kernel runs with autograd switched off below it; a thread of its own has autograd.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_derivative, program, wanted).result()


def _derivative(program: Program, wanted: tuple[bool, ...]) -> Derivative:
    first, score_dtype = program.first_node, getattr(torch, program.inputs[0])
    gathers = [i for i, node in enumerate(program.nodes) if node.op == "gather"]
    differentiable = [i for i in gathers if wanted[program.nodes[i].args[0].value - program.first_tensor]]

    def gradients(grad: Tensor, *arguments: Tensor) -> list[Tensor]:
        inputs = list(arguments[: len(program.inputs)])
        scalars = arguments[len(inputs) : len(inputs) + len(program.scalars)]
        given = dict(zip(gathers, arguments[len(inputs) + len(scalars) :], strict=True))
        with torch.enable_grad():
            inputs[0] = inputs[0].detach().requires_grad_()
            for i in differentiable:
                given[i] = given[i].detach().requires_grad_()
            nothing: list[Tensor] = [torch.empty(())] * len(program.tensors)
            numbers = {first + i: x for i, x in given.items()}
            result = values(program, inputs, nothing, scalars, lanes=0, gathers=numbers)[
                program.outputs[0].value
            ]
            sources = [inputs[0], *(given[i] for i in differentiable)]
            if not result.requires_grad:
                return [torch.zeros_like(x) for x in sources]
            found = torch.autograd.grad(result, sources, grad, allow_unused=True)
        return [torch.zeros_like(x) if y is None else y for x, y in zip(sources, found, strict=True)]

    with FakeTensorMode():
        numbers = [
            torch.zeros((), dtype=getattr(torch, name)) for name in (*program.inputs, *program.scalars)
        ]
        arrays = [
            torch.zeros(program.nodes[i].shape, dtype=getattr(torch, program.nodes[i].dtype)) for i in gathers
        ]
        grad = torch.zeros((), dtype=score_dtype)
        graph = recorded(gradients, grad, *numbers, *arrays)

    builder, symbol = resumed(program, lifts=False)
    builder.inputs.append(score_dtype)
    lanes = [Lane(Symbol("input", len(program.inputs)), score_dtype)]
    lanes += [Lane(Symbol("input", i), dtype) for i, dtype in enumerate(builder.inputs[:-1])]
    lanes += [Lane(Symbol("scalar", i), dtype) for i, dtype in enumerate(builder.scalars)]
    for i in gathers:
        node = program.nodes[i]
        lanes.append(Lane(Symbol("node", i), getattr(torch, node.dtype), node.shape))
    try:
        found = translate(graph.graph, builder, lanes)
    except Unsupported as error:
        where = "its derivative was to be derived"
        raise TraceError(
            "score_mod", "in the backward", str(error.node.target), error.reason, where
        ) from None
    outputs = [builder.unrounded(x) if isinstance(x, Lane) else builder.number(x, score_dtype) for x in found]
    indices: dict[int, int] = {}
    for i in differentiable:
        for ref in program.nodes[i].args[1:]:
            if isinstance(ref, Ref) and ref.value not in indices:
                indices[ref.value] = len(outputs)
                outputs.append(Lane(symbol(ref), torch.int64))
    made = builder.finish(outputs)

    def moved(i: int) -> Gather:
        source, *positions = program.nodes[i].args
        places = [made.outputs[indices[x.value]] if isinstance(x, Ref) else x for x in positions]
        args = (Ref(source.value + 1), *places)
        return Gather(source.value - program.first_tensor, program.nodes[i]._replace(args=args))

    return Derivative(made, tuple(map(moved, differentiable)))
