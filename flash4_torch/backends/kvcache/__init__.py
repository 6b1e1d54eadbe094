"""Backends of attention over a KV cache; `choose` picks one, and `reasons` says why the others cannot."""

from .base import CacheBackend, CacheLaunch, PreparesCache
from .dispatch import PRIORITY, choose, reasons

__all__ = ["PRIORITY", "CacheBackend", "CacheLaunch", "PreparesCache", "choose", "reasons"]
