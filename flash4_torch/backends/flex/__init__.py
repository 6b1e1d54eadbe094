"""Backends of programmable attention; `choose` picks one, and `reasons` says why the others cannot."""

from .base import FlexBackend
from .dispatch import PRIORITY, choose, reasons

__all__ = ["PRIORITY", "FlexBackend", "choose", "reasons"]
