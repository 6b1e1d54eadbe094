"""Hugging Face models on our attention: the same logits, gradients and generated tokens as eager attention.

Models are tiny and randomly initialised. Rows of padding see nothing, and a model's outputs there are not
compared; no other position depends on it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flash4_torch import backends, fast_path
from flash4_torch.errors import ArgumentError
from flash4_torch.problem import Problem

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers as hf
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flash4_torch.integrations import transformers as ours
from on_cpu import gpu

FA4 = ours.register()
TOKENS = 40
PAD = 0

COMMON: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GQA = COMMON | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**GQA),
    "gpt-oss, sinks, sliding": lambda: hf.GptOssConfig(
        **GQA, sliding_window=4, num_local_experts=2, num_experts_per_tok=1, initializer_range=0.3
    ),
    "mistral, sliding": lambda: hf.MistralConfig(**GQA, sliding_window=4),
    "gemma2, softcap and sliding": lambda: hf.Gemma2Config(
        **GQA, **SLIDING, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
    ),
    "gemma3, sliding": lambda: hf.Gemma3TextConfig(**GQA, **SLIDING),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=TOKENS, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=PAD, eos_token_id=None
    ),
}
ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertConfig(**COMMON, max_position_embeddings=64),
    "modernbert, sliding": lambda: hf.ModernBertConfig(
        **COMMON | {"cls_token_id": 2, "sep_token_id": 3}, local_attention=8, max_position_embeddings=64
    ),
}


def build(auto: Any, config: Callable[[], Any], implementation: str) -> Any:
    torch.manual_seed(0)
    model = auto.from_config(config(), attn_implementation=implementation)
    # The scores of a fresh model are nearly flat; larger weights make it matter who sees whom.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "emb" not in name:
                weight.mul_(3.0)
    return model.eval()


def batch(padding: str, length: int = 11) -> tuple[Tensor, Tensor | None]:
    """(input_ids, attention_mask) of two sequences, one of which is shorter unless `padding` is 'none'."""
    ids = torch.randint(4, TOKENS, (2, length), generator=torch.Generator().manual_seed(1))
    if padding == "none":
        return ids, None
    mask = torch.ones_like(ids)
    mask[1, : 4 if padding == "left" else 0] = 0
    mask[1, length - (3 if padding == "right" else 0) :] = 0
    return ids.masked_fill(mask == 0, PAD), mask


@contextmanager
def problems() -> Iterator[list[Problem]]:
    """Every problem that reaches a backend of ours."""
    seen: list[Problem] = []

    def observe(problem: Problem, backend: str) -> None:
        seen.append(problem)

    backends.observers.append(observe)
    try:
        yield seen
    finally:
        backends.observers.remove(observe)


def real(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits[mask.bool()]


def logits_and_grads(model: Any, ids: Tensor, mask: Tensor | None, **kwargs: Any) -> list[Tensor]:
    logits = real(model(input_ids=ids, attention_mask=mask, **kwargs).logits, mask)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    used = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad((logits * weights).sum(), used, allow_unused=True)
    return [logits.detach(), *(g for g in grads if g is not None)]


def assert_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 2e-4) -> None:
    for a, b in zip(ours, theirs, strict=True):
        scale = max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a, b, atol=tolerance * scale, rtol=0.0)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_logits_and_gradients_are_those_of_eager(name: str, padding: str) -> None:
    auto = hf.AutoModelForCausalLM if name in DECODERS else hf.AutoModelForMaskedLM
    config = (DECODERS | ENCODERS)[name]
    ids, mask = batch(padding)
    with problems() as seen:
        result = logits_and_grads(build(auto, config, FA4), ids, mask)
    assert len(seen) == 4, "two layers, forward and backward"
    assert {p.spec.mask for p in seen} <= {"", "bool:.11."}, "padding is one row per batch entry"
    assert_same(result, logits_and_grads(build(auto, config, "eager"), ids, mask))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens_are_those_of_eager(name: str, cache: str) -> None:
    """Ten tokens, beyond the sliding window, from a left-padded prompt."""
    ids, mask = batch("left", 7)
    options = {
        "attention_mask": mask,
        "max_new_tokens": 10,
        "do_sample": False,
        "cache_implementation": cache,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    theirs = build(hf.AutoModelForCausalLM, DECODERS[name], "eager").generate(ids, **options)
    with problems() as seen:
        result = build(hf.AutoModelForCausalLM, DECODERS[name], FA4).generate(ids, **options)
    assert len(seen) == 20
    assert torch.equal(result.sequences, theirs.sequences)
    assert_same(list(result.logits), list(theirs.logits))


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_may_come_in_pieces(name: str) -> None:
    """Several queries against a cache: neither the first nor the only ones."""
    ids, mask = batch("left")
    model = build(hf.AutoModelForCausalLM, DECODERS[name], FA4)
    assert mask is not None
    cache, pieces = None, []
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask).logits
        for start, stop in ((0, 3), (3, 7), (7, 8), (8, 11)):
            piece = model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                past_key_values=cache,
                use_cache=True,
            )
            cache = piece.past_key_values
            pieces.append(piece.logits)
    assert_same([real(torch.cat(pieces, 1), mask)], [real(whole, mask)])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "right"])
def test_t5_with_its_position_bias(padding: str, cache: str) -> None:
    """The bias is learned: its gradient is among those compared."""

    def config() -> Any:
        return hf.T5Config(
            vocab_size=TOKENS,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=PAD,
            eos_token_id=None,
        )

    ids, mask = batch(padding)
    models = [build(hf.AutoModelForSeq2SeqLM, config, implementation) for implementation in (FA4, "eager")]
    decoder_ids = ids[:, :6].clamp(min=4)

    def train(model: Any) -> list[Tensor]:
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits
        return [logits.detach(), *torch.autograd.grad(logits.square().mean(), list(model.parameters()))]

    with problems() as seen:
        result = train(models[0])
    assert len(seen) == 12, "encoder, decoder and cross attention"
    assert_same(result, train(models[1]))
    tokens = [
        m.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, cache_implementation=cache)
        for m in models
    ]
    assert torch.equal(*tokens)


def test_whisper() -> None:
    def config() -> Any:
        return hf.WhisperConfig(
            vocab_size=TOKENS,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=PAD,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )

    features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))
    ids, _ = batch("none")

    def run(implementation: str) -> list[Tensor]:
        model = build(hf.AutoModelForSpeechSeq2Seq, config, implementation)
        logits = model(input_features=features, decoder_input_ids=ids).logits
        used = [p for p in model.parameters() if p.requires_grad]
        return [logits.detach(), *torch.autograd.grad(logits.square().mean(), used)]

    with problems() as seen:
        result = run(FA4)
    assert len(seen) == 6
    assert_same(result, run("eager"))


def test_an_existing_model_can_be_switched() -> None:
    ids, mask = batch("left")
    model = build(hf.AutoModelForCausalLM, DECODERS["llama"], "eager")
    before = logits_and_grads(model, ids, mask)
    model.set_attn_implementation(FA4)
    with problems() as seen:
        assert_same(logits_and_grads(model, ids, mask), before)
    assert len(seen) == 4


def test_packed_sequences_do_not_see_each_other() -> None:
    """Their position_ids alone separate them, as a data collator without padding gives these."""
    ids, _ = batch("none")
    positions = torch.tensor([[*range(5), *range(6)]]).expand(2, -1)
    for name in ("llama", "gemma2, softcap and sliding"):
        model = build(hf.AutoModelForCausalLM, DECODERS[name], FA4)
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [model(input_ids=part).logits for part in (ids[:, :5], ids[:, 5:])]
        assert_same([packed], [torch.cat(alone, 1)])


@pytest.mark.parametrize("output_attentions", [False, True])
def test_attentions_are_those_of_eager(output_attentions: bool) -> None:
    ids, mask = batch("right")
    options = {"attention_mask": mask, "output_attentions": output_attentions}
    results = [
        build(hf.AutoModelForCausalLM, DECODERS["gemma2, softcap and sliding"], implementation)(
            ids, **options
        )
        for implementation in (FA4, "eager")
    ]
    if output_attentions:
        assert_same(list(results[0].attentions), list(results[1].attentions))
    assert_same([real(r.logits, mask) for r in results[:1]], [real(r.logits, mask) for r in results[1:]])


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    ids, mask = batch("left")
    model = build(hf.AutoModelForCausalLM, DECODERS["mistral, sliding"], FA4).train()
    plain = logits_and_grads(model, ids, mask, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        logits = real(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, mask)
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
        (logits * weights).sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert_same([logits.detach(), *grads], plain)
    else:
        assert_same(logits_and_grads(model, ids, mask, use_cache=False), plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "each layer"])
def test_compiled_models_are_the_same(whole: bool) -> None:
    """If each layer is compiled, the mask is made outside of the graphs and enters them as it is."""
    ids, mask = batch("left")
    model = build(hf.AutoModelForCausalLM, DECODERS["llama"], FA4)
    plain = logits_and_grads(model, ids, mask, use_cache=False)
    torch.compiler.reset()
    for module in [model] if whole else model.model.layers:
        module.compile(backend="aot_eager", fullgraph=True)
    assert_same(logits_and_grads(model, ids, mask, use_cache=False), plain)


def test_autocast_reaches_the_attention() -> None:
    ids, mask = batch("left")
    model = build(hf.AutoModelForCausalLM, DECODERS["llama"], FA4)
    with torch.autocast("cpu", torch.bfloat16), problems() as seen:
        model(input_ids=ids, attention_mask=mask)
    assert {p.spec.dtype for p in seen} == {torch.bfloat16}


def layer(is_causal: bool = True) -> nn.Module:
    module = nn.Module()
    module.is_causal = is_causal
    return module


def heads(length: int, count: int, seed: int) -> Tensor:
    return torch.randn(2, count, length, 8, generator=torch.Generator().manual_seed(seed))


def test_the_weights_are_what_was_applied() -> None:
    """Dropout included: the output is the returned weights times the values."""
    q, k, v = heads(9, 4, 0), heads(9, 2, 1), heads(9, 2, 2)
    out, weights = ours.attention_forward(layer(), q, k, v, None, dropout=0.5, output_attentions=True)
    assert weights is not None
    assert 0.3 < float((weights[:, :, -1] == 0).float().mean()) < 0.7
    torch.testing.assert_close(out.transpose(1, 2), weights @ v.repeat_interleave(2, 1))


def test_packed_by_cumulative_lengths() -> None:
    q, k, v = (heads(9, 4, s)[:1] for s in range(3))
    ends = torch.tensor([0, 2, 9], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    for options in ({}, {"sliding_window": 3}, {"softcap": 1.5, "scaling": 0.7}):
        packed, _ = ours.attention_forward(layer(), q, k, v, None, **lengths, **options)
        alone = [
            ours.attention_forward(layer(), q[:, :, s], k[:, :, s], v[:, :, s], None, **options)[0]
            for s in (slice(0, 2), slice(2, 9))
        ]
        torch.testing.assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("sliding_window", [None, 1, 3, 20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 4, 7])
def test_without_a_mask(queries: int, causal: bool, sliding_window: int | None) -> None:
    """One query stands at the last key, several begin at the first: decoding, and filling a static cache."""
    q, k, v = heads(queries, 4, 0), heads(7, 4, 1), heads(7, 4, 2)
    options = {"is_causal": causal, "sliding_window": sliding_window}
    out, _ = ours.attention_forward(layer(not causal), q, k, v, None, **options)
    position = torch.arange(queries)[:, None] + (6 if queries == 1 else 0)
    distance = position - torch.arange(7)
    reach = 99 if sliding_window is None else sliding_window
    mask = (distance < reach) & ((distance >= 0) if causal else (distance > -reach))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out.transpose(1, 2), expected)


@pytest.mark.parametrize("recorded", [False, True])
def test_later_calls_are_the_first_one(recorded: bool) -> None:
    """The fast path takes heads first and returns out with heads last, by the CPU's kernel and by ours."""
    inputs = [heads(5, 4, seed).bfloat16().requires_grad_(recorded) for seed in range(3)]
    dout = torch.randn(2, 5, 4, inputs[2].shape[3]).bfloat16()

    def step() -> list[Tensor]:
        out, _ = ours.attention_forward(layer(True), *inputs, None, is_causal=True)
        return [out, *torch.autograd.grad(out, inputs, dout)] if recorded else [out]

    for machine in (nullcontext(), gpu()):
        fast_path.clear()
        with machine:
            first, *others = [step() for _ in range(4)]
        for later in others:
            for a, b in zip(first, later, strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride()
    fast_path.clear()


def test_one_batch_entry_of_queries_serves_all() -> None:
    q, k, v = heads(5, 4, 0)[:1], heads(7, 4, 1), heads(7, 4, 2)
    shared, _ = ours.attention_forward(layer(False), q, k, v, None)
    each, _ = ours.attention_forward(layer(False), q.expand(2, -1, -1, -1), k, v, None)
    assert torch.equal(shared, each)


MASK_FUNCTIONS: dict[str, Callable[[int], Any]] = {
    "causal": lambda size: causal_mask_function,
    "full": lambda size: bidirectional_mask_function,
    "sliding": sliding_window_causal_mask_function,
    "sliding both ways": sliding_window_bidirectional_mask_function,
    "chunked": lambda size: chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.long)),
    "custom": lambda size: and_masks(causal_mask_function, lambda b, h, i, j: (i - j) % size != 1),
}


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    name=st.sampled_from(list(MASK_FUNCTIONS)),
    size=st.integers(1, 7),
    q_length=st.integers(1, 6),
    past=st.sampled_from([0, 0, 2, 5]),
    forgotten=st.integers(0, 5),
    unused=st.integers(0, 4),
    padding=st.sampled_from(["none", "all tokens", "some"]),
    offset_as_tensor=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_mask_says_what_transformers_says(
    name: str,
    size: int,
    q_length: int,
    past: int,
    forgotten: int,
    unused: int,
    padding: str,
    offset_as_tensor: bool,
    seed: int,
) -> None:
    """Dynamic caches (past), sliding ones (which forget), static ones (with unused slots at the end)."""
    kv_offset = min(forgotten, past)
    kv_length = past - kv_offset + q_length + unused
    # transformers' own shortcuts assume that its caches never make these cases.
    assume(name not in ("chunked", "custom") or (kv_offset == 0 and (q_length > 1 or unused == 0)))
    seen = past + q_length
    mask = {
        "none": None,
        "all tokens": torch.ones(2, seen, dtype=torch.bool),
        "some": torch.rand(2, seen, generator=torch.Generator().manual_seed(seed)) > 0.3,
    }[padding]
    question: dict[str, Any] = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": torch.tensor(past) if offset_as_tensor else past,
        "kv_offset": kv_offset,
        "mask_function": MASK_FUNCTIONS[name](size),
        "attention_mask": mask,
        "local_size": None if name in ("causal", "full", "custom") else size,
    }
    theirs = sdpa_mask(**question, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    both_ways = name in ("full", "sliding both ways")
    answer = ours.make_mask(
        **question,
        allow_is_causal_skip=not both_ways and name != "custom",
        allow_is_bidirectional_skip=both_ways,
    )
    Sq, Sk = q_length, kv_length
    keys, band = ours._mask_and_band(answer, Sq, Sk, causal=not both_ways, sliding_window=None)
    rows, columns = torch.arange(Sq)[:, None], torch.arange(Sk)
    seen_by_us = torch.as_tensor(band.visible(rows, columns, Sq, Sk))
    seen_by_us = seen_by_us if keys is None else keys & seen_by_us
    assert torch.equal(seen_by_us.expand(2, 1, Sq, Sk), theirs)
    if isinstance(answer, ours.BandMask):
        assert answer.shape == theirs.shape
        assert torch.equal(answer[:, :, 1:], theirs[:, :, 1:])
        assert torch.equal(torch.where(answer, 0.0, -1.0), torch.where(theirs, 0.0, -1.0))


@pytest.mark.parametrize("padded", [False, True])
def test_no_mask_is_made_for_a_new_static_cache(padded: bool) -> None:
    """The unused slots are after the last query, whether the padding mask covers them or not."""
    tokens = torch.ones(2, 5, dtype=torch.bool) if padded else None
    assert ours.make_mask(batch_size=2, q_length=5, kv_length=9, attention_mask=tokens) is None


@pytest.mark.parametrize("name", ["flash4", "my_sdpa", "eager", "org/kernel"])
def test_names_that_transformers_would_take_for_its_own_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"^name is"):
        ours.register(name)


