"""Folders under FLASH4_CACHE_DIR that keep build results: kernels, and the emulator's C++ parts.

A file appears complete or not at all. It ends in a seal, a hash of its contents and of its name. A file whose
seal does not match, or that another user could have written, is treated as missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from . import env
from .errors import RangeError

_MAGIC = b"flash4"
_SEAL = len(_MAGIC) + hashlib.sha256().digest_size
_PRIVATE = 0o700
_READ_BY_ALL = 0o644
_PREFIX = "flash4_torch-"
"""Prefix of temporary folders and unfinished files."""
_STALE = 3600
"""Age in seconds from which they are checked for a living process, which has locked its folder by then."""


# Folders


def folder(name: str) -> Path:
    """The folder called `name`, which need not exist. Raises RangeError."""
    text = env.CACHE_DIR.get()
    try:
        return Path(text).expanduser() / name
    except (OSError, RuntimeError) as error:
        raise RangeError(env.CACHE_DIR.name, text, f"it must name a folder ({error})") from error


def writable(name: str) -> Path:
    """The folder called `name`, created if it is missing. Raises RangeError if files cannot be kept in it."""
    path = folder(name)
    try:
        make_folder(path, _PRIVATE)
        why = why_distrusted(path) or ("" if os.access(path, os.W_OK | os.X_OK) else "no permission")
    except OSError as error:
        why = str(error)
    if why:
        raise RangeError(env.CACHE_DIR.name, path, f"it must be a folder that can be written to ({why})")
    return path


def make_folder(path: Path, mode: int) -> None:
    """Creates the folder and its missing parents. Raises OSError, before any if the path cannot be one."""
    with suppress(FileNotFoundError):
        os.stat(path)
    for missing in reversed([p for p in (path, *path.parents) if not os.path.isdir(p)]):
        missing.mkdir(mode, exist_ok=True)


# Trust


def why_distrusted(path: Path | int, owners: Collection[int] = ()) -> str:
    """A sentence if anybody but this user, root and `owners` could have written a folder or an open file.

    Raises OSError.
    """
    status = os.stat(path)
    if status.st_uid not in {0, os.geteuid(), *owners}:
        return f"it belongs to another user, {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "users other than its owner may write to it; chmod go-w changes that"
    return ""


# Reading and loading


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file opened for reading. Raises OSError, also for anything but a regular file: a pipe would block."""
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a file")
        yield file


@contextmanager
def loadable(path: Path, why_not: Callable[[BinaryIO], str]) -> Iterator[Path]:
    """A path for dlopen that is certain to name the very file that `why_not` has read and accepted.

    Raises OSError, with the sentence of `why_not` if there is one. Without /proc or a temporary folder it
    falls back to `path`.
    """
    with opened(path) as file, ExitStack() as held:
        if why := why_not(file):
            raise OSError(f"{path}: {why}")
        link = path
        with suppress(OSError):
            # A new folder each time: for a path that it has seen before, dlopen returns the old library.
            link = held.enter_context(_private_folder(Path(tempfile.gettempdir()))) / path.name
            link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        yield link if link.exists() else path


def why_not_whole(file: BinaryIO, stem: str) -> str:
    """A sentence if others could have written the file, or if it is incomplete. Raises OSError."""
    why = why_distrusted(file.fileno())
    return why or ("" if _is_sealed(file.read(), stem) else "it is damaged")


def find(name: str, stem: str, suffixes: Sequence[str]) -> Path | None:
    """The first of the files in the folder `name` that exists, is complete, and that nobody else wrote."""
    try:
        place = folder(name)
        if why_distrusted(place):
            return None
    except (OSError, RangeError):
        return None
    return next((file for suffix in suffixes if not _why_not_found(file := place / (stem + suffix))), None)


def _why_not_found(path: Path) -> str:
    try:
        with opened(path) as file:
            return why_not_whole(file, path.stem)
    except OSError as error:
        return str(error)


def _is_sealed(contents: bytes, stem: str) -> bool:
    return contents[-_SEAL:] == _seal(contents[:-_SEAL], stem)


