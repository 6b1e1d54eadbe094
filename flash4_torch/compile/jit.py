"""Compilation: a kernel's entry is called with its static arguments. No tensor is used, nothing is launched.

The compiler is imported only when something has to be compiled.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import forks
from ..errors import CompileError
from . import library
from .key import Key, is_edited

_PACKAGES = "pip install 'flash4_torch[kernels]'"
_OF_THE_COMPILER = r"(.*[./])?(cutlass|nvidia_cutlass_dsl|flash4_torch[./]kernels)\b"
_COLORS = re.compile("\x1b\\[[0-9;]*m")
_STAND_IN = "libflash4_no_gpu"
"""Prefix of the library that the emulator puts in place of CUDA's."""

_one_at_a_time = forks.Lock()
"""Lock around the compiler, which has one target per process and whose tracing is not thread-safe."""


def build(key: Key, folder: Path) -> Path:
    """Compiles the kernel of `key` into a file in `folder`, which exports it under the key's digest.

    This takes one to three seconds. The environment and the compiler's settings are the same afterwards.
    Raises CompileError, with the key in words.
    """
    object_file = folder / f"{key.digest}.o"
    try:
        with _one_at_a_time.held(), quiet():
            with _targeting(key.arch):
                resolve(key.entry)(*key.static).export_to_c(str(object_file), function_name=key.digest)
            if is_edited(key.entry):
                raise RuntimeError("its sources have changed since this process began; start it again")
            return library.link(object_file)
    except ModuleNotFoundError as error:
        raise CompileError(str(key), f"{error.name} must be installed ({_PACKAGES})") from error
    except Exception as error:
        reason = _COLORS.sub("", str(error)).strip()
        raise CompileError(str(key), f"{type(error).__name__}: {reason}") from error


def resolve(entry: str) -> Any:
    """The function that "package.module:function" names."""
    module, _, function = entry.partition(":")
    return getattr(import_module(module), function)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the compiler's warnings, also those that it raises at lines of kernels; no others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=_OF_THE_COMPILER)
        yield


@contextmanager
def _targeting(arch: str) -> Iterator[None]:
    """Sets the target like CUTE_DSL_ARCH, which the compiler reads only when it is imported.

    The compiler takes this machine for one that cannot run the code, or it would compile the host code twice
    more, to call it here.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    compiler: Any = CuTeDSL._get_dsl()
    settings = compiler.envar
    if _STAND_IN in (settings.shared_libs or ""):
        raise RuntimeError("the emulator holds this process's compiler; leave it, or compile with warmup()")
    before = settings._arch
    settings.arch = arch
    compiler._runtime_can_run_compiled = lambda runtime, compiled: False
    try:
        yield
    finally:
        del compiler._runtime_can_run_compiled
        settings._arch = before
