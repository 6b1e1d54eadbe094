"""The folder that keeps compiled kernels: `kernels/` under FLASH4_CACHE_DIR, one file per kernel.

A file is named after its kernel's digest. Files from other versions, or from a CPU with other instructions,
have other names.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from .. import store
from ..errors import CompileError
from .library import SUFFIXES

_FOLDER = "kernels"


def folder() -> Path:
    """The cache's folder, which need not exist. Raises RangeError if FLASH4_CACHE_DIR names no folder."""
    return store.folder(_FOLDER)


def find(digest: str) -> Path | None:
    """The kernel's file, if it exists and is complete."""
    return store.find(_FOLDER, digest, SUFFIXES)


@contextmanager
def obtained(digest: str, build: Callable[[Path], Path]) -> Iterator[Path]:
    """The kernel's file, to be read within the context: found, or made by `build(folder)`.

    One process builds; others that ask for the same kernel meanwhile wait for it. If the cache cannot keep
    the file, it is temporary, and a warning says so.
    """
    with ExitStack() as held:
        try:
            path, why_temporary = held.enter_context(store.obtained(_FOLDER, digest, SUFFIXES, build))
        except OSError as error:
            raise CompileError(f"kernel {digest}", f"there is no room for its file: {error}") from error
        if why_temporary:
            what = "kernels are compiled anew in each process"
            warnings.warn(f"{what}: {why_temporary}", RuntimeWarning, stacklevel=3)
        yield path


def loadable(file: Path) -> AbstractContextManager[Path]:
    """The path to load `file` by, after another check of the file: see `store.loadable`."""
    return store.loadable(file, partial(store.why_not_whole, stem=file.stem))


@contextmanager
def alone(digests: Iterable[str]) -> Iterator[None]:
    """A context for one process at a time of those that prepare the same kernels, as an engine's workers do:
    the others wait, and then find them."""
    name = hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:32]
    with store.locked(folder() / f"{name}.lock"):
        yield


def require_writable() -> None:
    """Creates the folder if it is missing. Raises RangeError if it cannot keep kernels."""
    store.writable(_FOLDER)


def contents() -> list[Path]:
    return sorted(file for suffix in SUFFIXES for file in folder().glob(f"*{suffix}"))
