"""Many kernels compiled at once, into the disk cache, by processes of their own."""

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
    """A kernel in the cache, and how long it took to compile; 0.0 if it was there before."""

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
    """Compiles what the cache lacks of `keys`, `jobs` at a time (default: as many as there are processors).

    progress: called with how many kernels are done, and of how many; first with those that were there before.
    made: called with each kernel, those that were there before first, and the seconds that it took or the
        sentence that says why it failed.
    Raises CompileError when all others are done, and RangeError if the cache cannot be written to.
    """
    cache.require_writable()
    missing = [key for key in keys if cache.find(key.digest) is None]
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
    """A process for each thread that asks; they end with the context.

    Not multiprocessing's: those run the user's script once more in each, and fork what must not be forked.
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
        """How many seconds it took, or why it failed."""
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
    """A worker: keys come in pickled, times or reasons go out, until the other side closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What anybody prints is no answer.
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
