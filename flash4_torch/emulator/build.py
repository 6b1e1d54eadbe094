"""Compiles the C++ parts on first use and keeps them in the user's cache.

An object file is kept under a hash of all that decides what is in it: its source, the headers that it
includes, flags, compiler and processor. So nothing is ever stale, and editing a file compiles that file again
and links.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from flash4_torch import env
from flash4_torch.emulator.errors import EmulatorError

# Arithmetic is as written; nobody reads floating-point exceptions and errno, which would keep loops scalar.
_ARITHMETIC = ("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno")
FLAGS = ("-O3", "-march=native", "-std=c++20", *_ARITHMETIC, "-fPIC", "-pthread", "-Wall", "-Wextra")
COMPILERS_AT_ONCE = 2

_PACKAGE = Path(__file__).parents[1]
# As installed, and as in a checkout.
_SOURCE_FOLDERS = (_PACKAGE / "emulator" / "csrc", _PACKAGE.parent / "csrc_stubs" / "no_gpu")
_unsaid = threading.Lock()
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class BuildError(EmulatorError):
    """There is no C++ compiler, or it refused a source: the message carries what it said."""


def engine() -> Path:
    """The shared object that executes PTX."""
    sources = [path for path in sorted(source_folder().glob("*.cpp")) if path.name != "runtime.cpp"]
    return shared_object("libflash4_engine", sources)


def runtime() -> Path:
    """The shared object that takes the place of CuTe-DSL's runtime library."""
    names = ("runtime", "tensor_map", "reduce")
    return shared_object("libflash4_no_gpu_runtime", [source_folder() / f"{name}.cpp" for name in names])


def source_folder() -> Path:
    for folder in _SOURCE_FOLDERS:
        if folder.is_dir():
            return folder
    raise BuildError("the emulator's C++ sources are missing: " + " and ".join(map(str, _SOURCE_FOLDERS)))


def shared_object(name: str, sources: Sequence[Path], flags: Sequence[str] = FLAGS) -> Path:
    """`name`.so, compiled from `sources` unless the cache has it.

    Processes that build at the same time wait for each other. Raises BuildError.
    """
    command = [compiler(), *flags]
    folder = _cache_folder()
    with _locked(folder / "lock"):
        with ThreadPoolExecutor(COMPILERS_AT_ONCE) as pool:
            objects = list(pool.map(functools.partial(_object, command, folder), sources))
        target = folder / f"{name}-{_digest(*(path.name for path in objects))}.so"
        if not target.exists():
            _run([*command, "-shared", *map(str, objects)], target)
    return target


def _object(command: Sequence[str], folder: Path, source: Path) -> Path:
    texts = (text for path in _with_headers(source) for text in (path.name, path.read_text()))
    target = folder / f"{source.stem}-{_digest(*command, _version(command[0]), _processor(), *texts)}.o"
    if not target.exists():
        _say_once()
        _run([*command, "-c", str(source)], target)
    return target


def _say_once() -> None:
    """Nobody should wonder what takes so long; the lock is never given back."""
    if _unsaid.acquire(blocking=False):
        print("flash4_torch: compiling the emulator once, about a minute", file=sys.stderr, flush=True)


def _with_headers(source: Path) -> list[Path]:
    """`source` and every header of ours that it includes, directly or not."""
    found = [source]
    for path in found:
        headers = (path.parent / name for name in _INCLUDE.findall(path.read_text()))
        found += [header for header in headers if header not in found]
    return found


def _run(command: Sequence[str], target: Path) -> None:
    """Runs a compiler that writes `target`, which appears only when it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unfinished = Path(folder) / target.name
        result = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
        if result.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{result.stderr}")
        os.replace(unfinished, target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_folder() -> Path:
    folder = Path(env.CACHE_DIR.get()).expanduser() / "build"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"cannot write to {folder}; {env.CACHE_DIR.name} names another folder") from error
    return folder


def compiler() -> str:
    """The path of the C++ compiler; raises BuildError where there is none."""
    for name in ("g++", "c++"):
        path = shutil.which(name)
        if path:
            return path
    raise BuildError("compiling the emulator needs g++, version 11 or later, on the PATH")


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _processor() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), text)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
