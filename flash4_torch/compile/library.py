"""Kernels as files: links what the compiler exports, and loads it without the compiler.

A kernel is a shared library that exports one tvm-ffi function. Without an installed linker it stays an object
file, which only the compiler's own loader reads: the first call then takes half a second longer.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Function = Callable[..., Any]

SUFFIXES = (".so", ".o")

_LINKERS = ("ld", "ld.lld", "cc", "gcc", "clang")
RUNTIME = "libcute_dsl_runtime.so"


def link(object_file: Path) -> Path:
    """The shared library linked from `object_file`, next to it; the object file itself without a linker."""
    target = object_file.with_suffix(".so")
    for linker in filter(None, map(shutil.which, _LINKERS)):
        command = [linker, "-shared", "-o", str(target), str(object_file)]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return target
    return object_file


def load(file: Path, name: str, provide_runtime: Callable[[], None] | None = None) -> Function:
    """The function `name` of a kernel's file, which may be deleted afterwards.

    It takes torch tensors and launches on the current stream of their device. Loading needs no GPU.
    provide_runtime: loads the compiler's runtime library; default: the installed one.
    """
    import tvm_ffi

    if file.suffix == ".o":
        import cutlass.cute as cute

        return getattr(cute.runtime.load_module(str(file), enable_tvm_ffi=True), name)
    (provide_runtime or _provide_installed_runtime)()
    return tvm_ffi.load_module(str(file))[name]


@functools.cache
def _provide_installed_runtime() -> None:
    make_visible(installed_runtime())


def make_visible(runtime: Path) -> None:
    """Makes the functions of the runtime library visible to kernels; importing tvm-ffi does so for its own.

    Raises ImportError.
    """
    try:
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ImportError(f"the runtime library cannot be loaded: {error}") from error


@functools.cache
def installed_runtime() -> Path:
    """Path such as .../cu12/lib/libcute_dsl_runtime.so, for the newest CUDA that the driver supports.

    The compiler makes the same choice, but is not imported for it. Raises ImportError.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    found: dict[int, Path] = {}
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(folder).glob(f"cu*/lib/{RUNTIME}"):
            if flavor := re.fullmatch(r"cu(\d+)", file.parents[1].name):
                found[int(flavor[1])] = file
    served = [version for version in found if version <= _driver_version()]
    if not served:
        raise ImportError(f"{RUNTIME} of nvidia-cutlass-dsl is not installed for this CUDA driver")
    return found[max(served)]


def _driver_version() -> float:
    """The driver's major CUDA version; infinity without a driver, which allows every version."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return float("inf")
    return float("inf") if failed else version.value // 1000
