"""Compiles the C++ parts on first use and keeps them in the user's cache.

An object file is stored under a hash of everything that determines its contents: its source, the headers that
it includes, the flags, the compiler and the CPU's instruction set. So nothing is ever stale, and editing a
file recompiles that file only and links again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flash4_torch import env, forks, processor, store
from flash4_torch.emulator.errors import EmulatorError
from flash4_torch.errors import RangeError

# Arithmetic is as written; FP exceptions and errno, which nobody reads, would keep loops scalar.
_ARITHMETIC = ("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno")
FLAGS = ("-O3", "-march=native", "-std=c++20", *_ARITHMETIC, "-fPIC", "-pthread", "-Wall", "-Wextra")
COMPILERS_AT_ONCE = 2

_FOLDER = "build"
_one_at_a_time = forks.Lock()

_PACKAGE = Path(__file__).parents[1]
# The folders of an installed package and of a checkout.
_SOURCE_FOLDERS = (_PACKAGE / "emulator" / "csrc", _PACKAGE.parent / "csrc_stubs" / "no_gpu")
_unsaid = threading.Lock()
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class BuildError(EmulatorError):
    """There is no C++ compiler, or it refused a source: the message contains its output."""


def engine() -> Path:
    """Path of the shared object that executes PTX."""
    sources = [path for path in sorted(source_folder().glob("*.cpp")) if path.name != "runtime.cpp"]
    return shared_object("libflash4_engine", sources)


def runtime() -> Path:
    """Path of the shared object that takes the place of CuTe-DSL's runtime library."""
    names = ("runtime", "tensor_map", "reduce")
    return shared_object("libflash4_no_gpu_runtime", [source_folder() / f"{name}.cpp" for name in names])


def load(path: Path) -> ctypes.CDLL:
    """Loads a shared object that was built here. Raises BuildError."""
    try:
        with store.loadable(path, functools.partial(store.why_not_whole, stem=path.stem)) as same:
            return ctypes.CDLL(str(same))
    except OSError as error:
        raise BuildError(f"the emulator cannot be loaded: {error}") from error


def source_folder() -> Path:
    for folder in _SOURCE_FOLDERS:
        if folder.is_dir():
            return folder
    raise BuildError("the emulator's C++ sources are missing: " + " and ".join(map(str, _SOURCE_FOLDERS)))


def shared_object(name: str, sources: Sequence[Path], flags: Sequence[str] = FLAGS) -> Path:
    """`name`.so, compiled from `sources` unless the cache has it.

    Processes that build at the same time wait for each other. Raises BuildError.
    """
    command = [compiler(), *flags, *shlex.split(env.EMULATOR_FLAGS.get())]
    with _one_at_a_time.held():
        with ThreadPoolExecutor(COMPILERS_AT_ONCE) as pool:
            objects = list(pool.map(functools.partial(_object, command), sources))
        stem = f"{name}-{_digest(*(path.name for path in objects))}"
        return _kept(stem, ".so", [*command, "-shared", *map(str, objects)])


def _object(command: Sequence[str], source: Path) -> Path:
    texts = (text for path in _with_headers(source) for text in (path.name, path.read_text()))
    machine = (platform.machine(), *processor.extensions())
    stem = f"{source.stem}-{_digest(*command, _version(command[0]), *machine, *texts)}"
    return _kept(stem, ".o", [*command, "-c", str(source)])


def _kept(stem: str, suffix: str, command: Sequence[str]) -> Path:
    """The file in the cache that the compiler makes with `command`; it is compiled only if it is missing."""

    def build(folder: Path) -> Path:
        _run([*command, "-o", str(folder / (stem + suffix))])
        return folder / (stem + suffix)

    try:
        if store.find(_FOLDER, stem, (suffix,)) is None:
            store.writable(_FOLDER)  # the compiler takes a minute, so find out first
            _say_once()
        with store.obtained(_FOLDER, stem, (suffix,), build) as (path, why_temporary):
            if why_temporary:
                raise BuildError(f"the emulator cannot be built: {why_temporary}")
            return path
    except (OSError, RangeError) as error:
        raise BuildError(f"the emulator cannot be built: {error}") from error


def _say_once() -> None:
    """Prints once that the engine is being compiled, so that nobody wonders about the wait.

    The lock is never released.
    """
    if _unsaid.acquire(blocking=False):
        print("flash4_torch: compiling the emulator once, about a minute", file=sys.stderr, flush=True)


def _with_headers(source: Path) -> list[Path]:
    """`source` and every header of ours that it includes, directly or indirectly."""
    found = [source]
    for path in found:
        headers = (path.parent / name for name in _INCLUDE.findall(path.read_text()))
        found += [header for header in headers if header not in found]
    return found


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stderr}")


def compiler() -> str:
    """The path of the C++ compiler; raises BuildError if there is none."""
    for name in ("g++", "c++"):
        path = shutil.which(name)
        if path:
            return path
    raise BuildError("compiling the emulator needs g++, version 11 or later, on the PATH")


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
