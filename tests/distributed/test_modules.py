"""Models whose attention spans ranks: results of one process, with FSDP and checkpoints, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import flash4_torch
from context_calls import mesh_of
from everything import one_of
from flash4_torch import errors
from flash4_torch.distributed import parallelize_attention, shard_sequence, unshard_sequence
from ranks import ranks

E, H, S, B = 16, 4, 24, 2
HF_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": E,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


class Encoder(nn.Module):
    """Stock layers of torch with our attention; `rematerialize` checkpoints each."""

    def __init__(self, rematerialize: bool = False):
        super().__init__()
        self.rematerialize = rematerialize
        # Equal on all ranks, which start from different seeds.
        torch.manual_seed(0)
        make = lambda: nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)  # noqa: E731
        self.layers = nn.ModuleList([make() for _ in range(2)]).double()
        flash4_torch.replace_attention(self)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for layer in self.layers:
            call = lambda x, layer=layer: layer(x, src_mask=mask, is_causal=True)  # noqa: E731
            x = checkpoint(call, x, use_reentrant=False) if self.rematerialize else call(x)
        return x


def inputs() -> Tensor:
    return torch.randn(B, S, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss_of(out: Tensor) -> Tensor:
    return out.sin().square().mean()


def encoder_of_ranks(mesh_kind: str, rematerialize: bool, sharded: bool) -> list[Tensor] | None:
    mesh = mesh_of(mesh_kind)
    if mesh is None:
        return None
    model = Encoder(rematerialize)
    assert parallelize_attention(model, mesh) == [f"layers.{n}.self_attn" for n in range(2)]
    if sharded:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    out = model(shard_sequence(inputs(), mesh))
    loss_of(out).backward()
    gradients = []
    for parameter in model.parameters():
        if sharded:
            gradients.append(parameter.grad.full_tensor())
            continue
        for n in range(mesh.ndim):
            dist.all_reduce(parameter.grad, group=mesh.get_group(n))
        gradients.append(parameter.grad / mesh.size())
    return [unshard_sequence(out, mesh), *gradients]


@pytest.mark.parametrize(
    "mesh, rematerialize, sharded",
    one_of(2, [("ring 2", True, True), ("ring 4", False, True), ("ring 2 x ulysses 2", False, False)]),
)
def test_encoder_layers(mesh: str, rematerialize: bool, sharded: bool) -> None:
    model = Encoder()
    out = model(inputs())
    loss_of(out).backward()
    expected = [out.detach(), *(p.grad for p in model.parameters())]
    for found in ranks(4).run(encoder_of_ranks, mesh, rematerialize, sharded):
        if found is not None:
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, right)


CONFIGS: dict[str, Callable[[], Any]] = {
    "mistral, sliding": lambda: hf.MistralConfig(**HF_SIZES, sliding_window=7),
    "gpt-oss, sinks, sliding": lambda: hf.GptOssConfig(
        **HF_SIZES,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=5,
        experts_implementation="eager",
    ),
    "llama": lambda: hf.LlamaConfig(**HF_SIZES),
}


def language_model(name: str) -> Any:
    flash4_torch.integrations.transformers.register()
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="fa4")
    return model.double().eval()


def tokens() -> Tensor:
    return torch.randint(0, 32, (B, S), generator=torch.Generator().manual_seed(2))


def logits_of_ranks(name: str) -> list[Tensor] | None:
    mesh = mesh_of("ring 2")
    if mesh is None:
        return None
    model, ids = language_model(name), tokens()
    assert len(parallelize_attention(model, mesh)) == 2
    ids, positions = (shard_sequence(x, mesh) for x in (ids, torch.arange(S).expand(B, S)))
    call = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if "llama" in name and dist.get_rank() == 0:
        # transformers takes positions that jump for packed sequences.
        with pytest.raises(errors.ArgumentError, match=r"attention_mask=torch.ones_like"):
            model(**call)
    logits = model(**call, attention_mask=torch.ones_like(ids)).logits
    loss_of(logits).backward()
    gradients = [p.grad for p in model.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.get_group())
    return [unshard_sequence(logits, mesh), *(g / 2 for g in gradients)]


@pytest.mark.parametrize("name", one_of(2, list(CONFIGS)))
def test_models_of_transformers(name: str) -> None:
    model = language_model(name)
    logits = model(tokens(), use_cache=False).logits
    loss_of(logits).backward()
    expected = [logits.detach(), *(p.grad for p in model.parameters())]
    for found in ranks(4).run(logits_of_ranks, name):
        if found is not None:
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, right)


def refusals() -> list[str]:
    """Messages of modules and calls that ranks cannot share, each in one word that it must hold."""
    mesh = mesh_of("ring 2 x ulysses 2")
    attention = flash4_torch.MultiheadAttention(E, H, batch_first=True)
    parallelize_attention(attention, mesh)
    biased = flash4_torch.MultiheadAttention(E, H, add_zero_attn=True)
    parallelize_attention(biased, mesh)
    x = torch.zeros(B, 8, E)
    calls: dict[str, Callable[[], Any]] = {
        "call replace_attention first": lambda: parallelize_attention(nn.MultiheadAttention(E, H), mesh),
        "it must have": lambda: parallelize_attention(nn.Linear(2, 2), mesh),
        "torch.nn.Module": lambda: parallelize_attention("model", mesh),  # type: ignore[arg-type]
        "attn_implementation of": lambda: parallelize_attention(
            hf.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="sdpa"), mesh
        ),
        "need_weights": lambda: attention(x, x, x),
        "attn_mask": lambda: attention(x, x, x, need_weights=False, attn_mask=torch.zeros(8, 8)),
        "key_padding_mask": lambda: attention(x, x, x, torch.zeros(B, 8).bool(), need_weights=False),
        "add_zero_attn": lambda: biased(x, x, x, need_weights=False),
    }
    found = []
    for word, call in calls.items():
        with pytest.raises(errors.ArgumentError) as raised:
            call()
        assert word in str(raised.value), str(raised.value)
        found.append(str(raised.value))
    return found


def test_what_ranks_cannot_share_is_refused() -> None:
    ranks(4).run(refusals)
