"""The module together with others' code: peft, torch's transformers, torch.fx and torchvision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash4_torch
from flash4_torch import fast_path, ops
from flash4_torch.errors import ArgumentError, ScriptError
from flash4_torch.nn import MultiheadAttention, encoder, prepared, replace_attention


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Grows by one for each attention that ours computes."""
    seen: list[Tensor] = []

    def counted(attention: Callable[..., Any]) -> Callable[..., Any]:
        def call(q: Tensor, *args: Any, **options: Any) -> Any:
            seen.append(q)
            return attention(q, *args, **options)

        return call

    # Prepared calls do not pass by here.
    for module in (fast_path, prepared):
        monkeypatch.setattr(module, "lookup", lambda *call: (None, None))
    for name in ("attention", "attention_varlen", "attention_and_weights"):
        monkeypatch.setattr(ops, name, counted(getattr(ops, name)))
    return seen


# _qkv_same_embed_dim, which many read


@pytest.mark.parametrize("sizes", [{}, {"kdim": 8, "vdim": 8}, {"kdim": 4}, {"vdim": 4}])
def test_same_embed_dim_is_stocks_answer(sizes: dict[str, int]) -> None:
    stock, ours = (cls(8, 2, **sizes) for cls in (nn.MultiheadAttention, MultiheadAttention))
    swapped = copy.deepcopy(stock)
    replace_attention(swapped)
    assert stock._qkv_same_embed_dim == ours._qkv_same_embed_dim == swapped._qkv_same_embed_dim
    assert ours._qkv_same_embed_dim == (ours.in_proj_weight is not None)


def test_stocks_own_forward_takes_the_module() -> None:
    """It reads _qkv_same_embed_dim to tell packed weights from separate ones."""
    x = torch.randn(3, 1, 8)
    for sizes in ({}, {"kdim": 8, "vdim": 8, "bias": False}):
        module = MultiheadAttention(8, 2, **sizes)
        torch.testing.assert_close(nn.MultiheadAttention.forward(module, x, x, x), module(x, x, x))


class Wrapper(nn.Module):
    """A wrapper as adapters make them: it hands on what nn.TransformerEncoderLayer asks."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        if name == "base":
            return super().__getattr__(name)
        return getattr(self.base, name)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        return self.base._qkv_same_embed_dim

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.base(*args, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("wrap", [lambda module: module, Wrapper])
def test_encoder_of_a_swapped_layer(
    monkeypatch: pytest.MonkeyPatch,
    calls: list[Tensor],
    wrap: Callable[[nn.Module], nn.Module],
    padded: bool,
) -> None:
    """Torch builds it without a warning, and does not compute it without calling the module."""
    monkeypatch.setattr(encoder, "_LIMITS", {})
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    stock = nn.TransformerEncoder(layer, 2).eval()
    assert list(replace_attention(layer)) == ["self_attn"]
    layer.self_attn = wrap(layer.self_attn)
    swapped = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 4, 8)
    padding = torch.arange(4) >= torch.tensor([4, 2, 1])[:, None] if padded else None
    with torch.no_grad():
        expected = stock(x, src_key_padding_mask=padding)
        actual = swapped(x, src_key_padding_mask=padding)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


# peft


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
        self.linear = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.mha(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("swap_first", [True, False])
def test_low_rank_adapters_before_and_after_the_swap(calls: list[Tensor], swap_first: bool) -> None:
    peft = pytest.importorskip("peft")
    x = torch.randn(3, 6, 16, dtype=torch.float64)

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["mha"], r=4, init_lora_weights=False)
        return peft.get_peft_model(model, config)

    def results(model: nn.Module) -> dict[str, Tensor]:
        trained = model(x)
        trained.square().sum().backward()
        found = {f"d {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            found |= {"trained": trained.detach(), "evaluated": model.eval()(x)}
            merged = model.merge_and_unload()
            return found | {"merged": merged(x)} | merged.state_dict()

    stock = Attending()
    swapped = copy.deepcopy(stock)
    expected = results(adapted(stock))
    assert len(calls) == 0
    if swap_first:
        assert len(replace_attention(swapped)) == 1
        swapped = adapted(swapped)
    else:
        swapped = adapted(swapped)
        assert len(replace_attention(swapped)) == 1
    actual = results(swapped)
    assert len(calls) == 3
    assert sum("lora" in name for name in actual) == 4 and actual.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x)


# torch.fx


class Encoder(nn.Module):
    """Attention with masks, and a branch that torch.fx could not record."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        out, weights = self.mha(x, x, x, key_padding_mask=padding, average_attn_weights=False)
        return x + out, weights


