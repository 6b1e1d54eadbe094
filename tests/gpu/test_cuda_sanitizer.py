"""compute-sanitizer finds nothing in small calls of every family of kernels."""

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


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sanitizer_finds_nothing(family: str, tool: str) -> None:
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [str(_SANITIZER), "--tool", tool, "--error-exitcode", "9", sys.executable, str(_CALLS), family]
    found = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stdout[-4000:]}\n{found.stderr[-2000:]}"
    assert "ERROR SUMMARY: 0 errors" in found.stdout
    assert f"{family}: served by" in found.stdout
