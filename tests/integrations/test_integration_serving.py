"""Hugging Face's continuous batching on our functions: the tokens of eager attention, request by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch

from flash4_torch import flash_attn

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers as hf
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache, initialization

from flash4_torch.integrations import transformers as ours
from flash4_torch.integrations.transformers_serving import SERVED

FA4 = ours.register()
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "gpt-oss, sinks, sliding": lambda: hf.GptOssConfig(
        **SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1, initializer_range=0.3
    ),
    "gemma2, softcap and sliding": lambda: hf.Gemma2Config(
        **SIZES,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=0.5,
        query_pre_attn_scalar=8,
    ),
}
NEW_TOKENS = 8
GREEDY = hf.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
PROMPTS = [
    torch.randint(4, 40, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 9, 17, 3)
]


def build(name: str, implementation: str) -> Any:
    """A model with random weights, large enough that it matters who sees whom."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation)
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if weight.dim() == 2 and "emb" not in parameter:
                weight.mul_(3.0)
    return model.eval()


def one_by_one(model: Any) -> list[list[int]]:
    generated = (model.generate(torch.tensor([p]), generation_config=GREEDY)[0, len(p) :] for p in PROMPTS)
    return [tokens.tolist() for tokens in generated]


def in_a_batch(model: Any, **more: Any) -> list[list[int]]:
    """Continuous batching, 24 tokens at a time: prompts are cut, decoding and prefill are mixed."""
    config = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=24, **more)
    results = model.generate_batch(
        inputs=PROMPTS, generation_config=GREEDY, continuous_batching_config=config, progress_bar=False
    )
    assert not [result.error for result in results.values() if result.error]
    return [result.generated_tokens for result in results.values()]


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts calls of flash-attn's functions here."""
    seen: Counter[str] = Counter()

    def counted(name: str) -> Any:
        function = getattr(flash_attn, name)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
            patch.setattr(flash_attn, name, counted(name))
        # transformers keeps the functions of the last implementation.
        patch.setattr(hf.modeling_flash_attention_utils, "_loaded_implementation", None)
        yield seen


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has memory: transformers finds none where psutil is missing."""
    memory = torch.device("cpu"), 1 << 30, 0, 0
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: memory)


@pytest.mark.parametrize("name", CONFIGS)
def test_batches_have_the_tokens_of_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = one_by_one(build(name, "eager"))
    model = build(name, FA4)
    with calls(monkeypatch) as seen:
        assert in_a_batch(model) == wanted
    assert set(seen) == {"flash_attn_varlen_func"} and seen.total() >= 2 * NEW_TOKENS
    assert model.config._attn_implementation == FA4, "the model's own implementation is back"
    assert one_by_one(model) == wanted


def test_decoding_appends_to_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gives tables to a function on a GPU only, by this check, whatever the function."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    wanted = one_by_one(build("llama", "eager"))
    with calls(monkeypatch) as seen:
        assert in_a_batch(build("llama", FA4), max_blocks_per_request=8) == wanted
    assert seen["flash_attn_with_kvcache"] >= NEW_TOKENS and seen["flash_attn_varlen_func"] >= 2


def test_the_name_is_one_that_decoding_on_a_gpu_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for implementation, blocks in ((SERVED, 8), ("sdpa", 0)):
        config, batching = CONFIGS["llama"](), ContinuousBatchingConfig(max_blocks_per_request=8)
        config._attn_implementation = implementation
        initialization.ensure_decode_fast_path_is_available(config, batching, False)
        assert batching.max_blocks_per_request == blocks


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padded_prompts_on_flash_attns_functions(
    name: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The implementation of batches in `generate`, by flash-attn's own door in transformers."""
    ids = torch.randint(4, 40, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    padded = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    options = {**padded, "generation_config": GREEDY, "cache_implementation": cache}
    wanted = build(name, "eager").generate(**options)
    model = build(name, FA4)
    model.config._attn_implementation = SERVED
    with calls(monkeypatch) as seen:
        assert torch.equal(model.generate(**options), wanted)
    assert seen.total() == 2 * NEW_TOKENS