@pytest.mark.parametrize("is_known", [False, True])
def test_recorded_by_fx_as_one_call(calls: list[Tensor], is_known: bool) -> None:
    model = Encoder()
    swapped = copy.deepcopy(model)
    replace_attention(swapped)
    for _ in range(3 if is_known else 0):
        swapped(torch.randn(3, 4, 8), torch.arange(4).expand(3, 4) > 2)
    calls.clear()
    graphs = [torch.fx.symbolic_trace(m).graph for m in (model, swapped)]
    nodes = [[(n.op, n.name, n.target, n.args, n.kwargs) for n in graph.nodes] for graph in graphs]
    assert str(nodes[0]) == str(nodes[1])
    x, padding = torch.randn(3, 4, 8), torch.arange(4) >= torch.tensor([4, 2, 1])[:, None]
    traced = torch.fx.GraphModule(swapped, graphs[1])
    for actual, expected in zip(traced(x, padding), model(x, padding), strict=True):
        torch.testing.assert_close(actual, expected)
    assert len(calls) == 1


def test_feature_extractor_of_torchvision(calls: list[Tensor]) -> None:
    torchvision = pytest.importorskip("torchvision")
    from torchvision.models import feature_extraction

    model = torchvision.models.VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=5).eval()
    swapped = copy.deepcopy(model)
    assert len(replace_attention(swapped)) == 2
    names = [feature_extraction.get_graph_node_names(m) for m in (model, swapped)]
    assert names[0] == names[1]
    x = torch.randn(2, 3, 32, 32)
    wanted = {"encoder.layers.encoder_layer_1.add": "features", "heads": "logits"}
    with torch.no_grad():
        expected, actual = (
            feature_extraction.create_feature_extractor(m, wanted)(x) for m in (model, swapped)
        )
    for name in wanted.values():
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


def test_fx_says_what_it_cannot_record() -> None:
    with pytest.raises(ArgumentError, match=r"query is a torch\.fx\.Proxy, but only a model that holds"):
        torch.fx.symbolic_trace(MultiheadAttention(8, 2))
    model = Encoder()
    model.mha.register_forward_hook(lambda *_: None)
    replace_attention(model)
    with pytest.raises(ArgumentError, match="forward hooks, which would run twice"):
        torch.fx.symbolic_trace(model)


B, S, H, D = 2, 5, 2, 8
LENGTHS = torch.tensor([0, 4, 10], dtype=torch.int32)


def dense(x: Tensor) -> Tensor:
    return flash4_torch.attention(x, x, x, causal=True, return_lse=True)[1]


def packed(x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    return flash4_torch.attention_varlen(
        flat, flat, flat, cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS, max_seqlen_q=6, max_seqlen_k=6
    )


def sdpa(x: Tensor) -> Tensor:
    return flash4_torch.scaled_dot_product_attention(x, x, x, is_causal=True)


def masked(x: Tensor) -> Tensor:
    q = torch.ones(B, S, H, D)
    return flash4_torch.attention(q, q, q, attn_mask=x[:, None, :, 0, :S])


@pytest.mark.parametrize(
    ("call", "function"),
    [
        (dense, flash4_torch.attention),
        (packed, flash4_torch.attention_varlen),
        (sdpa, flash4_torch.scaled_dot_product_attention),
        (masked, flash4_torch.attention),
    ],
)
def test_functions_are_recorded_by_fx(call: Callable[[Tensor], Tensor], function: Callable[..., Any]) -> None:
    traced = torch.fx.symbolic_trace(call)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert function in targets and torch.nn.functional.scaled_dot_product_attention not in targets
    x = torch.randn(B, S, H, D)
    torch.testing.assert_close(traced(x), call(x))


# What print and torch.jit say


def test_print_shows_the_swap() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    before, keys = str(model), list(model.state_dict())
    replace_attention(model)
    line = "flash4_torch, embed_dim=8, num_heads=2"
    assert line in str(model) and line not in before
    assert [x for x in str(model).splitlines() if line not in x] == before.splitlines()
    assert list(model.state_dict()) == keys


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_jit_script_is_refused_with_a_sentence() -> None:
    model = Encoder()
    replace_attention(model)
    with pytest.raises(ScriptError, match="does not compile flash4_torch"):
        torch.jit.script(model)
