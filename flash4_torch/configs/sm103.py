"""The forward's tiles on Blackwell Ultra: those of `configs.sm100`, without the polynomial.

Its MUFU is twice as fast, and no longer what a tile waits for. Never timed either.
"""

from __future__ import annotations

from . import sm100
from .sizes import Sizes
from .sm100 import limits, row
from .types import Features, Sm100Forward

__all__ = ["forward", "limits", "reachable", "row"]


def forward(features: Features, sizes: Sizes) -> Sm100Forward:
    """The config of a call: see `configs.sm100.forward`."""
    return exact(sm100.forward(features, sizes))


def reachable(features: Features, group: int | None = None) -> tuple[Sm100Forward, ...]:
    """Every config that `forward` returns for some sizes; with `group`, for that many heads of a KV head."""
    return tuple(dict.fromkeys(map(exact, sm100.reachable(features, group))))


def exact(config: Sm100Forward) -> Sm100Forward:
    """The config without the polynomial."""
    return config._replace(polynomial=0)
