"""replace_attention changes the class of the modules it finds, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize

import flash4_torch
from flash4_torch import fast_path, ops
from flash4_torch.errors import NothingReplacedWarning
from flash4_torch.nn import MultiheadAttention, prepared, replace_attention


def transformer(**options: Any) -> nn.Transformer:
    sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
    return nn.Transformer(num_encoder_layers=2, num_decoder_layers=1, **sizes | options)


NAMES = [
    "encoder.layers.0.self_attn",
    "encoder.layers.1.self_attn",
    "decoder.layers.0.self_attn",
    "decoder.layers.0.multihead_attn",
]


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
    for name in ("attention", "attention_and_weights"):
        monkeypatch.setattr(ops, name, counted(getattr(ops, name)))
    return seen


def test_public_name() -> None:
    assert flash4_torch.replace_attention is replace_attention
    assert flash4_torch.MultiheadAttention is MultiheadAttention


def test_swaps_all_and_returns_them_by_name() -> None:
    model = transformer()
    before = dict(model.named_modules())
    swapped = replace_attention(model)
    assert list(swapped) == NAMES
    assert dict(model.named_modules()) == before
    for name, module in before.items():
        assert (type(module) is MultiheadAttention) == (name in NAMES)
        assert name not in NAMES or swapped[name] is module


def test_second_time_finds_nothing() -> None:
    model = transformer()
    replace_attention(model)
    assert replace_attention(model) == {}


def test_model_that_is_itself_attention(calls: list[Tensor]) -> None:
    module = nn.MultiheadAttention(4, 2)
    assert replace_attention(module) == {"": module}
    x = torch.randn(3, 1, 4)
    module(x, x, x)
    assert len(calls) == 1


def test_model_without_attention() -> None:
    with pytest.warns(NothingReplacedWarning, match=r"found no torch\.nn.MultiheadAttention") as record:
        assert replace_attention(nn.Sequential(nn.Linear(2, 2))) == {}
    (note,) = record
    assert note.filename == __file__
    for door in ("integrations.torch_sdpa.register()", "integrations.transformers.register()"):
        assert door in str(note.message)


def test_note_is_no_error_where_nothing_was_meant() -> None:
    """Warnings are errors here: these calls give none."""
    model = nn.Sequential(transformer(), ForeignAttention(4, 2))
    assert replace_attention(model, lambda name, module: False) == {}
    assert list(replace_attention(model, lambda name, module: True)) == [f"0.{name}" for name in NAMES]
    assert replace_attention(model[0]) == {}


def test_note_names_what_was_left_alone_beside_what_was_swapped() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": ForeignAttention(4, 2), "c": patched()})
    with pytest.warns(NothingReplacedWarning) as record:
        assert list(replace_attention(model)) == ["a"]
    (note,) = record
    assert "'b' (ForeignAttention, a subclass)" in str(note.message)
    assert "'c' (MultiheadAttention, with a forward of its own)" in str(note.message)


@pytest.mark.filterwarnings("ignore:.*FSDP.*")
def test_fully_sharded_module_is_named(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.MultiheadAttention(4, 2))
        fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
        with pytest.warns(NothingReplacedWarning, match="Swap before fully_shard") as record:
            assert replace_attention(model) == {}
        assert "'0' (FSDPMultiheadAttention, a subclass)" in str(record[0].message)
    finally:
        dist.destroy_process_group()


@given(st.sets(st.sampled_from(NAMES)))
def test_predicate_selects(chosen: set[str]) -> None:
    model = transformer()
    seen = []

    def predicate(name: str, module: nn.MultiheadAttention) -> bool:
        assert model.get_submodule(name) is module
        seen.append(name)
        return name in chosen

    assert replace_attention(model, predicate).keys() == chosen
    assert seen == NAMES
    assert {name for name in NAMES if type(model.get_submodule(name)) is MultiheadAttention} == chosen


def test_failing_predicate_leaves_the_model_alone() -> None:
    model = transformer()

    def predicate(name: str, module: nn.MultiheadAttention) -> bool:
        if "decoder" in name:
            raise KeyError(name)
        return True

    with pytest.raises(KeyError):
        replace_attention(model, predicate)
    assert not any(isinstance(module, MultiheadAttention) for module in model.modules())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_only_the_class_changes(training: bool, dtype: torch.dtype) -> None:
    model = transformer(dtype=dtype).train(training)
    model.decoder.requires_grad_(False)
    state = {name: (x, x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    attributes = {name: dict(vars(model.get_submodule(name))) for name in NAMES}
    replace_attention(model)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state)
    for name, (tensor, value) in state.items():
        assert after[name] is tensor and torch.equal(tensor, value)
    for name in NAMES:
        module = model.get_submodule(name)
        assert vars(module) == attributes[name] and module.training == training


@pytest.mark.parametrize("training", [True, False])
def test_model_computes_the_same(calls: list[Tensor], training: bool) -> None:
    model = transformer(dtype=torch.float64).train(training)
    swapped = copy.deepcopy(model)
    replace_attention(swapped)
    source, target = (torch.randn(3, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 4))
    inputs = [source, target]
    options = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64),
        "src_key_padding_mask": torch.arange(5) >= torch.tensor([5, 2, 4])[:, None],
        "tgt_is_causal": True,
    }
    results = []
    for module in (model, swapped):
        out = module(source, target, **options)
        gradients = torch.autograd.grad(out.square().sum(), [*inputs, *module.parameters()])
        results.append((out, *gradients))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    assert len(calls) == len(NAMES)


def test_hooks_and_their_handles_survive() -> None:
    model = transformer()
    attention = model.encoder.layers[0].self_attn
    seen: list[str] = []
    handles = [
        attention.register_forward_pre_hook(lambda *_: seen.append("before")),
        attention.register_forward_hook(lambda *_: seen.append("after")),
        attention.register_full_backward_hook(lambda *_: seen.append("backward")),
        attention.register_state_dict_pre_hook(lambda *_: seen.append("state")),
    ]
    replace_attention(model)
    x = torch.randn(1, 3, 8, requires_grad=True)
    model(x, x).sum().backward()
    model.state_dict()
    assert seen == ["before", "after", "backward", "state"]
    for handle in handles:
        handle.remove()
    model(x, x).sum().backward()
    assert len(seen) == 4


def test_optimizer_goes_on() -> None:
    """Momentum made before the swap is used after it: the parameters are the same objects."""
    losses = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = transformer(dtype=torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x = torch.randn(2, 4, 8, dtype=torch.float64)
        for step in range(4):
            if swap and step == 2:
                replace_attention(model)
            optimizer.zero_grad()
            loss = model(x, x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1])


def tied() -> nn.Module:
    """One attention at two places, and another one that shares its weights."""
    model = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "c": nn.MultiheadAttention(4, 2)})
    model["b"] = model["a"]
    model["c"].in_proj_weight = model["a"].in_proj_weight
    return model


def test_tied_modules_and_weights_stay_tied() -> None:
    model = tied()
    swapped = replace_attention(model)
    assert swapped.keys() == {"a", "b", "c"}
    assert swapped["a"] is swapped["b"] is model["a"] is model["b"]
    assert model["c"].in_proj_weight is model["a"].in_proj_weight


@pytest.mark.parametrize(("chosen", "expected"), [("a", {"a", "b"}), ("b", {"a", "b"}), ("c", {"c"})])
def test_module_with_two_names_is_swapped_at_both(chosen: str, expected: set[str]) -> None:
    model = tied()
    assert replace_attention(model, lambda name, module: name == chosen).keys() == expected
    assert type(model["a"]) is type(model["b"])


class ForeignAttention(nn.MultiheadAttention):
    pass


def patched() -> nn.Module:
    """A module with its forward wrapped on the instance, as some libraries do."""
    module = nn.MultiheadAttention(4, 2)
    module.forward = module.forward
    return module


@pytest.mark.parametrize("make", [lambda: ForeignAttention(4, 2), patched])
def test_foreign_forward_is_left_alone(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make())
    kind = type(model[0])
    with pytest.warns(NothingReplacedWarning, match=f"left alone '0' \\({kind.__name__}"):
        assert replace_attention(model) == {}
    assert type(model[0]) is kind


@pytest.mark.parametrize("parameter", ["in_proj_weight", "in_proj_bias", "bias_k"])
def test_parametrized_attention_is_swapped(calls: list[Tensor], parameter: str) -> None:
    stock = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    nn.init.normal_(stock.in_proj_bias)
    parametrizations.weight_norm(stock, parameter, dim=0)
    ours, sibling = copy.deepcopy(stock), copy.deepcopy(stock)
    keys = list(stock.state_dict())
    assert replace_attention(ours) == {"": ours}
    assert isinstance(ours, MultiheadAttention) and parametrize.is_parametrized(ours, parameter)
    assert not isinstance(stock, MultiheadAttention) and not isinstance(sibling, MultiheadAttention)
    x = torch.randn(3, 1, 4)
    torch.testing.assert_close(ours(x, x, x), stock(x, x, x))
    assert len(calls) == 1 and list(ours.state_dict()) == keys
    assert replace_attention(ours) == {}

    parametrize.remove_parametrizations(ours, parameter)
    assert type(ours) is MultiheadAttention
    torch.testing.assert_close(ours(x, x, x), sibling(x, x, x))


def test_parametrized_after_the_swap_is_not_bypassed(calls: list[Tensor]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    replace_attention(layer)
    parametrizations.weight_norm(layer.self_attn, "in_proj_weight")
    with torch.no_grad():
        layer(torch.randn(1, 3, 8))
    assert len(calls) == 1


def compiled_around(model: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend=backend)


def compiled_function(model: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x), backend=backend)


def compiled_in_place(model: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    model.compile(backend=backend)
    return model


def compiled_attention(model: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    model.self_attn.compile(backend=backend)
    return model


@pytest.mark.parametrize(
    "compiled", [compiled_around, compiled_function, compiled_in_place, compiled_attention]
)
def test_compiled_model_uses_the_new_module(calls: list[Tensor], compiled: Callable[..., Any]) -> None:
    torch.compiler.reset()
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    call = compiled(model, "eager")
    x = torch.randn(2, 3, 8)
    expected = call(x)
    assert not calls
    assert list(replace_attention(model)) == ["self_attn"]
    torch.testing.assert_close(call(x), expected)
    assert len(calls) == 1


def test_swap_inside_a_wrapper() -> None:
    wrapped = torch.compile(transformer(), backend="eager")
    assert list(replace_attention(wrapped)) == [f"_orig_mod.{name}" for name in NAMES]


def test_can_be_undone() -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    before = dict(vars(module))
    replace_attention(module)
    module.__class__ = nn.MultiheadAttention
    assert vars(module) == before and module._qkv_same_embed_dim
