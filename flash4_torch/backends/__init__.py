"""Backends serve attention calls; `choose` picks one, `reasons` says why the others do not."""

from .base import Backend
from .dispatch import PRIORITY, choose, excluding, observers, reasons

__all__ = ["PRIORITY", "Backend", "choose", "excluding", "observers", "reasons"]
