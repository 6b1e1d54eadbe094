"""Kernels as a folder to ship: shared libraries and `manifest.json`, used where FLASH4_AOT_DIR names it.

Using it takes no compiler, only apache-tvm-ffi and libcute_dsl_runtime.so, which comes with
nvidia-cutlass-dsl or lies in the folder. What the folder lacks is looked for in the cache, as ever; but a
folder that does not fit this installation raises: who ships kernels does not want them compiled after all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from .. import env
from ..errors import ExportError
from . import cache, jit, library
from .key import Key, fingerprint, versions
from .library import Function

MANIFEST = "manifest.json"
_FORMAT = 1


def export(folder: Path, keys: Iterable[Key], *, runtime: bool = False) -> Path:
    """Writes the kernels, compiling what the cache lacks, and returns the manifest's path.

    runtime: also copy libcute_dsl_runtime.so, 43 MB, for machines without nvidia-cutlass-dsl.
    Raises CompileError, and ExportError where there is no linker.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if runtime:
        shutil.copy2(library.installed_runtime(), folder)
    document = {
        "format": _FORMAT,
        "versions": versions(),
        "kernels": [_written(folder, key) for key in keys],
    }
    unfinished = folder / f"{MANIFEST}.unfinished"
    unfinished.write_text(json.dumps(document, indent=2) + "\n")
    os.replace(unfinished, folder / MANIFEST)
    return folder / MANIFEST


def _written(folder: Path, key: Key) -> dict[str, str]:
    with cache.obtained(key.digest, partial(jit.build, key)) as file:
        if file.suffix != ".so":
            raise ExportError(str(folder), "exporting takes a linker: install binutils, gcc or lld")
        shutil.copyfile(file, folder / file.name)
    return {
        "entry": key.entry,
        "static": repr(key.static),
        "arch": key.arch,
        "file": file.name,
        "function": key.digest,
        "sha256": _checksum(folder / file.name),
        "sources": fingerprint(key.entry),
    }


def find(key: Key) -> Function | None:
    """The kernel from the folder that FLASH4_AOT_DIR names, or None if it names none or the folder lacks it.

    Raises ExportError where the folder is not what was exported, or was exported by another version.
    """
    name = env.AOT_DIR.get()
    if not name:
        return None
    folder = Path(name).expanduser()
    kernel = _kernels(folder).get(_name(key.entry, repr(key.static), key.arch))
    if kernel is None:
        return None
    file = folder / kernel["file"]
    if kernel["sources"] != fingerprint(key.entry):
        raise ExportError(name, f"{key.entry} has changed since; export again")
    if not file.exists() or _checksum(file) != kernel["sha256"]:
        raise ExportError(name, f"{file.name} is missing or damaged")
    return library.load(file, kernel["function"], runtime=folder)


@functools.cache
def _kernels(folder: Path) -> dict[str, dict[str, str]]:
    try:
        document = json.loads((folder / MANIFEST).read_text())
        kernels = {_name(k["entry"], k["static"], k["arch"]): k for k in document["kernels"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(str(folder), f"{MANIFEST} cannot be read ({error})") from error
    if reason := _why_it_does_not_fit(document):
        raise ExportError(str(folder), reason)
    return kernels


def _why_it_does_not_fit(document: dict[str, Any]) -> str:
    """Of the compiler's version only where it is installed: else the runtime in the folder is its own."""
    if document["format"] != _FORMAT:
        return f"its format is {document['format']}, and this version reads {_FORMAT}"
    theirs, ours = document["versions"], versions()
    if theirs["machine"] != platform.machine():
        return f"it is for {theirs['machine']}, and this is {platform.machine()}"
    compiler = "nvidia-cutlass-dsl"
    if ours[compiler] not in ("none", theirs[compiler]):
        return f"it was made by {compiler} {theirs[compiler]}, and {ours[compiler]} is installed"
    return ""


def _name(entry: str, static: str, arch: str) -> str:
    return "\0".join((entry, static, arch))


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