def _seal(contents: bytes, stem: str) -> bytes:
    return _MAGIC + hashlib.sha256(stem.encode() + contents).digest()


# Writing


class Obtained(NamedTuple):
    path: Path
    why_temporary: str
    """Reason why the file is not kept; empty if it is."""


@contextmanager
def obtained(
    name: str, stem: str, suffixes: Sequence[str], build: Callable[[Path], Path]
) -> Iterator[Obtained]:
    """A file of the folder `name`, to be used within the context: found, or made by `build(private folder)`.

    build: returns the file's path, which ends in one of `suffixes`.

    One process builds; others that ask for the same file meanwhile wait for it. A file that cannot be kept is
    temporary. Raises the errors of `build`, and OSError if there is no place at all to build in.
    """
    found = find(name, stem, suffixes)
    if found is not None:
        yield Obtained(found, "")
        return
    with building(name) as private:
        yield _found_or_built(name, stem, suffixes, lambda: _built(build, private, stem))


def _found_or_built(name: str, stem: str, suffixes: Sequence[str], build: Callable[[], Path]) -> Obtained:
    try:
        place = writable(name)
    except RangeError as error:
        return Obtained(build(), str(error))
    _sweep(place)
    with locked(place / f"{stem}.lock"):
        found = find(name, stem, suffixes)
        if found is not None:
            return Obtained(found, "")
        built = build()
        kept = place / (stem + built.suffix)
        try:
            _warn_of_others(kept)
            write(kept, built.read_bytes())
            why = _why_not_found(kept)
        except OSError as error:
            why = str(error)
    where = f"{env.CACHE_DIR.name} may name another folder"
    return Obtained(built, f"{kept} cannot be kept ({why}); {where}") if why else Obtained(kept, "")


def _warn_of_others(path: Path) -> None:
    with suppress(FileNotFoundError):
        if why := why_distrusted(path):
            warnings.warn(f"{path} is made anew and not loaded, since {why}", RuntimeWarning, stacklevel=2)


def _built(build: Callable[[Path], Path], private: Path, stem: str) -> Path:
    path = build(private)
    contents = path.read_bytes()
    with path.open("ab") as file:
        file.write(_seal(contents, stem))
    return path


def write(path: Path, contents: bytes) -> None:
    """Replaces the file atomically, also while others have it open, and durably. Raises OSError."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=_PREFIX)
    try:
        with open(descriptor, "wb") as file:
            file.write(contents)
            file.flush()
            os.fchmod(descriptor, _READ_BY_ALL)
            os.fsync(descriptor)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock that one process holds at a time; it ends with its holder, and forks do not inherit it.

    If the lock cannot be had (some file systems have none), or if other users could hold it forever, the
    context runs without it: at worst two processes build the same file.
    """
    with ExitStack() as held:
        with suppress(OSError):
            descriptor = held.enter_context(_descriptor(path, os.O_RDWR | os.O_CREAT, 0o600))
            if not why_distrusted(descriptor):
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def building(name: str) -> Iterator[Path]:
    """A private folder for the duration of the context; inside the folder `name` only if necessary.

    Anybody who may write to a parent of the cache could replace the files that a compiler is about to read.
    """
    try:
        place = Path(tempfile.gettempdir())
    except FileNotFoundError:
        place = writable(name)
    _sweep(place)
    with _private_folder(place) as private:
        yield private


@contextmanager
def _private_folder(place: Path) -> Iterator[Path]:
    """A temporary folder, locked while its process lives, so that `_sweep` can recognise abandoned ones.

    tempfile's own context would not do: it removes the folder at the end of every process forked meanwhile.
    """
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    try:
        with _descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Removes the leftovers of killed processes from `place`."""
    for rest in place.glob(f"{_PREFIX}*"):
        with suppress(OSError), _descriptor(rest, os.O_RDONLY) as descriptor:
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and status.st_mtime < time.time() - _STALE:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(rest) if stat.S_ISDIR(status.st_mode) else rest.unlink()


@contextmanager
def _descriptor(path: Path, flags: int, mode: int = 0) -> Iterator[int]:
    """An open descriptor; opening neither follows a final symbolic link nor waits for a pipe's other end."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
