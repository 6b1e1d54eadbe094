"""The identity of a compiled kernel. No size of a call enters it.

In memory a key is (entry, static, arch). On disk, where other versions may have written, its digest also
covers everything else that determines the file's contents.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from .. import processor
from ..errors import RangeError
from . import library

_PACKAGE = Path(__file__).parents[1]
_LAYOUT = 1
"""Version of the kernels' files; increase it when this package changes what they contain."""

SOURCES = (
    *("configs/decode.py", "configs/types.py", "configs/weights.py"),
    *("flex/program.py", "flex/ramp.py", "flex/table.py"),
)
"""Modules that kernels import from elsewhere; what others compute enters `static`."""

_MADE_BY = ("nvidia-cutlass-dsl", "apache-tvm-ffi")


class Key(NamedTuple):
    entry: str
    """"package.module:function": called as function(*static), it returns the compiled kernel."""
    static: tuple[object, ...]
    """Strings, numbers, None, and tuples of these; named tuples read best."""
    arch: str

    def __str__(self) -> str:
        return f"{self.entry}({', '.join(map(in_words, self.static))}) for {self.arch}"

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, the same in every process and on every machine with the same kind of CPU."""
        _refuse_what_has_no_lasting_name(self.static)
        return _hash(repr(tuple(self)), repr(versions()), fingerprint(self.entry))


def in_words(part: object) -> str:
    """A named tuple without the fields that have their defaults."""
    if not isinstance(part, tuple) or not hasattr(part, "_fields"):
        return repr(part)
    defaults: dict[str, object] = getattr(part, "_field_defaults", {})
    fields = zip(part._fields, part, strict=True)
    chosen = [f"{name}={value!r}" for name, value in fields if (name, value) not in defaults.items()]
    return f"{type(part).__name__}({', '.join(chosen)})"


@functools.cache
def versions() -> dict[str, str]:
    """Versions of everything that takes part in compiling, by name.

    CPU: its instruction set extensions; host code is compiled for the CPU that the compiler runs on.
    """
    found = {name: _version(name) for name in _MADE_BY}
    place = {"machine": platform.machine(), "CPU": " ".join(processor.extensions())}
    return {**found, "CUDA": _flavor(), "layout": str(_LAYOUT), **place}


@functools.cache
def fingerprint(entry: str) -> str:
    """A hash of a kernel's sources: kernels/, `SOURCES`, and the entry's module if that is elsewhere."""
    return _hash_of_sources(entry)


def is_edited(entry: str) -> bool:
    """Whether the sources have changed since `fingerprint` read them; loaded modules may be old or new."""
    return _hash_of_sources(entry) != fingerprint(entry)


def _hash_of_sources(entry: str) -> str:
    files = [*sorted((_PACKAGE / "kernels").rglob("*.py")), *(_PACKAGE / name for name in SOURCES)]
    module = entry.partition(":")[0]
    if not module.startswith("flash4_torch.kernels."):
        spec = importlib.util.find_spec(module)
        files += [Path(spec.origin)] if spec and spec.origin else []
    return _hash(*(text for file in files for text in (file.name, file.read_text())))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _flavor() -> str:
    try:
        return library.installed_runtime().parents[1].name
    except ImportError:
        return "none"


def _refuse_what_has_no_lasting_name(value: object) -> None:
    if isinstance(value, tuple):
        for part in value:
            _refuse_what_has_no_lasting_name(part)
    elif not (value is None or isinstance(value, (str, int, float))):
        raise RangeError("static", repr(value), "only strings, numbers, None and tuples of them make a key")


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
