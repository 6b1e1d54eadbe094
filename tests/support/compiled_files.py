"""Kernels compiled to files, once for all tests of a run, by the processors that other tests leave idle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

import cubin
from flash4_torch import env
from flash4_torch.compile import Key, cache, jit, pool


def folder_of_all_workers(folders: pytest.TempPathFactory) -> Path:
    """The run's temporary folder, one for all processes of pytest-xdist."""
    own = folders.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def codes(keys: Sequence[Key], folders: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    """The code in each kernel's file."""
    return {key: cubin.read(file)[0] for key, file in files(keys, folders).items()}


def files(keys: Sequence[Key], folders: pytest.TempPathFactory) -> dict[Key, Path]:
    folder = folder_of_all_workers(folders)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.CACHE_DIR.name, str(folder / "kernels"))
        jobs = len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
        if jobs > 1:
            pool.prepare(keys, jobs, lambda done, total: None)
        else:
            _prepare_here(keys)
        return {key: _found(key) for key in keys}


def _prepare_here(keys: Sequence[Key]) -> None:
    """Compiles in this process: to start others that import torch and the compiler takes as long as a few
    kernels, and pytest-xdist has given each processor its work.
    """
    for key in keys:
        with cache.obtained(key.digest, partial(jit.build, key)):
            pass


def _found(key: Key) -> Path:
    file = cache.find(key.digest)
    assert isinstance(file, Path)
    return file
