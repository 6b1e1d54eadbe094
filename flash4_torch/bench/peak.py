"""Peak memory of one call, measured in a separate process.

On a CPU it is the growth of the process's peak resident memory. That includes everything, also library
buffers and allocator overhead. But a peak never falls, and freed memory is used again. So each measurement
gets a fresh process, forked from a server that has only imported torch; it first runs the same call at a
small size, to load the code and the buffers that every size needs, and makes its inputs before it starts to
count. On a GPU it is the growth of the allocator's peak.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from .settings import Settings

Prepare = Callable[..., Callable[[], Any]]
"""prepare(size, device, ...) makes the inputs and returns the call to measure. It runs in the process."""


def peak_mib(settings: Settings, prepare: Prepare, size: int, small: int, *arguments: Any) -> float:
    """MiB that the call of `prepare(size, device, *arguments)` needs besides its inputs, results included."""
    if settings.on_gpu:
        return _peak_mib(settings, prepare, size, small, *arguments)
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, prepare.__module__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak_mib, settings, prepare, size, small, *arguments).result()


def _peak_mib(settings: Settings, prepare: Prepare, size: int, small: int, *arguments: Any) -> float:
    torch.set_num_threads(settings.threads)
    prepare(small, settings.device, *arguments)()
    call = prepare(size, settings.device, *arguments)
    if settings.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = _peak(settings)
    # Kept alive until the peak is read, as a caller would keep them.
    results = call()
    after = _peak(settings)
    del results
    return (after - before) / 2**20


def _peak(settings: Settings) -> int:
    if settings.on_gpu:
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
