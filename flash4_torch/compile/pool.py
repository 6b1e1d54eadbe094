"""Compilation of many kernels at once, into the disk cache, in separate processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from ..errors import CompileError, Flash4Error
from . import cache, jit
from .key import Key


class Prepared(NamedTuple):
    """A kernel in the cache, and its compile time in seconds; 0.0 if it was there before."""

    kernel: Key
    seconds: float


def _ignore(kernel: Key, took: float | str) -> None:
    pass


def prepare(
    keys: Sequence[Key],
    jobs: int | None,
    progress: Callable[[int, int], None],
    made: Callable[[Key, float | str], None] = _ignore,
) -> list[Prepared]:
    """Compiles the kernels of `keys` that the cache lacks, `jobs` at a time (default: one per processor).

    Where several processes prepare the same kernels at once, one does, and the others wait for it.

    progress: called with the number of finished kernels and the total; first with those already there.
    made: called with each kernel, those already there first, and the seconds that it took or the sentence
        that says why it failed.
    Raises CompileError after all others are done, and RangeError if the cache cannot be written to.
    """
    cache.require_writable()
    digests = [key.digest for key in keys]
    missing = _missing(keys, digests)
    if not missing:
        return _compiled(keys, missing, jobs, progress, made)
    with cache.alone(digests):
        return _compiled(keys, _missing(keys, digests), jobs, progress, made)


def _missing(keys: Sequence[Key], digests: Sequence[str]) -> list[Key]:
    return [key for key, digest in zip(keys, digests, strict=True) if cache.find(digest) is None]


def _compiled(
    keys: Sequence[Key],
    missing: Sequence[Key],
    jobs: int | None,
    progress: Callable[[int, int], None],
    made: Callable[[Key, float | str], None],
) -> list[Prepared]:
    jobs = max(1, min(jobs or len(os.sched_getaffinity(0)), len(missing)))
    seconds: dict[Key, float] = {}
    failures: list[str] = []
    progress(len(keys) - len(missing), len(keys))
    for key in sorted(set(keys) - set(missing), key=keys.index):
        made(key, 0.0)
    with _Workers() as workers, ThreadPoolExecutor(jobs) as threads:
        for key, answer in zip(missing, threads.map(workers.compile, missing), strict=True):
            if isinstance(answer, str):
                failures.append(answer)
            else:
                seconds[key] = answer
            made(key, answer)
            progress(len(keys) - len(missing) + len(seconds) + len(failures), len(keys))
    if failures:
        raise CompileError(f"{len(failures)} of {len(keys)} kernels", "\n".join(failures))
    return [Prepared(key, seconds.get(key, 0.0)) for key in keys]


class _Workers:
    """One process per calling thread; all end with the context.

    Not multiprocessing: it would run the user's script again in each, or fork what must not be forked.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._all: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *failure: object) -> None:
        for process in self._all:
            process.kill()
            process.communicate()

    def compile(self, key: Key) -> float | str:
        """Compiles one kernel; returns the seconds that it took, or the reason why it failed."""
        process = self._process()
        assert process.stdin and process.stdout
        try:
            pickle.dump(key, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, OSError):
            del self._of_thread.process
            return f"{key}: the compiling process ended with status {process.wait()}"

    def _process(self) -> subprocess.Popen[bytes]:
        if not hasattr(self._of_thread, "process"):
            code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
            command = [sys.executable, "-c", code]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._of_thread.process = process
            self._all.append(process)
        return self._of_thread.process


def serve() -> None:
    """Runs a worker: reads pickled keys and writes times or reasons, until the other side closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Output of print goes to stderr: it must not mix with the answers.
    while True:
        try:
            key = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_attempt(key), answers)
        answers.flush()


def _attempt(key: Key) -> float | str:
    start = time.perf_counter()
    try:
        with cache.obtained(key.digest, partial(jit.build, key)):
            return time.perf_counter() - start
    except Flash4Error as error:
        return str(error)
