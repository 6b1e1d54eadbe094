"""Bad input of the environment, the command line, warm-up: an error says what is wrong, nothing compiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bad_inputs import Case, check, command_line, environment, warm_up
from flash4_torch import env
from flash4_torch.compile import pool


@pytest.fixture(autouse=True)
def nothing_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bad input is found before the first compiler starts."""
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool, "_Workers", None)
    yield
    assert {path.name for path in tmp_path.rglob("*")} <= {"kernels"}, "a cache, and nothing in it"


@pytest.mark.parametrize("case", environment.CASES, ids=lambda case: case.name)
def test_environment(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", warm_up.CASES, ids=lambda case: case.name)
def test_warmup_and_export(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", command_line.CASES, ids=range(len(command_line.CASES)))
def test_command_line(case: Case) -> None:
    check(case)
