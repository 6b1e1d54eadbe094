"""Kernels compiled to files, once for all tests of a run and by all processors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import cubin
from flash4_torch import env
from flash4_torch.compile import Key, cache, pool


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
        pool.prepare(keys, len(os.sched_getaffinity(0)), lambda done, total: None)
        return {key: _found(key) for key in keys}


def _found(key: Key) -> Path:
    file = cache.find(key.digest)
    assert isinstance(file, Path)
    return file
