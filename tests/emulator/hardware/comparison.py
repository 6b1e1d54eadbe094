"""How far two results are from each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .recording import Bound

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compared(theirs: Tensor, ours: Tensor, bound: Bound, error: float | None = None) -> dict[str, Any]:
    """Of the GPU's result and the emulator's, element by element; NaN is equal to NaN.

    error: the root mean square of the emulator's own rounding errors, for comparison.
    """
    differs = ~((theirs == ours) | (theirs.isnan() & ours.isnan()))
    answer: dict[str, Any] = {
        "dtype": str(ours.dtype).removeprefix("torch."),
        "elements": ours.numel(),
        "differing": int(differs.sum()),
    }
    if not differs.any():
        return {**answer, "explained": True}
    x, y = theirs.double(), ours.double()
    difference = torch.where(differs, (x - y).abs(), 0.0)
    sizes = torch.maximum(x.abs(), y.abs())
    share = difference / torch.as_tensor(bound.largest, dtype=torch.float64)
    answer |= {
        "explained": bool((share[differs] <= 1).all()),
        "max_abs": difference.max().item(),
        "max_rel": (difference / sizes)[differs].max().item(),
        "max_ulp": int(ulps_apart(theirs, ours)[differs].max()),
        "rms": difference.square().mean().sqrt().item(),
        "largest_share_of_bound": share[differs].max().item(),
        "reason": bound.reason,
    }
    return answer if error is None else {**answer, "rms_of_emulator_from_exact": error}


def ulps_apart(x: Tensor, y: Tensor) -> Tensor:
    """How many values of their type are between x and y, plus one; integers count themselves."""
    return (_rank(x) - _rank(y)).abs()


def _rank(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x.long()
    bits = x.view(_AS_INTEGERS[x.element_size()]).long()
    smallest = -1 << (8 * x.element_size() - 1)
    return torch.where(bits < 0, smallest - bits, bits)
