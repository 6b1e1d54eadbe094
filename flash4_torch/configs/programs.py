"""What programs of score_mod and mask_mod take of a thread's registers."""

from __future__ import annotations

from functools import lru_cache

from ..flex import table
from ..flex.program import Program, parse, refs

_FEW = 8
"""Operations for each score that leave a thread no more to keep than one or two do."""


@lru_cache(maxsize=256)
def is_light(text: str) -> bool:
    """Whether a program loads nothing for each score or key, and has few operations for each score."""
    program = parse(text)
    lanes = _lanes(program)
    score, key = range(len(program.inputs) - 4), len(program.inputs) - 1
    each = [
        node for number, node in enumerate(program.nodes, program.first_node) if lanes[number] & {*score, key}
    ]
    return len(each) <= _FEW and not any(node.op == "gather" or node.shape for node in each)


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
