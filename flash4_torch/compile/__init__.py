"""Compiled kernels by name, from the first source that has them: this process, an export, disk, compiler.

    forward = function("flash4_torch.kernels.sm90.fwd.launch:compile_forward", (features, config), "sm_90a")
    forward(q, k, v, ...)

Only the compiler, the last of the four, is slow to import and to run.
"""

from __future__ import annotations

import os
import threading
from functools import partial

from ..errors import CompileError
from . import aot, cache, jit, library
from .key import Key
from .library import Function

__all__ = ["Function", "Key", "function"]

_functions: dict[tuple[str, tuple[object, ...], str], Function] = {}
_locks: dict[Key, threading.Lock] = {}
os.register_at_fork(after_in_child=_locks.clear)


def function(entry: str, static: tuple[object, ...], arch: str) -> Function:
    """The compiled kernel that `entry`, "package.module:function", returns for function(*static).

    static: hashable and plain: strings, numbers, None, and (named) tuples of these.
    arch: one of `arch.NAMES`, as "sm_90a".

    The kernel takes torch tensors, launches on the current stream of their device, and keeps none of them.
    Raises CompileError.
    """
    found = _functions.get((entry, static, arch))
    return _obtain(Key(entry, static, arch)) if found is None else found


def _obtain(key: Key) -> Function:
    with _locks.setdefault(key, threading.Lock()):
        if key not in _functions:
            _functions[key] = _load(key)
        return _functions[key]


def _load(key: Key) -> Function:
    exported = aot.find(key)
    if exported is not None:
        return exported
    with cache.obtained(key.digest, partial(jit.build, key)) as file:
        try:
            with cache.loadable(file) as same:
                return library.load(same, key.digest)
        except (ImportError, RuntimeError, OSError, AttributeError) as error:
            raise CompileError(str(key), f"{file} cannot be loaded: {error}") from error
