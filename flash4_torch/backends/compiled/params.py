"""Launch parameters that all kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...configs.sections import Section
from ...masks import Band
from ...problem import Problem
from ...reference import dropout
from ..base import Order

FARTHEST = 1 << 30
"""The largest position and band bound of the kernels: sums of two fit in 32 bits."""
_SMALLEST_SOFTCAP, _LARGEST_SOFTCAP = 2.0**-100, 2.0**100
"""Limits of softcap in a kernel: beyond them all scores are capped or none is; within them no intermediate
product is 0 or infinite."""


class LaunchParams(NamedTuple):
    """Numbers of a launch; `kernels.common.launch_params.LaunchParams` documents the same fields."""

    scale: float
    softcap: float
    left: int
    right: int
    max_seqlen: int
    heads_per_section: int
    num_sms: int
    drop_byte: int
    drop_fraction: int
    keep_scale: float
    run_length: int
    heads_first: int = 0
    out_heads_first: int = 0

    def in_order(self, order: Order) -> LaunchParams:
        """The same for tensors whose dimensions have that order."""
        heads_first, out_heads_first = map(int, order)
        return self._replace(heads_first=heads_first, out_heads_first=out_heads_first)


def launch_params(problem: Problem, max_seqlen: int, section: Section, num_sms: int) -> LaunchParams:
    left, right = kernel_band(problem.band)
    drop_byte, drop_fraction = dropout.thresholds(problem.dropout_p)
    return LaunchParams(
        scale=problem.scale,
        softcap=kernel_softcap(problem.softcap),
        left=left,
        right=right,
        max_seqlen=max_seqlen,
        heads_per_section=section.heads,
        num_sms=num_sms,
        drop_byte=drop_byte,
        drop_fraction=drop_fraction,
        keep_scale=dropout.scale(problem.dropout_p),
        run_length=section.run_length,
    )


def kernel_band(band: Band) -> tuple[int, int]:
    """A band's bounds in 32 bits; those that there are not are 0, and kernels do not read them."""
    left, right = (0 if b is None else max(-FARTHEST, min(b, FARTHEST)) for b in band)
    return left, right


def kernel_softcap(softcap: float) -> float:
    return min(max(softcap, _SMALLEST_SOFTCAP), _LARGEST_SOFTCAP)


def mask_dtype(problem: Problem) -> str:
    return problem.spec.mask.partition(":")[0]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
