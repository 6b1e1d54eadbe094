"""Every environment variable flash4_torch reads; nothing else looks at the environment."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Variable:
    """One environment variable; `get()` reads it anew, so tests and users may change it at any time."""

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    @cached_property
    def key(self) -> object:
        """The name as `NAMES` has it."""
        return os.environ.encodekey(self.name)


NAMES: Container[object] = os.environ._data  # type: ignore[attr-defined]
"""What is in the environment at any time; asking it takes little of `get`'s time, for every call's sake."""

BACKEND = Variable(
    "FLASH4_BACKEND",
    "",
    "Force one backend (cpu, sm90, sm100, sdpa, tiled, emulator); a call it cannot serve raises instead of "
    "going elsewhere. Empty: the first in order of priority that can serve.",
)
LOG = Variable(
    "FLASH4_LOG",
    "",
    "'backend' prints to stderr, once per distinct problem, which backend serves it. Empty: silent.",
)
ARCH = Variable(
    "FLASH4_ARCH",
    "sm_100a",
    "The architecture that the emulator plays: sm_90a (Hopper), sm_100a (Blackwell) or sm_103a (its Ultra).",
)
CACHE_DIR = Variable(
    "FLASH4_CACHE_DIR",
    "~/.cache/flash4_torch",
    "Folder that keeps what was built on first use.",
)
AOT_DIR = Variable(
    "FLASH4_AOT_DIR",
    "",
    "Folder that `python -m flash4_torch export` filled: its kernels come before the cache's. Empty: none.",
)
BENCH_FA3 = Variable(
    "FLASH4_BENCH_FA3",
    "",
    "The library with FlashAttention-3's operators, for the benchmark: flash_attn_3/_C.so of xformers, "
    "say. Empty: the package flash_attn_interface, if there is one.",
)
EMULATOR_FLAGS = Variable(
    "FLASH4_EMULATOR_FLAGS",
    "",
    "More flags for the compiler of the emulator's C++ parts, as a shell splits them: a sanitizer's, say. "
    "Empty: none.",
)

ALL = (BACKEND, LOG, ARCH, CACHE_DIR, AOT_DIR, BENCH_FA3, EMULATOR_FLAGS)


def change(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Sets variables, or removes them where the value is None; returns what they were, to change back."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before
