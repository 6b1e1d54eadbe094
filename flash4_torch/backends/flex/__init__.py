"""Backends of programmable attention; `choose` picks one, and `reasons` says why the others cannot."""

from .base import FlexBackend, FlexBackwardLaunch, FlexLaunch, PreparesFlex
from .dispatch import PRIORITY, choose, reasons

__all__ = [
    "PRIORITY",
    "FlexBackend",
    "FlexBackwardLaunch",
    "FlexLaunch",
    "PreparesFlex",
    "choose",
    "reasons",
]
