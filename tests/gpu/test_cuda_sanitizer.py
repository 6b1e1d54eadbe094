"""compute-sanitizer finds nothing in small calls of every family of kernels.

Hopper's backward is left out of synccheck: where one warpgroup's block is partial and the other's is not,
they meet at one named barrier in two copies of the loop's body. PTX allows it, synccheck calls it divergent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sanitized_calls import FAMILIES

_SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
_CALLS = Path(__file__).with_name("sanitized_calls.py")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(_SANITIZER is None, reason="needs compute-sanitizer"),
]


_CASES = [
    *((family, "memcheck") for family in FAMILIES),
    *((family, "synccheck") for family in FAMILIES if family not in ("own_kernels", "flex")),
]


@pytest.mark.parametrize(("family", "tool"), _CASES)
def test_the_sanitizer_finds_nothing(family: str, tool: str) -> None:
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [str(_SANITIZER), "--tool", tool, "--error-exitcode", "9", sys.executable, str(_CALLS), family]
    found = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stdout[-4000:]}\n{found.stderr[-2000:]}"
    assert "ERROR SUMMARY: 0 errors" in found.stdout
    assert f"{family}: served by" in found.stdout
