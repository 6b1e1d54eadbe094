"""The wheel, built from the sdist: what is in it, and that it runs where no repository is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flash4_torch

ROOT = Path(__file__).parents[2]
_BUILT = ("docs", "examples", "flash4_torch", "csrc_stubs", "tests")
"""Folders of the checkout; only two of them have a place in the wheel."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `python -m build` does, from a copy: setuptools writes next to its sources."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for folder in _BUILT:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "out"))
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Deprecat" not in done.stdout + done.stderr
    assert len(list(out.glob("*.tar.gz"))) == 1
    (built,) = out.glob("*.whl")
    return built


def test_name_says_any_python_on_any_machine(wheel: Path) -> None:
    assert wheel.name == f"flash4_torch-{flash4_torch.__version__}-py3-none-any.whl"


def test_files_are_the_package_and_the_emulators_sources(wheel: Path) -> None:
    package = ROOT / "flash4_torch"
    expected = {f"flash4_torch/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    expected |= {"flash4_torch/py.typed", "flash4_torch/bench/results/blackwell-weights.json"}
    emulator = ROOT / "csrc_stubs" / "no_gpu"
    expected |= {f"flash4_torch/emulator/csrc/{path.name}" for path in emulator.glob("*.cpp")}
    expected |= {f"flash4_torch/emulator/csrc/{path.name}" for path in emulator.glob("*.h")}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = {name.partition(".dist-info/")[2] for name in archive.namelist()} - {""}
    assert found == expected
    files = {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "top_level.txt", "entry_points.txt"}
    assert about == files


USE = """
import sys, torch, flash4_torch
from flash4_torch import __main__, testing
from flash4_torch.bench import prediction
from flash4_torch.emulator import build
home = sys.argv[1]
assert flash4_torch.__file__.startswith(home), flash4_torch.__file__
q, k, v = torch.randn(3, 2, 50, 4, 32)
exact, _ = testing.reference(q, k, v, causal=True)
assert (flash4_torch.attention(q, k, v, causal=True) - exact).abs().max() < 1e-5
assert str(build.source_folder()).startswith(home), build.source_folder()
assert str(prediction.RECORDED).startswith(home) and prediction.RECORDED.is_file()
ptx = '''
.version 8.7
.target sm_90a
.address_size 64
.visible .entry nothing() { ret; }
'''
assert testing.emulate.run_ptx(ptx).counters.instructions == 1
sys.exit(__main__.main(["info"]))
"""


def test_it_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Unpacked somewhere else, before everything that is installed here."""
    home = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)
    code = f"import sys; sys.path.insert(0, sys.argv[1])\n{USE}"
    command = [sys.executable, "-c", code, str(home)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ *flash4_torch +" + re.escape(flash4_torch.__version__), done.stdout, re.MULTILINE)
