"""Section `features`: the cost of every feature, against torch's equivalent and against ours without it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from ..testing import backends_used
from . import features
from .cases import HIDDEN, TOKENS
from .features import FEATURES, Pair, Shape
from .report import Row, dtype_name, ratio, table
from .settings import Settings
from .timing import Call, compare

TITLE = "every feature, against torch with an equivalent mask, and our speed with it over ours without"

DIRECTIONS = ("forward", "forward + backward")


def measure(settings: Settings) -> Iterator[Row]:
    for shape, name, direction in itertools.product(_shapes(settings), FEATURES, DIRECTIONS):
        case = {
            "feature": name,
            "dtype": dtype_name(shape.dtype),
            "B": shape.B,
            "S": shape.S,
            "H": shape.H,
            "D": shape.D,
            "direction": direction,
        }
        if settings.selection.takes(case):
            yield case | _measure(shape, name, direction, settings)


def _measure(shape: Shape, name: str, direction: str, settings: Settings) -> Row:
    pair, plain = FEATURES[name](shape), FEATURES["plain"](shape)
    calls = {
        "flash4": _call(pair, "flash4", direction),
        "torch": _call(pair, "torch", direction),
        "plain": _call(plain, "flash4", direction),
    }
    with backends_used() as used:
        calls["flash4"]()
    result = compare(calls, settings)
    return {
        "served_by": dict(used.keys()),
        "seconds": {who: seconds._asdict() for who, seconds in result.seconds.items()},
        "flash4_over_torch": result.ratio("flash4", "torch")._asdict(),
        "speed_of_plain": result.ratio("plain", "flash4")._asdict(),
    }


def _call(pair: Pair, who: str, direction: str) -> Call:
    attend = pair.flash4 if who == "flash4" else pair.torch
    if direction == "forward":
        return partial(features.forward, attend)
    return partial(features.step, attend, pair.inputs, torch.randn_like(features.forward(attend)))


def _shapes(settings: Settings) -> Iterator[Shape]:
    if settings.on_gpu:
        S = 4096
        for D in (128,) if settings.quick else (64, 128):
            yield Shape(TOKENS // S, S, HIDDEN // D, D, dtype=torch.bfloat16, device=settings.device)
    else:
        for dtype in (torch.float32, torch.bfloat16):
            yield Shape(1, 512 if settings.quick else 1024, 8, 64, dtype=dtype, device=settings.device)


def text(rows: list[Row]) -> str:
    return table(
        [
            "feature",
            "dtype",
            "S",
            "D",
            "direction",
            "flash4 ms",
            "torch ms",
            "flash4 / torch",
            "speed of plain",
        ],
        [
            [
                row["feature"],
                row["dtype"],
                row["S"],
                row["D"],
                row["direction"],
                f"{1e3 * row['seconds']['flash4']['median']:.2f}",
                f"{1e3 * row['seconds']['torch']['median']:.2f}",
                ratio(row["flash4_over_torch"]),
                ratio(row["speed_of_plain"]) if "speed_of_plain" in row else "",
            ]
            for row in rows
        ],
    )
