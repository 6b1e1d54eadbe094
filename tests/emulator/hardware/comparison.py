"""How far two results are from each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .recording import Bound

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compared(theirs: Tensor, ours: Tensor, bound: Bound) -> dict[str, Any]:
    """Compares the GPU's result with the emulator's, flat, element by element; NaN equals NaN."""
    figures = differences(theirs, ours)
    answer = {"dtype": str(ours.dtype).removeprefix("torch."), "elements": ours.numel(), **figures}
    if not figures["differing"]:
        return {**answer, "explained": True}
    apart = (theirs.double() - ours.double()).abs()
    share = torch.where(equal(theirs, ours), 0.0, apart / bound.largest).max().item()
    return {**answer, "explained": share <= 1, "share_of_bound": share, "reason": bound.reason}


def differences(x: Tensor, y: Tensor) -> dict[str, Any]:
    """How many elements differ, and by how much: absolutely, relatively, in units in the last place."""
    differs = ~equal(x, y)
    if not differs.any():
        return {"differing": 0}
    p, q = x[differs].double(), y[differs].double()
    apart = (p - q).abs()
    return {
        "differing": int(differs.sum()),
        "max_abs": apart.max().item(),
        "max_rel": (apart / torch.maximum(p.abs(), q.abs())).max().item(),
        "max_ulp": int(ulps_apart(x, y)[differs].max()),
        "rms": (apart.square().sum() / x.numel()).sqrt().item(),
    }


def equal(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def ulps_apart(x: Tensor, y: Tensor) -> Tensor:
    """The number of values of their type between x and y, plus one; for integers their difference."""
    return (_rank(x) - _rank(y)).abs()


def _rank(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x.long()
    bits = x.view(_AS_INTEGERS[x.element_size()]).long()
    smallest = -1 << (8 * x.element_size() - 1)
    return torch.where(bits < 0, smallest - bits, bits)
