"""SGLang's engine, with our attention, against transformers: the same tokens and logprobs.

`make test-serving` runs this; elsewhere it is skipped, unless SGLang is installed. The engine's processes are
real; what a CPU lacks is in `sglang_engine`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine_checks import LONGEST, PROMPTS, check, random_tokens, save_models
from everything import one_of

if find_spec("sglang") is None:
    pytest.skip(
        "SGLang is not installed; make test-serving gets what its engine needs", allow_module_level=True
    )

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE_SIZES = tuple(one_of(3, [1, 16, 64]))


class Case(NamedTuple):
    model: str = "llama"
    dtype: str = "float32"
    page_size: int = 16
    prompts: tuple[int, ...] = PROMPTS
    max_tokens: int = 40
    logprobs: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def float8(self) -> bool:
        """Never: SGLang has no such caches on CPUs without AMX."""
        return False

    def rounds(self) -> list[list[list[int]]]:
        """Prompts, then some that go on where one of these ends."""
        first = random_tokens(self.prompts)
        longest = max(first, key=len)
        return [first, [[*longest, 5, 6, 7], [*longest, 8]]]

    def prompt_tokens(self) -> list[list[int]]:
        return [prompt for prompts in self.rounds() for prompt in prompts]

    def line(self, folder: Path) -> str:
        """What the engine's program reads. Two requests of full length do not fit into the cache."""
        engine = {
            "model_path": str(folder / self.model),
            "dtype": self.dtype,
            "page_size": self.page_size,
            "max_total_tokens": 448,
            "context_length": LONGEST,
            "max_running_requests": 4,
            "chunked_prefill_size": 64,
            **dict(self.more),
        }
        return json.dumps(
            {
                "engine": engine,
                "prompts": self.rounds(),
                "max_tokens": self.max_tokens,
                "logprobs": self.logprobs,
                "environment": dict(self.environment),
            }
        )


BY_PAGE_SIZE = {size: Case(page_size=size) for size in PAGE_SIZES}
MIXED = Case(logprobs=False, more=(("enable_mixed_chunk", True),))
RETRACTED = Case(prompts=(90, 33, 2, 60), environment=(("SGLANG_TEST_RETRACT", "1"),))
WINDOWED = Case("gemma2", prompts=(90, 33, 2, 60), max_tokens=12)
EMULATED = Case(
    dtype="bfloat16",
    page_size=1,
    prompts=(5, 21),
    max_tokens=3,
    environment=(("FLASH4_BACKEND", "emulator"),),
)
CASES = (*BY_PAGE_SIZE.values(), MIXED, RETRACTED, WINDOWED, EMULATED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models' checkpoints, by name."""
    path = tmp_path_factory.mktemp("models")
    save_models(path)
    return path


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """What the engine made of each case; the program imports SGLang once for all of them."""
    answers = tmp_path_factory.mktemp("site") / "answers"
    variables = {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "sglang_engine", str(answers)],
        input="".join(f"{case.line(folder)}\n" for case in CASES),
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = answers.read_text().splitlines()
    return dict(zip(CASES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("size", PAGE_SIZES)
def test_tokens_are_those_of_transformers(
    size: int, folder: Path, results: dict[Case, dict[str, Any]]
) -> None:
    """Chunks of prefill, decoding, and prompts whose beginning is in the radix cache."""
    result = results[BY_PAGE_SIZE[size]]
    check(folder, BY_PAGE_SIZE[size], result)
    longest = max(PROMPTS)
    assert min(result["cached"][-2:]) >= longest - longest % size
    assert {"extend", "decode"} <= set(result["counts"])


def test_requests_that_start_again(folder: Path, results: dict[Case, dict[str, Any]]) -> None:
    check(folder, RETRACTED, results[RETRACTED])
    assert results[RETRACTED]["counts"]["retract"]


def test_prefill_and_decoding_in_one_step(folder: Path, results: dict[Case, dict[str, Any]]) -> None:
    check(folder, MIXED, results[MIXED])
    assert results[MIXED]["counts"]["mixed"]


def test_windows_and_softcaps(folder: Path, results: dict[Case, dict[str, Any]]) -> None:
    check(folder, WINDOWED, results[WINDOWED])


def test_kernels_in_the_emulator(folder: Path, results: dict[Case, dict[str, Any]]) -> None:
    """The kernels that a GPU would run."""
    check(folder, EMULATED, results[EMULATED])
