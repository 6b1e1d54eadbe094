"""Processes that are ranks of a gloo group, started once, which run functions of a test together."""

from __future__ import annotations

import atexit
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

TIMEOUT_S = 30
"""What a rank waits for another one, at most."""

# Ranks are forked from a process that has these: importing them takes each rank longer than most tests.
# What is tested is not among them; a rank imports it from where the test has it.
_context = torch.multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "hypothesis",
        "pytest",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
    ]
)


class Ranks:
    """`size` processes; `run(function, *arguments)` calls it on each, and returns all results."""

    def __init__(self, size: int, timeout_s: float = TIMEOUT_S):
        self._folder = tempfile.TemporaryDirectory()
        self._timeout_s = timeout_s
        self._ends, self._processes = [], []
        for rank in range(size):
            here, there = _context.Pipe()
            arguments = (rank, size, Path(self._folder.name), timeout_s, there)
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of all ranks.

        Raises:
            AssertionError: a rank raised, with its traceback, or did not return in time.
        """
        results = self.outcomes(function, *arguments)
        wrong = [f"rank {rank}:\n{found}" for rank, (ok, found) in enumerate(results) if not ok]
        assert not wrong, "\n".join(wrong)
        return [found for _, found in results]

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """A pair for each rank: (True, its result), or (False, its traceback)."""
        for end in self._ends:
            end.send((function, arguments))
        return [self._answer(end) for end in self._ends]

    def _answer(self, end: Connection) -> tuple[bool, Any]:
        if not end.poll(2 * self._timeout_s):
            return False, "no answer: it hangs"
        try:
            answer: tuple[bool, Any] = end.recv()
        except EOFError:
            return False, "the process has ended"
        return answer

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


@cache
def ranks(size: int) -> Ranks:
    """Ranks that all tests share."""
    shared = Ranks(size)
    atexit.register(shared.stop)
    return shared


def _serve(rank: int, size: int, folder: Path, timeout_s: float, end: Connection) -> None:
    # Otherwise gloo looks the host's name up, which not every machine can.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=r"`torch\.distributed\..* is deprecated")
    store = f"file://{folder / 'store'}"
    timeout = timedelta(seconds=timeout_s)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            return
        try:
            answer = True, function(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        end.send(answer)