@pytest.mark.parametrize("argument", ["cache", "block_table", "indices", "block_indices"])
def test_what_is_not_served_is_refused_by_name(argument: str) -> None:
    q = heads(3, 4, 0)
    with pytest.raises(ArgumentError, match=f"^{argument} is"):
        ours.attention_forward(layer(), q, q, q, None, **{argument: torch.ones(4)})


ON_ITS_OWN: dict[str, Callable[[], Any]] = {
    "BloomModel": lambda: hf.BloomConfig(vocab_size=TOKENS, hidden_size=32, n_layer=1, n_head=4),
    "MPNetModel": lambda: hf.MPNetConfig(**COMMON),
    "RoFormerModel": lambda: hf.RoFormerConfig(**COMMON),
    "GPTJModel": lambda: hf.GPTJConfig(
        vocab_size=TOKENS, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, bos_token_id=1, eos_token_id=2
    ),
}


@pytest.mark.parametrize(("name", "config"), ON_ITS_OWN.items())
def test_models_with_attention_of_their_own_are_refused_at_every_door(
    name: str, config: Callable[[], Any], tmp_path: Any
) -> None:
    says = rf"^attn_implementation is 'fa4', but {name} .*use \"eager\""
    model_class = getattr(hf, name)
    with pytest.raises(ArgumentError, match=says):
        hf.AutoModel.from_config(config(), attn_implementation=FA4)
    asked = config()
    asked._attn_implementation = FA4
    with pytest.raises(ArgumentError, match=says):
        model_class(asked)
    model = model_class(config())
    model.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=says):
        model_class.from_pretrained(tmp_path, attn_implementation=FA4)
    before = model.config._attn_implementation
    with pytest.raises(ArgumentError, match=says):
        model.set_attn_implementation(FA4)
    assert model.config._attn_implementation == before


