"""Every environment variable that flash4_torch reads; no other module looks at the environment."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property

from .errors import RangeError, hint, nearest

_PREFIX = "FLASH4_"


@dataclass(frozen=True)
class Variable:
    """One environment variable; `get()` reads it afresh, so tests and users may change it at any time.

    An empty value counts as unset. choices: all allowed values; empty: any. is_folder: it names a folder.
    """

    name: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    is_folder: bool = False

    def get(self) -> str:
        """The value, or the default. Raises RangeError for a value that is not allowed."""
        value = os.environ.get(self.name)
        if not value:
            return self.default
        if self.choices and value not in self.choices:
            limit = f"it must be one of {list(self.choices)}{hint(value, self.choices)}"
            raise RangeError(self.name, repr(value), limit)
        if self.is_folder and value[0] not in "/~":
            # Code is loaded from it: a relative path could name somebody else's in another directory.
            raise RangeError(self.name, repr(value), "it must be an absolute path, or begin with ~")
        return value

    def raw(self) -> str:
        """The value in the environment, unchecked; empty if unset."""
        return os.environ.get(self.name, "")

    @cached_property
    def key(self) -> object:
        """The name as a key of `NAMES`."""
        return os.environ.encodekey(self.name)


NAMES: Container[object] = os.environ._data  # type: ignore[attr-defined]
"""The names that are set at the moment; every call tests membership, which is much cheaper than `get`."""

BACKEND = Variable(
    "FLASH4_BACKEND",
    "",
    "Force one backend (cpu, sm90, sm100, sm80, sdpa, efficient, tiled, emulator); a call it cannot serve "
    "raises instead of going elsewhere. Empty: the first in order of priority that can serve.",
    choices=("cpu", "sm90", "sm100", "sm80", "sdpa", "efficient", "tiled", "emulator"),
)
LOG = Variable(
    "FLASH4_LOG",
    "",
    "'backend' prints to stderr, once per distinct problem, which backend serves it; 'config' prints in "
    "addition which row of the tables, which config, plan and launch. Empty: silent.",
    choices=("backend", "config"),
)
ARCH = Variable(
    "FLASH4_ARCH",
    "sm_100a",
    "The architecture that the emulator plays: sm_80, sm_86, sm_87 (Ampere), sm_89 (Ada), sm_90a (Hopper), "
    "sm_100a (Blackwell), sm_103a (its Ultra), sm_120a or sm_121a (Blackwell's GeForce and GB10).",
    choices=(
        "sm_80",
        "sm_86",
        "sm_87",
        "sm_89",
        "sm_90a",
        "sm_100a",
        "sm_103a",
        "sm_120a",
        "sm_121a",
    ),
)
CACHE_DIR = Variable(
    "FLASH4_CACHE_DIR",
    "~/.cache/flash4_torch",
    "Folder that keeps what was built on first use: an absolute path, or one that begins with ~.",
    is_folder=True,
)
AOT_DIR = Variable(
    "FLASH4_AOT_DIR",
    "",
    "Folder that `python -m flash4_torch export` filled, by its absolute path: its kernels come before the "
    "cache's. Empty: none.",
    is_folder=True,
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
EMULATOR_LINES = Variable(
    "FLASH4_EMULATOR_LINES",
    "1",
    "Whether the emulator's reports name the lines of a kernel's source. '0': the lines of its PTX alone; "
    "kernels compile in six sevenths of the time.",
    choices=("0", "1"),
)

ALL = (BACKEND, LOG, ARCH, CACHE_DIR, AOT_DIR, BENCH_FA3, EMULATOR_FLAGS, EMULATOR_LINES)


def misspelt() -> list[str]:
    """One sentence per variable in the environment that looks like one of ours but is not."""
    ours = {variable.name.removeprefix(_PREFIX): variable.name for variable in ALL}
    parts = [name.removeprefix(_PREFIX) for name in sorted(os.environ) if name.startswith(_PREFIX)]
    meant = {part: nearest(part, ours) for part in parts if part not in ours}
    return [f"{_PREFIX}{part} is none of these; did you mean {ours[m]}?" for part, m in meant.items() if m]


def change(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Sets variables, or removes those whose value is None; returns the old values, to change back."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before
