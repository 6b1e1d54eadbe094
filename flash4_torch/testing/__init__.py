"""Test helpers for us and for users who test us: exact results, a tolerance, poison, and who served.

A result is right if its error is at most twice that of plain torch::

    exact, _ = testing.reference(q, k, v, causal=True)
    peer, _ = testing.reference(q, k, v, causal=True, dtype=q.dtype)
    testing.assert_close_as_peer(flash4_torch.attention(q, k, v, causal=True), exact, peer)
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from .dropout import dropout_mask, peek_rng_state
from .observe import backends_used, poisoned_memory
from .tolerance import assert_close_as_peer, reference

if TYPE_CHECKING:
    from . import emulate

__all__ = [
    "assert_close_as_peer",
    "backends_used",
    "dropout_mask",
    "emulate",
    "peek_rng_state",
    "poisoned_memory",
    "reference",
]


def __getattr__(name: str) -> ModuleType:
    """Loads the emulator's public module when it is first accessed."""
    if name == "emulate":
        return importlib.import_module(".emulate", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