def test_a_name_that_was_written_into_the_configuration_is_refused_with_the_first_mask() -> None:
    ids, mask = batch("left")
    model = build(hf.AutoModelForCausalLM, ON_ITS_OWN["BloomModel"], "eager")
    model.config._attn_implementation = FA4
    with pytest.raises(ArgumentError, match=r"^attn_implementation is 'fa4', but Bloom"):
        model(input_ids=ids, attention_mask=mask)
    served = build(hf.AutoModelForCausalLM, DECODERS["llama"], "eager")
    before = logits_and_grads(served, ids, mask)
    served.config._attn_implementation = FA4
    with problems() as seen:
        assert_same(logits_and_grads(served, ids, mask), before)
    assert len(seen) == 4


def test_copies_of_a_model_are_served() -> None:
    ids, mask = batch("left")
    model = build(hf.AutoModelForCausalLM, DECODERS["llama"], FA4)
    assert_same(logits_and_grads(deepcopy(model), ids, mask), logits_and_grads(model, ids, mask))
    assert_same(
        logits_and_grads(pickle.loads(pickle.dumps(model)), ids, mask), logits_and_grads(model, ids, mask)
    )


def vision_and_text() -> Any:
    vision = hf.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    text = hf.TrOCRConfig(
        vocab_size=TOKENS,
        d_model=32,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        cross_attention_hidden_size=32,
        max_position_embeddings=32,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)


