"""Backends serve attention calls; `choose` picks one, and `reasons` says why the others cannot."""

from .base import (
    ALIGNMENT,
    Backend,
    BackwardLaunch,
    DqSums,
    HeadsFirst,
    Launch,
    Prepares,
    Results,
    Shares,
    SumsDq,
)
from .dispatch import PRIORITY, choose, excluding, is_plain, observers, own_backend, reasons

__all__ = [
    "ALIGNMENT",
    "PRIORITY",
    "Backend",
    "BackwardLaunch",
    "DqSums",
    "HeadsFirst",
    "Launch",
    "Prepares",
    "Results",
    "Shares",
    "SumsDq",
    "choose",
    "excluding",
    "is_plain",
    "observers",
    "own_backend",
    "reasons",
]
