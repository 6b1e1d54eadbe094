"""Contents and format of `manifest.json` in a folder of exported kernels."""

from __future__ import annotations

import json
import re
import reprlib
from typing import Any, NamedTuple

FORMAT = 2
"""Version of the format; 1 had neither the CPU nor the runtime library's hash."""

_NEEDED = ("nvidia-cutlass-dsl", "machine", "CPU")
_FILE = re.compile(r"[\w.-]+\.so", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")

Name = tuple[str, str, str]


class Kernel(NamedTuple):
    entry: str
    static: str
    """repr of `Key.static`."""
    arch: str
    file: str
    """Name of the library, which is in the folder itself."""
    function: str
    sha256: str
    sources: str
    """Fingerprint of the sources that it was compiled from."""

    @property
    def name(self) -> Name:
        return self.entry, self.static, self.arch


class Manifest(NamedTuple):
    versions: dict[str, str]
    """Versions of everything that took part in compiling, and the CPU."""
    runtime: str
    """Hash of the runtime library in the folder; empty if there is none."""
    kernels: dict[Name, Kernel]

    def text(self) -> str:
        kernels = [kernel._asdict() for kernel in self.kernels.values()]
        document = {"format": FORMAT, "versions": self.versions, "runtime": self.runtime, "kernels": kernels}
        return json.dumps(document, indent=2) + "\n"


def parse(text: bytes) -> Manifest:
    """The manifest in `text`. Raises ValueError with a description of what is wrong."""
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _require(isinstance(document, dict), "it", document, "an object")
    if document.get("format") != FORMAT:
        raise ValueError(f"its format is {_short(document.get('format'))}, and this version reads {FORMAT}")
    versions = document.get("versions")
    _require(isinstance(versions, dict), "versions", versions, "an object")
    for name in {*_NEEDED, *versions}:
        _require(isinstance(versions.get(name), str), f"versions' {name}", versions.get(name), "a string")
    runtime = document.get("runtime")
    _require(runtime == "" or _fits(_SHA256, runtime), "runtime", runtime, "a SHA-256 or empty")
    kernels = document.get("kernels")
    _require(isinstance(kernels, list), "kernels", kernels, "a list")
    parsed = [_kernel(f"kernels[{i}]", kernel) for i, kernel in enumerate(kernels)]
    return Manifest(versions, runtime, {kernel.name: kernel for kernel in parsed})


def _kernel(where: str, kernel: Any) -> Kernel:
    _require(isinstance(kernel, dict), where, kernel, "an object")
    values = {name: kernel.get(name) for name in Kernel._fields}
    for name, value in values.items():
        _require(isinstance(value, str), f"{where}'s {name}", value, "a string")
    _require(
        _fits(_FILE, values["file"]), f"{where}'s file", values["file"], "the name of a .so in the folder"
    )
    _require(_fits(_SHA256, values["sha256"]), f"{where}'s sha256", values["sha256"], "a SHA-256")
    return Kernel(**values)


def _fits(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _require(holds: bool, what: str, value: object, needed: str) -> None:
    if not holds:
        raise ValueError(f"{what} is {_short(value)}, but it must be {needed}")


def _short(value: object) -> str:
    """A short repr of the value; a missing one is None."""
    return reprlib.repr(value)
