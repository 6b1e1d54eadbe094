"""Backends of attention over a KV cache; `choose` picks one, and `reasons` says why the others cannot."""

from .base import CacheBackend
from .dispatch import PRIORITY, choose, reasons

__all__ = ["PRIORITY", "CacheBackend", "choose", "reasons"]