def test_a_part_of_a_model_can_be_served_where_another_is_refused() -> None:
    with pytest.raises(ArgumentError, match="TrOCRDecoder computes its attention itself"):
        hf.VisionEncoderDecoderModel._from_config(vision_and_text(), attn_implementation=FA4)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    ids, _ = batch("none")

    def run(implementation: Any, later: Any = None) -> list[Tensor]:
        torch.manual_seed(0)
        model = hf.VisionEncoderDecoderModel._from_config(
            vision_and_text(), attn_implementation=implementation
        )
        if later is not None:
            model.set_attn_implementation(later)
        return [model.eval()(pixel_values=pixels, decoder_input_ids=ids).logits.detach()]

    expected = run("eager")
    part = {"": FA4, "encoder": FA4, "decoder": "eager"}
    for options in ((part,), ("eager", part)):
        with problems() as seen:
            assert_same(run(*options), expected)
        assert len(seen) == 2
    with pytest.raises(ArgumentError, match="TrOCRDecoder"):
        run("eager", {"": "eager", "encoder": "eager", "decoder": FA4})


class OwnConfig(hf.PretrainedConfig):
    model_type = "of a user"


class Dispatching(nn.Module):
    """A user's attention that asks for a registered function."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.is_causal = config, True
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, q, k, v, attention_mask)[0].flatten(2)


class Computing(Dispatching):
    """A user's attention that adds the mask to its own scores."""

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT
        if attention_mask is not None:
            scores = scores + attention_mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class OfAUser(hf.PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = self.make(config)
        self.post_init()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = create_causal_mask(self.config, x, attention_mask, past_key_values=None)
        return self.layer(x, mask)


class Served(OfAUser):
    def make(self, config: Any) -> nn.Module:
        return Dispatching(config)


class Refused(OfAUser):
    def make(self, config: Any) -> nn.Module:
        return Computing(config)


def test_models_of_users_are_judged_by_their_code() -> None:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(6))
    with problems() as seen:
        Served._from_config(OwnConfig(), attn_implementation=FA4)(x)
    assert len(seen) == 1
    with pytest.raises(ArgumentError, match="Refused computes its attention itself, in Computing"):
        Refused._from_config(OwnConfig(), attn_implementation=FA4)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_mask_that_is_added_to_scores_says_so(in_place: bool) -> None:
    """This is the last line of defence, for models that no look at the classes finds."""
    mask = ours.make_mask(
        batch_size=2,
        q_length=5,
        kv_length=5,
        attention_mask=torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]) > 0,
    )
    scores = torch.zeros(2, 4, 5, 5)
    with pytest.raises(ArgumentError, match="adds its attention mask to scores"):
        scores.add_(mask) if in_place else scores + mask


