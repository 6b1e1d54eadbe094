"""Backends serve attention calls; `choose` picks one, and `reasons` says why the others cannot."""

from .base import ALIGNMENT, Backend, BackwardLaunch, HeadsFirst, Launch, Prepares, Results, Shares
from .dispatch import PRIORITY, choose, excluding, is_plain, observers, own_backend, reasons

__all__ = [
    "ALIGNMENT",
    "PRIORITY",
    "Backend",
    "BackwardLaunch",
    "HeadsFirst",
    "Launch",
    "Prepares",
    "Results",
    "Shares",
    "choose",
    "excluding",
    "is_plain",
    "observers",
    "own_backend",
    "reasons",
]
