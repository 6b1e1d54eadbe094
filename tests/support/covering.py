"""A few calls of attention in which every two properties that a call can have occur together."""

from __future__ import annotations

from itertools import combinations
from typing import Any

AXES: dict[str, tuple[Any, ...]] = {
    "heads": ((64, 64), (128, 128), (40, 13), (96, 96), (192, 128), (256, 256)),
    "lengths": ((90, 150), (1, 5), (200, 77), (257, 257)),
    "band": ("full", "causal", "window", "left"),
    "mask": ("", "bool", "float"),
    "dtype": ("bfloat16", "float16"),
    "group": (1, 3),
    "varlen": (False, True),
    "dropout_p": (0.0, 0.3),
    "softcap": (0.0, 3.0),
    "deterministic": (False, True),
    "dlse": (False, True),
}
"""The first of each is the plain one. heads: (D, Dv); lengths: (Sq, Sk)."""

Case = dict[str, Any]
Value = tuple[str, Any]


def covering() -> list[Case]:
    """Cases in which every two values of different axes that can occur together do so."""
    left = [(a, b) for a, b in combinations(_values(), 2) if _fit([a, b])]
    cases = []
    while left:
        chosen = list(left[0])
        for axis, values in AXES.items():
            if axis not in dict(chosen):
                possible = [(axis, value) for value in values if _fit([*chosen, (axis, value)])]
                chosen.append(max(possible, key=lambda v: sum(_met(pair, [*chosen, v]) for pair in left)))
        left = [pair for pair in left if not _met(pair, chosen)]
        cases.append({axis: dict(chosen)[axis] for axis in AXES})
    return cases


def name_of(case: Case) -> str:
    """The values of a case that differ from the plain ones."""
    special = [f"{axis}={case[axis]}" for axis, values in AXES.items() if case[axis] != values[0]]
    return " ".join(special).replace(", ", "x") or "plain"


def _values() -> list[Value]:
    return [(axis, value) for axis, values in AXES.items() for value in values]


def _fit(chosen: list[Value]) -> bool:
    """Whether the values can be one case: one of each axis, and no mask with packed sequences."""
    case = dict(chosen)
    return len(case) == len(chosen) and not (case.get("varlen") and case.get("mask"))


def _met(pair: tuple[Value, Value], chosen: list[Value]) -> bool:
    return pair[0] in chosen and pair[1] in chosen