@pytest.mark.parametrize("name", ["gpt2", "opt", "siglip"])
def test_models_that_record_attentions_get_them(name: str) -> None:
    """They get them also where the layers do not hand output_attentions on."""
    ids, mask = batch("right")

    def attentions(implementation: str) -> list[Tensor]:
        if name == "siglip":
            config = hf.SiglipVisionConfig(
                **{k: COMMON[k] for k in list(COMMON)[1:5]}, image_size=16, patch_size=8
            )
            torch.manual_seed(0)
            model = hf.SiglipVisionModel._from_config(config, attn_implementation=implementation).eval()
            given: dict[str, Any] = {"pixel_values": torch.ones(2, 3, 16, 16)}
        else:
            opt = hf.OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64)
            config = opt if name == "opt" else DECODERS["gpt2"]()
            model = build(hf.AutoModelForCausalLM, lambda: config, implementation)
            given = {"input_ids": ids, "attention_mask": mask}
        return list(model(**given, output_attentions=True).attentions)

    result, expected = attentions(FA4), attentions("eager")
    assert len(expected) == 2
    assert_same(result, expected)


def test_masks_of_other_ranks_are_refused() -> None:
    q = heads(3, 4, 0)
    with pytest.raises(ArgumentError, match=r"^attention_mask is"):
        ours.attention_forward(layer(), q, q, q, torch.ones(2, 3, dtype=torch.bool))
