"""vLLM's engine, with our attention, against transformers: the same tokens and logprobs.

`make test-serving` runs this with the oldest and the newest vLLM that we support, and CI a case of each kind;
elsewhere it is skipped, unless vLLM is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, BloomConfig, Gemma2Config, LlamaConfig, PreTrainedModel

import vllm_on_cpu
from everything import one_of

if find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed; make test-serving gets what its engine needs", allow_module_level=True
    )

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LONGEST = 256
PROMPTS = (5, 60, 17, 90, 33, 16, 71, 2, 100, 80, 60)
"""Lengths of prompts: together far more than the engine may compute in a step, or keep."""
BLOCK_SIZES = tuple(one_of(5, [16, 32, 64, 128, 256]))
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
    # Softcap, and a sliding window in every second layer.
    "gemma2": lambda: Gemma2Config(
        **_SIZES, sliding_window=24, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "bloom": lambda: BloomConfig(
        vocab_size=128, hidden_size=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None
    ),
}


class Case(NamedTuple):
    model: str = "llama"
    dtype: str = "float32"
    block_size: int = 16
    cache_dtype: str = "auto"
    prompts: tuple[int, ...] = PROMPTS
    max_tokens: int = 40
    environment: tuple[tuple[str, str], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()

    def prompt_tokens(self) -> list[list[int]]:
        numbers = torch.Generator().manual_seed(1)
        return [torch.randint(3, 128, (n,), generator=numbers).tolist() for n in self.prompts]

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
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config())
        model.save_pretrained(path / name)
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


def load(folder: Path, case: Case, dtype: torch.dtype) -> PreTrainedModel:
    """The case's model in transformers, with transformers' own attention."""
    implementation = "rounding" if case.cache_dtype == "fp8" else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / case.model, dtype=dtype, attn_implementation=implementation
    )
    return model.eval()


def _rounding(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> Any:
    """Llama's attention, of keys and values that have been in a float8 cache."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
    return eager_attention_forward(module, query, key, value, attention_mask, **more)


AttentionInterface.register("rounding", _rounding)
transformers.AttentionMaskInterface.register(
    "rounding", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"]
)


@torch.no_grad()
def logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    """(tokens, vocabulary), float64: of each of the tokens, given those before it."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


def greedy(model: PreTrainedModel, prompt: list[int], number: int) -> list[int]:
    sequence = model.generate(torch.tensor([prompt]), max_new_tokens=number, do_sample=False)
    return sequence[0, len(prompt) :].tolist()


def check(folder: Path, case: Case, result: dict[str, Any]) -> None:
    """Greedy tokens, with logprobs within twice the error that transformers makes in the same dtype."""
    assert "error" not in result, result
    dtype = getattr(torch, case.dtype)
    precise = torch.float64 if dtype == torch.float32 else torch.float32
    exact_model, model = load(folder, case, precise), load(folder, case, dtype)
    if precise == torch.float32:
        exact_model.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    worst, allowed, margin = 0.0, 0.0, 0.0
    for prompt, tokens, found in zip(case.prompt_tokens(), result["tokens"], result["logprobs"], strict=True):
        assert len(tokens) == case.max_tokens
        exact = logprobs(exact_model, prompt, tokens)
        chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        allowed = max(allowed, (logprobs(model, prompt, tokens) - exact).abs().max().item())
        worst = max(worst, (torch.tensor(found).double() - chosen).abs().max().item())
        margin = max(margin, (exact.amax(1) - chosen).max().item())
        if dtype == torch.float32:
            assert tokens == greedy(model, prompt, case.max_tokens)
    assert worst <= 2 * allowed
    assert margin <= 4 * allowed


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
