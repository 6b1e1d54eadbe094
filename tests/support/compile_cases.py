"""Entries for tests of the compile layer: small kernels, and ways to fail. A call leaves a line in `log`."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any, NamedTuple


class Scale(NamedTuple):
    factor: float
    log: str


def compile_scale(scale: Scale) -> Any:
    """A compiled function of a float32 vector on the GPU, which it multiplies."""
    _note(scale.log)
    import compile_kernel

    return compile_kernel.compile_scale(scale.factor)


def compile_with_warnings(log: str) -> Any:
    """Warns as the compiler does, at its own lines and at those of kernels, and once as other code."""
    _note(log)
    import compile_kernel

    for module in ("cutlass.cute.arch", "flash4_torch.kernels.sm90.fwd.kernel"):
        warnings.warn_explicit("of the compiler", DeprecationWarning, f"{module}.py", 1, module=module)
    warnings.warn_explicit("of the user", DeprecationWarning, "train.py", 1, module="train")
    return compile_kernel.compile_scale_with_deprecated_names()


def compile_in_vain(log: str) -> Any:
    _note(log)
    print("tracing")
    raise ValueError("\n\x1b[91m\x1b[1mtiles\x1b[0m of 3 rows")  # in colors, as the compiler's own


def compile_without(package: str) -> Any:
    raise ModuleNotFoundError(name=package)


def die_at_first(log: str) -> Any:
    """Dies like a process that is killed while it compiles; a later one succeeds."""
    _note(log)
    if len(Path(log).read_text().splitlines()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    import compile_kernel

    return compile_kernel.compile_scale(1.0)


def _note(log: str) -> None:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
