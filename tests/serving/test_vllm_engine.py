"""vLLM's engine, with our attention, against transformers: the same tokens and logprobs.

`make test-serving` runs this with the oldest and the newest vLLM that we support, and CI a case of each kind;
elsewhere it is skipped, unless vLLM is installed.
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

import vllm_on_cpu
from engine_checks import LONGEST, PROMPTS, check, random_tokens, save_models
from everything import one_of

if find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed; make test-serving gets what its engine needs", allow_module_level=True
    )

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BLOCK_SIZES = tuple(one_of(5, [16, 32, 64, 128, 256]))


class Case(NamedTuple):
    model: str = "llama"
    dtype: str = "float32"
    block_size: int = 16
    cache_dtype: str = "auto"
    prompts: tuple[int, ...] = PROMPTS
    max_tokens: int = 40
    environment: tuple[tuple[str, str], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def float8(self) -> bool:
        return self.cache_dtype == "fp8"

    def prompt_tokens(self) -> list[list[int]]:
        return random_tokens(self.prompts)

    def line(self, folder: Path) -> str:
        """What the engine's program reads. One request of full length fits into the cache; two do not."""
        engine = {
            "model": str(folder / self.model),
            "dtype": self.dtype,
            "kv_cache_dtype": self.cache_dtype,
            "block_size": self.block_size,
            "num_gpu_blocks_override": max(LONGEST // self.block_size, 2) + 1,
            "max_model_len": LONGEST,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            **dict(self.more),
        }
        return json.dumps(
            {
                "engine": engine,
                "prompts": self.prompt_tokens(),
                "max_tokens": self.max_tokens,
                "environment": dict(self.environment),
            }
        )


BY_BLOCK_SIZE = {size: Case(block_size=size) for size in BLOCK_SIZES}
WINDOWED = Case("gemma2", prompts=(90, 33, 2, 60), max_tokens=12, more=(("num_gpu_blocks_override", 40),))
FLOAT8 = Case(cache_dtype="fp8", prompts=(90, 33, 2, 60), max_tokens=12)
EMULATED = Case(
    dtype="bfloat16",
    prompts=(5, 21),
    max_tokens=3,
    environment=(("FLASH4_BACKEND", "emulator"),),
)
REFUSED = {
    "kv_cache_dtype not supported": Case(cache_dtype="fp8_e5m2"),
    "alibi_slopes is 4 slopes": Case("bloom"),
    "block_size not supported": Case(block_size=24),
}
CASES = (*BY_BLOCK_SIZE.values(), WINDOWED, FLOAT8, EMULATED, *REFUSED.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models' checkpoints, by name."""
    path = tmp_path_factory.mktemp("models")
    save_models(path)
    return path


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """What the engine made of each case; one process runs all, for its start takes longer than they do."""
    site = tmp_path_factory.mktemp("site")
    vllm_on_cpu.install(site)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(site), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    answers = site / "answers"
    done = subprocess.run(
        [sys.executable, "-m", "vllm_engine", str(answers)],
        input="".join(f"{case.line(folder)}\n" for case in CASES),
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = answers.read_text().splitlines()
    return dict(zip(CASES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_tokens_are_those_of_transformers(
    size: int, folder: Path, results: dict[Case, dict[str, Any]]
) -> None:
    """Chunks of prefill beside decoding, with requests that come later or start again."""
    result = results[BY_BLOCK_SIZE[size]]
    check(folder, BY_BLOCK_SIZE[size], result)
    assert result["mixed"]
    # A block of 256 holds a whole request, which then never lacks one.
    assert result["preemptions"] or size == LONGEST


def test_windows_and_softcaps(folder: Path, results: dict[Case, dict[str, Any]]) -> None:
    check(folder, WINDOWED, results[WINDOWED])


def test_float8_cache(folder: Path, results: dict[Case, dict[str, Any]]) -> None:
    check(folder, FLOAT8, results[FLOAT8])


def test_kernels_in_the_emulator(folder: Path, results: dict[Case, dict[str, Any]]) -> None:
    """The kernels that a GPU would run: attention, and the append."""
    check(folder, EMULATED, results[EMULATED])
    assert results[EMULATED]["mixed"] or results[EMULATED]["steps"] > 2


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals_come_before_the_model(sentence: str, results: dict[Case, dict[str, Any]]) -> None:
    result = results[REFUSED[sentence]]
    assert sentence in result["error"]
    assert result.get("steps", 0) == 0
