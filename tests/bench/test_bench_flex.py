"""The processes in which the benchmark of flex_attention compiles ahead, or has torch choose kernels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from everything import EVERYTHING
from flash4_torch.bench import flex
from flash4_torch.bench.settings import Settings

PROGRAM = """
import multiprocessing, os, signal, time
from concurrent.futures import ProcessPoolExecutor
from flash4_torch.bench import flex

if __name__ == "__main__":
    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), flex._begin_process)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(print, "something", flush=True).result()
    # This keeps Python's lock, as compilers do.
    pool.submit(eval, "__import__('ctypes').PyDLL(None).sleep(1000)")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's prctl")
def test_they_end_with_the_process_that_measures_and_leave_its_output_alone(tmp_path: Path) -> None:
    """However that ends; what it writes ends with it, too, for whoever reads until the end."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True) as parent:
        output, _ = parent.communicate(timeout=60)
        assert parent.returncode == -signal.SIGKILL
    (worker,) = map(int, output.split())
    until = time.monotonic() + 5
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(worker, 0)
            time.sleep(0.05)
        pytest.fail("the process is still there")


def test_kernels_are_compiled_before_and_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    done: list[str] = []

    @contextmanager
    def turn() -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    class Choice:
        def precompile(self) -> None:
            done.append("compile")
            raise RuntimeError

    def time_all(choices: Any, more: int, *, last: int) -> tuple[int, ...]:
        done.append("time")
        return len(choices), more, last

    name = "benchmark_in_current_process"
    # The attribute that is replaced exists, and torch calls it by its class.
    assert callable(getattr(AlgorithmSelectorCache, name))
    monkeypatch.setattr(AlgorithmSelectorCache, name, staticmethod(time_all))
    flex._take_turns_to_choose(turn())
    assert AlgorithmSelectorCache.benchmark_in_current_process([Choice(), Choice()], 3, last=4) == (2, 3, 4)
    assert done == ["compile", "compile", "begin", "time", "end"]


if EVERYTHING:

    def test_rows_come_from_other_processes() -> None:
        chosen = [flex.Cell(mod, 16, 128, 2, 2) for mod in ("causal", "alibi")]
        rows = list(flex._tuned(chosen, Settings("cpu", rounds=2)))
        assert sorted((row["mod"], row["direction"]) for row in rows) == [
            (mod, direction) for mod in ("alibi", "causal") for direction in flex.DIRECTIONS
        ]
        assert all(0.0 < x < 1e-5 for row in rows for x in row["differences"]["flash4"].values())
