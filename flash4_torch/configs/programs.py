"""What programs of score_mod and mask_mod take of a thread's registers."""

from __future__ import annotations

from functools import lru_cache

from ..flex import table
from ..flex.program import Node, Program, parse, parse_derivative, refs

_FEW, _FEW_IN_DERIVATIVE = 8, 16
"""Operations for each score that leave a thread no more to keep than one or two do."""


@lru_cache(maxsize=256)
def is_light(text: str) -> bool:
    """Whether a program loads nothing for each score or key, and has few operations for each score."""
    each = _often(parse(text), rows_are_keys=False)
    return len(each) <= _FEW and not any(node.op == "gather" or node.shape for node in each)


@lru_cache(maxsize=256)
def loads_often(text: str) -> bool:
    """Whether a program loads numbers for each score or key."""
    return any(node.op == "gather" for node in _often(parse(text), rows_are_keys=False))


@lru_cache(maxsize=256)
def are_short(score_mod: str, derivative: str) -> bool:
    """Whether score_mod and its derivative have few operations for each score, where rows are keys."""
    each = _often(parse(score_mod), rows_are_keys=True)
    each_gradient = _often(parse_derivative(derivative).program, rows_are_keys=True)
    return len(each) <= _FEW and len(each_gradient) <= _FEW_IN_DERIVATIVE


def _often(program: Program, *, rows_are_keys: bool) -> list[Node]:
    """The operations that a thread computes again for each score or column of its row."""
    lanes, before = _lanes(program), min(len(program.inputs) - 4, 1)
    b, query, key = before, before + 2, before + 3
    rows = {b, b + 1, key if rows_are_keys else query}
    often = set(range(len(program.inputs))) - rows
    return [node for i, node in enumerate(program.nodes, program.first_node) if lanes[i] & often]


@lru_cache(maxsize=256)
def has_sums(text: str) -> bool:
    """Whether a derivative has gradients of captured tensors."""
    return bool(parse_derivative(text).gathers)


@lru_cache(maxsize=256)
def has_functions(text: str) -> bool:
    """Whether a program computes functions like exp."""
    return any(node.op in table.FLOATING for node in parse(text).nodes)


def _lanes(program: Program) -> list[frozenset[int]]:
    """The lane inputs that each value depends on."""
    found = [frozenset([n]) if n < program.first_tensor else frozenset() for n in range(program.first_node)]
    for node in program.nodes:
        found.append(frozenset().union(*(found[ref.value] for ref in refs(node.args))))
    return found
