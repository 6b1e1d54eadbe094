"""The command line: `info` tells the truth and imports nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash4_torch
from flash4_torch import backends, env, info
from flash4_torch.__main__ import main
from flash4_torch.backends.compiled import TARGETS
from flash4_torch.compile import key, library


def test_info_prints_everything_it_collects(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert flash4_torch.__version__ in text and torch.__version__ in text
    assert info.cpu()["name"] in text
    for backend in backends.PRIORITY:
        assert f"\n  {backend.name} " in text
    for variable in env.ALL:
        assert variable.name in text
    for arch, target in TARGETS.items():
        assert f"\n  {arch} " in text and target.proven in text
    assert "FLASH4_BACKEND  tiled" in text
    assert f"kernel cache: {info.kernel_cache()}" in text


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == info.collect()


def test_info_says_who_serves_and_why_the_others_do_not() -> None:
    reasons = info.backends("cpu")
    assert reasons["cpu"] == [] and reasons["tiled"] == []
    assert "it serves cuda" in reasons["sdpa"][0]


def test_info_says_whose_cuda_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that may be installed: ptxas of one may spill where that of another does not."""
    monkeypatch.setattr(library, "installed_runtime", lambda: Path("/x/cu99/lib/libcute_dsl_runtime.so"))
    monkeypatch.setattr(key, "versions", key.versions.__wrapped__)
    assert info.versions()["CUDA (of nvidia-cutlass-dsl)"] == "cu99"
    assert "CUDA (of nvidia-cutlass-dsl)  cu99" in info.text(info.collect())


def test_info_says_how_kernels_were_proven() -> None:
    """What no GPU has run must say so."""
    proven = info.kernels()
    assert "timed on an H200" in proven["sm_90a"]
    for arch in proven.keys() - {"sm_90a"}:
        assert "never run on a GPU, never timed" in proven[arch] and "emulator" in proven[arch]


def test_info_imports_nothing_heavy() -> None:
    code = (
        "import sys; from flash4_torch.__main__ import main; main(['info']);"
        "print([m for m in ('cutlass', 'triton', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
