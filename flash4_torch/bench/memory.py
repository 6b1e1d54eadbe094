"""Section `memory`: peak memory of every feature over S, and the exponent of its growth (1 is linear)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from . import features
from .features import FEATURES, Shape
from .peak import peak_mib
from .report import Row, dtype_name, table
from .settings import Settings, usual_dtype

TITLE = "peak memory on top of the inputs, MiB; its growth in KiB a token and as an exponent of S"

_SMALL = 128
_PAGE_MIB = 4096 / 2**20
_H, _D = 2, 32


def measure(settings: Settings) -> Iterator[Row]:
    """One row per feature, direction and contender."""
    for name in FEATURES:
        for direction in ("forward", "forward + backward"):
            for who in ("flash4", "torch"):
                sizes = _sizes(settings, who)
                peaks = [peak_mib(settings, prepare, S, _SMALL, name, direction, who) for S in sizes]
                yield {
                    "feature": name,
                    "direction": direction,
                    "provider": who,
                    "B": 1,
                    "H": _H,
                    "D": _D,
                    "dtype": dtype_name(usual_dtype(settings.device)),
                    "S": sizes,
                    "peak_mib": peaks,
                    "exponent": exponent(sizes, peaks),
                }


def _sizes(settings: Settings, who: str) -> list[int]:
    """The lengths to measure; torch's end where its quadratic features still fit a small machine."""
    if settings.quick:
        return [1024, 2048, 4096]
    return [2048, 4096, 8192, 16384] if who == "flash4" else [1024, 2048, 4096]


def prepare(S: int, device: str, feature: str, direction: str, who: str) -> Callable[[], Any]:
    pair = FEATURES[feature](Shape(B=1, S=S, H=_H, D=_D, dtype=usual_dtype(device), device=device))
    attend = pair.flash4 if who == "flash4" else pair.torch
    if direction == "forward":
        return partial(features.forward, attend)
    dout = torch.randn_like(pair.inputs[0])
    return partial(features.step, attend, pair.inputs, dout)


def exponent(sizes: list[int], peaks: list[float]) -> float:
    """Slope of log(peak) over log(size), fitted by least squares; a peak counts as at least one page."""
    return statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(max(peak, _PAGE_MIB)) for peak in peaks]
    ).slope


def text(rows: list[Row]) -> str:
    sizes = sorted({S for row in rows for S in row["S"]})
    lines = []
    for row in rows:
        peaks = dict(zip(row["S"], row["peak_mib"], strict=True))
        cells = [f"{peaks[S]:.1f}" if S in peaks else "" for S in sizes]
        per_token = 1024 * statistics.linear_regression(row["S"], row["peak_mib"]).slope
        case = row["feature"], row["direction"], row["provider"]
        lines.append([*case, *cells, f"{per_token:.2f}", f"{row['exponent']:.2f}"])
    head = ["feature", "direction", "provider", *(f"S={S}" for S in sizes), "KiB/token", "exponent"]
    return table(head, lines)
