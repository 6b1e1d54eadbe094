"""Kernels as a folder to ship: shared libraries and `manifest.json`, used if FLASH4_AOT_DIR names it.

Using it needs no compiler, only apache-tvm-ffi and libcute_dsl_runtime.so, which comes with
nvidia-cutlass-dsl or was exported too. A kernel that the folder lacks is looked up in the cache as usual; but
a folder that does not fit this installation raises: whoever ships kernels does not want them compiled again.

A file is loaded only if the manifest has its hash and nobody but the folder's owner could have written it.
The owner is trusted, since the user has named the folder.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from .. import env, store
from ..errors import ExportError
from . import cache, jit, library, manifest
from .key import Key, fingerprint, versions
from .library import Function
from .manifest import Kernel, Manifest

MANIFEST = "manifest.json"
LOCK = f"{MANIFEST}.lock"

_COMPILER = "nvidia-cutlass-dsl"
_CHUNK = 1 << 20
_SHARED = 0o755


def export(folder: Path, keys: Iterable[Key], *, runtime: bool = False) -> Path:
    """Adds the kernels to the folder, compiling those missing in the cache, and returns the manifest's path.

    runtime: also copy libcute_dsl_runtime.so, 43 MB, for machines without nvidia-cutlass-dsl.
    Raises CompileError, and ExportError if there is no linker, if the folder cannot be written to, or if it
    has kernels from other versions or for another CPU.
    """
    require_writable(folder)
    try:
        with store.locked(folder / LOCK):
            before = _to_add_to(folder)
            added = [_written(folder, key, before) for key in keys]
            checksum = _with_runtime(folder, before) if runtime else before.runtime
            kernels = before.kernels | {kernel.name: kernel for kernel in added}
            store.write(folder / MANIFEST, Manifest(versions(), checksum, kernels).text().encode())
    except OSError as error:
        raise ExportError(str(folder), f"the folder cannot be written to ({error})") from error
    return folder / MANIFEST


def require_writable(folder: Path) -> None:
    """Creates the folder if it is missing. Raises ExportError if nothing can be added to it."""
    try:
        store.make_folder(folder, _SHARED)
        why = store.why_distrusted(folder)
    except (OSError, ValueError) as error:
        raise ExportError(str(folder), f"the folder cannot be written to ({error})") from error
    if why:
        raise ExportError(str(folder), f"nothing is added to it, since {why}")


def _to_add_to(folder: Path) -> Manifest:
    if not (folder / MANIFEST).exists():
        return Manifest(versions(), "", {})
    before = _read(folder)
    for name, version in versions().items():
        if before.versions.get(name) != version:
            theirs = before.versions.get(name)
            reason = f"its kernels were made with {name} {theirs}, and here it is {version}; export elsewhere"
            raise ExportError(str(folder), reason)
    return before


def _written(folder: Path, key: Key, before: Manifest) -> Kernel:
    """Writes one kernel. An existing file is left alone: it may be in use through the existing manifest."""
    kernel = Kernel(key.entry, repr(key.static), key.arch, "", key.digest, "", fingerprint(key.entry))
    known = before.kernels.get(kernel.name)
    if known and known.function == key.digest and _is_there(folder / known.file, known.sha256):
        return known
    with cache.obtained(key.digest, partial(jit.build, key)) as file:
        if file.suffix != ".so":
            raise ExportError(str(folder), "exporting takes a linker: install binutils, gcc or lld")
        checksum = _copied(file, folder / file.name)
    return kernel._replace(file=file.name, sha256=checksum)


def _with_runtime(folder: Path, before: Manifest) -> str:
    if _is_there(folder / library.RUNTIME, before.runtime):
        return before.runtime
    try:
        return _copied(library.installed_runtime(), folder / library.RUNTIME)
    except ImportError as error:
        raise ExportError(str(folder), str(error)) from error


def _is_there(path: Path, sha256: str) -> bool:
    try:
        with store.opened(path) as file:
            return _checksum(file) == sha256
    except OSError:
        return False


def _copied(source: Path, target: Path) -> str:
    contents = source.read_bytes()
    store.write(target, contents)
    return hashlib.sha256(contents).hexdigest()


def find(key: Key) -> Function | None:
    """The kernel from the folder that FLASH4_AOT_DIR names, or None if it names none or the folder lacks it.

    Raises ExportError if the folder differs from what was exported, was exported by another version or for
    another CPU, or could have been changed by anybody but its owner.
    """
    name = env.AOT_DIR.get()
    if not name:
        return None
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:
        raise ExportError(name, str(error)) from error
    found = _manifest(folder)
    kernel = found.kernels.get((key.entry, repr(key.static), key.arch))
    if kernel is None:
        return None
    if kernel.sources != fingerprint(key.entry):
        raise ExportError(name, f"{key.entry} has changed since; export again")
    runtime = partial(_provide_runtime, folder, found.runtime) if found.runtime else None
    with _exported(folder, kernel.file, kernel.sha256) as file:
        return library.load(file, kernel.function, runtime)


@functools.cache
def _provide_runtime(folder: Path, sha256: str) -> None:
    with _exported(folder, library.RUNTIME, sha256) as file:
        library.make_visible(file)


@contextmanager
def _exported(folder: Path, name: str, sha256: str) -> Iterator[Path]:
    """The path to load a file by, after its check; any failure meanwhile is an ExportError."""
    try:
        with store.loadable(folder / name, partial(_why_not, folder, sha256)) as file:
            yield file
    except ExportError:
        raise
    except OSError as error:
        raise ExportError(str(folder), f"{name} is missing or damaged ({error})") from error
    except (ImportError, AttributeError, RuntimeError, ValueError) as error:
        raise ExportError(str(folder), f"{name} cannot be loaded ({error})") from error


def _why_not(folder: Path, sha256: str, file: BinaryIO) -> str:
    _require_trust(folder, file)
    return "" if _checksum(file) == sha256 else "its hash is not the manifest's"


def _require_trust(folder: Path, file: BinaryIO) -> None:
    """Raises ExportError if anybody but the folder's owner could have written the folder or the file."""
    owner = folder.stat().st_uid
    for path, name in ((folder, "the folder"), (file.fileno(), Path(str(file.name)).name)):
        if why := store.why_distrusted(path, owners=[owner]):
            raise ExportError(str(folder), f"{name} is not trusted, since {why}")


def _checksum(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


@functools.cache
def _manifest(folder: Path) -> Manifest:
    found = _read(folder)
    if reason := _why_it_does_not_fit(found):
        raise ExportError(str(folder), reason)
    return found


def _read(folder: Path) -> Manifest:
    try:
        with store.opened(folder / MANIFEST) as file:
            _require_trust(folder, file)
            return manifest.parse(file.read())
    except (OSError, ValueError) as error:
        raise ExportError(str(folder), f"{MANIFEST} cannot be read ({error})") from error


def _why_it_does_not_fit(found: Manifest) -> str:
    """The reason why the manifest does not fit this machine; empty if it does.

    The compiler's version counts only if it is installed; otherwise the folder's own runtime is used.
    """
    theirs, ours = found.versions, versions()
    if theirs["machine"] != ours["machine"]:
        return f"it is for {theirs['machine']}, and this is {ours['machine']}"
    if lacking := sorted(set(theirs["CPU"].split()) - set(ours["CPU"].split())):
        return f"it needs a CPU with {', '.join(lacking)}, which this one lacks; export on one without, too"
    if ours[_COMPILER] not in ("none", theirs[_COMPILER]):
        return f"it was made by {_COMPILER} {theirs[_COMPILER]}, and {ours[_COMPILER]} is installed"
    return ""
