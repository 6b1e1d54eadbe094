"""Section `memory`: peak memory of every feature against S, and the exponent of its growth: 1 is linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from . import features
from .features import FEATURES, Shape
from .peak import peak_mib
from .report import Row, table
from .settings import Settings

TITLE = "peak memory on top of the inputs, MiB, and the exponent of its growth with S"

_SMALL = 128


def measure(settings: Settings) -> Iterator[Row]:
    """One row for each feature, direction and contender."""
    for name in FEATURES:
        for direction in ("forward", "forward + backward"):
            for who in ("flash4", "torch"):
                sizes = _sizes(settings, who)
                peaks = {S: peak_mib(settings, prepare, S, _SMALL, name, direction, who) for S in sizes}
                yield {
                    "feature": name,
                    "direction": direction,
                    "provider": who,
                    "B": 1,
                    "H": 2,
                    "D": 64,
                    "dtype": "float32",
                    "peak_mib": peaks,
                    "exponent": exponent(peaks),
                }


def _sizes(settings: Settings, who: str) -> tuple[int, ...]:
    """Torch's features that are quadratic stop where they still fit a small machine."""
    if settings.quick:
        return (2048, 4096)
    return (2048, 4096, 8192, 16384) if who == "flash4" else (1024, 2048, 4096)


def prepare(S: int, device: str, feature: str, direction: str, who: str) -> Callable[[], Any]:
    pair = FEATURES[feature](Shape(B=1, S=S, H=2, D=64, device=device))
    attend = pair.flash4 if who == "flash4" else pair.torch
    if direction == "forward":
        return partial(features.forward, attend)
    dout = torch.randn(pair.inputs[0].shape, device=device)
    return partial(features.step, attend, pair.inputs, dout)


def exponent(peaks: dict[int, float]) -> float:
    """The slope of log(peak) over log(S), fitted by least squares."""
    x = [math.log(S) for S in peaks]
    y = [math.log(max(peak, 1e-3)) for peak in peaks.values()]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def text(rows: list[Row]) -> str:
    sizes = sorted({S for row in rows for S in row["peak_mib"]})
    return table(
        ["feature", "direction", "provider", *(f"S={S}" for S in sizes), "exponent"],
        [
            [
                row["feature"],
                row["direction"],
                row["provider"],
                *(f"{row['peak_mib'][S]:.1f}" if S in row["peak_mib"] else "" for S in sizes),
                f"{row['exponent']:.2f}",
            ]
            for row in rows
        ],
    )
