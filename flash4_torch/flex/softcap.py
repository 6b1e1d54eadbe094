"""Score mods that are softcap: cap * tanh(score / cap), however it is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from .program import Program, Ref, parse

_WORKING = ("float32", "float64")
_SAME = 1e-6
"""How far the factors before and after tanh may be off being inverse, relative: as numbers written in float32
are."""
_LEAST = 2.0**-126
"""Scores are divided by a cap, in float32."""


def of(text: str, scalars: Sequence[float]) -> float:
    """The cap of a score_mod with these scalars; 0 if it is no softcap."""
    program = _candidate(text)
    if program is None:
        return 0.0
    outer, at = _factor(program, program.outputs[0], scalars)
    node = program.node(at)
    if node is None or node.op != "tanh":
        return 0.0
    inner, at = _factor(program, node.args[0], scalars)
    if at != Ref(0) or not abs(outer * inner - 1.0) <= _SAME:
        return 0.0
    cap = abs(outer)
    return cap if _LEAST <= cap < math.inf else 0.0


@lru_cache(maxsize=256)
def _candidate(text: str) -> Program | None:
    """The program, if it has one tanh of the score, and computes in the score's own dtype."""
    program = parse(text)
    dtype, nodes = program.inputs[0], program.nodes
    is_one = dtype in _WORKING and all(node.dtype == dtype and not node.shape for node in nodes)
    has_tanh = [node.op for node in nodes].count("tanh") == 1
    return program if is_one and has_tanh and not program.tensors else None


def _factor(program: Program, ref: Ref, scalars: Sequence[float]) -> tuple[float, Ref]:
    """A value as a number times another one, which is no product with a number."""
    factor = 1.0
    while (node := program.node(ref)) is not None:
        numbers = [_number(program, arg, scalars) for arg in node.args]
        if node.op == "neg":
            factor, ref = -factor, node.args[0]
        elif node.op == "mul" and numbers[1] is not None:
            factor, ref = factor * numbers[1], node.args[0]
        elif node.op == "mul" and numbers[0] is not None:
            factor, ref = factor * numbers[0], node.args[1]
        elif node.op == "div" and numbers[1]:
            factor, ref = factor / numbers[1], node.args[0]
        else:
            break
    return factor, ref


def _number(program: Program, ref: object, scalars: Sequence[float]) -> float | None:
    """The number that a value is, if no score is needed to know it."""
    if not isinstance(ref, Ref):
        return None
    if program.first_scalar <= ref.value < program.first_node:
        return float(scalars[ref.value - program.first_scalar])
    node = program.node(ref)
    if node is None:
        return None
    if node.op == "constant":
        return float(node.args[0])
    numbers = [x for arg in node.args if (x := _number(program, arg, scalars)) is not None]
    if len(numbers) < len(node.args):
        return None
    if node.op == "reciprocal" and numbers[0]:
        return 1.0 / numbers[0]
    if node.op == "mul":
        return numbers[0] * numbers[1]
    if node.op == "div" and numbers[1]:
        return numbers[0] / numbers[1]
    return None
