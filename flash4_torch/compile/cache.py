"""The folder that keeps compiled kernels: `kernels/` under FLASH4_CACHE_DIR, a file each.

A file is named by its kernel's digest. One that other versions made, or that was made on a CPU with other
instructions, has another name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from .. import store
from ..errors import CompileError
from .library import SUFFIXES

_FOLDER = "kernels"


def folder() -> Path:
    """Need not exist. Raises RangeError where FLASH4_CACHE_DIR names none."""
    return store.folder(_FOLDER)


def find(digest: str) -> Path | None:
    """The kernel's file, if it is there and whole."""
    return store.find(_FOLDER, digest, SUFFIXES)


@contextmanager
def obtained(digest: str, build: Callable[[Path], Path]) -> Iterator[Path]:
    """The kernel's file, to be read within the context: found, or made by `build(folder)`.

    One process builds, and others that ask meanwhile wait for it. Where the cache
    cannot keep it, the file is a temporary one, and a warning says so.
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
    """What to load `file` by, which is looked at once more: see `store.loadable`."""
    return store.loadable(file, partial(store.why_not_whole, stem=file.stem))


def require_writable() -> None:
    """Makes the folder if there is none. Raises RangeError where it cannot keep kernels."""
    store.writable(_FOLDER)


def contents() -> list[Path]:
    return sorted(file for suffix in SUFFIXES for file in folder().glob(f"*{suffix}"))
