"""Small models with random weights in transformers, and what an engine makes of them against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, BloomConfig, Gemma2Config, LlamaConfig, PreTrainedModel

LONGEST = 256
PROMPTS = (5, 60, 17, 90, 33, 16, 71, 2, 100, 80, 60)
"""Lengths of prompts: together far more than an engine may compute in a step, or keep."""
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
        **_SIZES,
        sliding_window=24,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
        # SGLang reads this name.
        hidden_act="gelu_pytorch_tanh",
    ),
    "bloom": lambda: BloomConfig(
        vocab_size=128, hidden_size=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None
    ),
}


class Case(Protocol):
    """What an engine was asked."""

    @property
    def model(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def float8(self) -> bool: ...

    @property
    def max_tokens(self) -> int: ...

    def prompt_tokens(self) -> list[list[int]]: ...


def random_tokens(lengths: tuple[int, ...]) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randint(3, 128, (n,), generator=numbers).tolist() for n in lengths]


def save_models(folder: Path) -> None:
    """Writes the models' checkpoints, by name."""
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config())
        model.save_pretrained(folder / name)


def load(folder: Path, case: Case, dtype: torch.dtype) -> PreTrainedModel:
    """The case's model in transformers, with transformers' own attention."""
    implementation = "rounding" if case.float8 else "eager"
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
    """Greedy tokens, with logprobs, if there are any, within twice transformers' error in the same dtype."""
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
        if found is not None:
            worst = max(worst, (torch.tensor(found).double() - chosen).abs().max().item())
        margin = max(margin, (exact.amax(1) - chosen).max().item())
        if dtype == torch.float32:
            assert tokens == greedy(model, prompt, case.max_tokens)
    assert worst <= 2 * allowed
    assert margin <= 4 * allowed
