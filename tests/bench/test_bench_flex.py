"""The processes in which the benchmark of flex_attention compiles ahead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

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
