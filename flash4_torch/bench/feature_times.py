"""Section `features`: what every feature costs, against what torch offers for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from . import features
from .features import FEATURES, Shape
from .report import Row, dtype_name, ratio, table
from .settings import Settings
from .timing import compare

TITLE = "every feature, against torch with an equivalent mask"


def measure(settings: Settings) -> Iterator[Row]:
    for dtype, name, S in itertools.product(_dtypes(settings), FEATURES, _sizes(settings)):
        shape = Shape(B=1, S=S, H=8, D=64, dtype=dtype, device=settings.device)
        pair = FEATURES[name](shape)
        dout = torch.randn_like(pair.flash4())
        both = {"flash4": pair.flash4, "torch": pair.torch}
        forwards = {who: partial(features.forward, attend) for who, attend in both.items()}
        steps = {who: partial(features.step, attend, pair.inputs, dout) for who, attend in both.items()}
        for direction, calls in (("forward", forwards), ("forward + backward", steps)):
            result = compare(calls, settings)
            yield {
                "feature": name,
                "dtype": dtype_name(dtype),
                "B": shape.B,
                "S": S,
                "H": shape.H,
                "D": shape.D,
                "direction": direction,
                "seconds": {who: seconds._asdict() for who, seconds in result.seconds.items()},
                "flash4_over_torch": result.ratios["torch"]._asdict(),
            }


def _dtypes(settings: Settings) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if settings.on_gpu else (torch.float32, torch.bfloat16)


def _sizes(settings: Settings) -> tuple[int, ...]:
    if settings.on_gpu:
        return (2048,) if settings.quick else (2048, 4096)
    return (512,) if settings.quick else (1024,)


def text(rows: list[Row]) -> str:
    return table(
        ["feature", "dtype", "S", "direction", "flash4 ms", "torch ms", "flash4 / torch"],
        [
            [
                row["feature"],
                row["dtype"],
                row["S"],
                row["direction"],
                f"{1e3 * row['seconds']['flash4']['median']:.2f}",
                f"{1e3 * row['seconds']['torch']['median']:.2f}",
                ratio(row["flash4_over_torch"]),
            ]
            for row in rows
        ],
    )
