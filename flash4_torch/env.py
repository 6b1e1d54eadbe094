"""Every environment variable flash4_torch reads; nothing else looks at the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable; `get()` reads it anew, so tests and users may change it at any time."""

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)


BACKEND = Variable(
    "FLASH4_BACKEND",
    "",
    "Force one backend (cpu, sdpa, tiled); a call it cannot serve raises instead of going elsewhere. "
    "Empty: the first in order of priority that can serve.",
)
LOG = Variable(
    "FLASH4_LOG",
    "",
    "'backend' prints to stderr, once per distinct problem, which backend serves it. Empty: silent.",
)

ALL = (BACKEND, LOG)
