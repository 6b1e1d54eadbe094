"""The folder that keeps compiled kernels: `kernels/` under FLASH4_CACHE_DIR, a file each.

A file is named by its kernel's digest and ends in a seal, a hash of its contents and that name. It appears
complete or not at all, and one that the seal does not fit, or that other versions made, is not found.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .. import env
from .library import SUFFIXES

_MAGIC = b"flash4"
_SEAL = len(_MAGIC) + hashlib.sha256().digest_size


def folder() -> Path:
    return Path(env.CACHE_DIR.get()).expanduser() / "kernels"


def find(digest: str) -> Path | None:
    """The kernel's file, if it is there and whole."""
    files = (folder() / (digest + suffix) for suffix in SUFFIXES)
    return next((file for file in files if _is_sealed(file)), None)


@contextmanager
def obtained(digest: str, build: Callable[[Path], Path]) -> Iterator[Path]:
    """The kernel's file, to be read within the context: found, or made by `build(folder)`.

    One process builds, and others that ask meanwhile wait for it. Where the cache
    cannot be written to, the file is a temporary one, and a warning says so.
    """
    found = find(digest)
    if found is None and is_writable():
        with _locked(folder() / f"{digest}.lock"):
            found = find(digest) or _publish(digest, build)
    if found is not None:
        yield found
        return
    warnings.warn(
        f"kernels are compiled anew in each process, since {folder()} cannot be written to; "
        f"{env.CACHE_DIR.name} names another folder",
        RuntimeWarning,
        stacklevel=3,
    )
    with tempfile.TemporaryDirectory() as temporary:
        yield build(Path(temporary))


def _publish(digest: str, build: Callable[[Path], Path]) -> Path:
    with tempfile.TemporaryDirectory(dir=folder()) as unfinished:
        built = build(Path(unfinished))
        with built.open("ab") as file:
            file.write(_seal(digest, built.read_bytes()))
        return built.rename(folder() / (digest + built.suffix))


def _is_sealed(file: Path) -> bool:
    try:
        contents = file.read_bytes()
    except OSError:
        return False
    return contents[-_SEAL:] == _seal(file.stem, contents[:-_SEAL])


def _seal(digest: str, contents: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(digest.encode() + contents).digest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; ends when its holder dies, and is not inherited by forks of it.

    File systems without locks go without: at worst two processes compile the same.
    """
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def is_writable() -> bool:
    """Whether kernels can be kept; makes the folder if there is none."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        return os.access(folder(), os.W_OK)
    except OSError:
        return False


def contents() -> list[Path]:
    return sorted(file for suffix in SUFFIXES for file in folder().glob(f"*{suffix}"))
