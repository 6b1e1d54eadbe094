"""Torch's own call of a whole encoder layer in evaluation: where it serves, and what keeps it away."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

import flash4_torch
from flash4_torch import ops, testing
from flash4_torch.nn import encoder

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")

E, H, S = 8, 2, 6
CALL = torch._transformer_encoder_layer_fwd
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def layer(dtype: torch.dtype = torch.float32, **more: Any) -> nn.TransformerEncoderLayer:
    """Stock's."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(E, H, 16, dropout=0.1, batch_first=True, dtype=dtype, **more).eval()


def swapped(stock: nn.Module) -> Any:
    ours = copy.deepcopy(stock)
    assert flash4_torch.replace_attention(ours)
    return ours


def tokens(N: int = 3, length: int = S, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, length, E, generator=torch.Generator().manual_seed(1)).to(dtype)


def nested(lengths: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nested.nested_tensor([tokens(1, length, dtype)[0] for length in lengths])


def hidden(lengths: list[int]) -> Tensor:
    return torch.arange(S) >= torch.tensor(lengths)[:, None]


def dense(x: Tensor) -> Tensor:
    return x.to_padded_tensor(0.0) if x.is_nested else x


@contextmanager
def torchs_calls() -> Iterator[mock.Mock]:
    """Calls of torch's layer."""
    with mock.patch.object(torch, "_transformer_encoder_layer_fwd", side_effect=CALL) as call:
        yield call


def without(step: Callable[[], Tensor]) -> Tensor:
    """The result without torch's layer."""
    with mock.patch.object(encoder, "_LIMITS", {}), torchs_calls() as call:
        out = step()
    assert not call.called
    return out


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    """Few scores: tokens, some padded at any place, or nested sequences; each row sees a key."""
    lengths = draw(st.lists(st.integers(1, S), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["plain", "bool", "float", "nested"]))
    if kind == "nested":
        return {"src": nested(lengths, dtype)}
    found = {"src": tokens(len(lengths), dtype=dtype)}
    if kind != "plain":
        padding = hidden(lengths).roll(draw(st.integers(0, S)), 1)
        as_floats = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, -math.inf)
        found["src_key_padding_mask"] = padding if kind == "bool" else as_floats
    return found


@given(inputs(), st.booleans(), st.sampled_from(["relu", "gelu", nn.ReLU(), nn.GELU()]))
def test_results_are_stocks(call: dict[str, Any], norm_first: bool, activation: Any) -> None:
    dtype = call["src"].dtype
    stock = layer(dtype, norm_first=norm_first, activation=activation)
    ours = swapped(stock)
    with torch.no_grad():
        with torchs_calls() as calls:
            out = ours(**call)
            assert calls.call_count == 1
        expected, usual = stock(**call), without(lambda: ours(**call))
        exact = copy.deepcopy(stock).double()(
            **{k: x if x.dtype == torch.bool else x.double() for k, x in call.items()}
        )
    assert torch.equal(dense(out), dense(expected))
    testing.assert_close_as_peer(dense(usual), dense(exact), dense(expected))


def limited(dtype: torch.dtype, **scores: int) -> Any:
    at = "cpu", dtype.itemsize == 2
    return mock.patch.dict(encoder._LIMITS, {at: encoder._LIMITS[at]._replace(**scores)})


@given(st.sampled_from([1, 3]), st.booleans(), st.sampled_from(DTYPES))
def test_as_many_scores_as_it_may_have(N: int, over: bool, dtype: torch.dtype) -> None:
    """Scores of an entry and of the call, dense, padded and nested."""
    each, x, padding = H * S * S, tokens(N, dtype=dtype), hidden([S, 2, 4][:N])
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "plain": (each, {"src": x}),
        "most": (N * each, {"src": x}),
        "padded": (N * each, {"src": x, "src_key_padding_mask": padding}),
        "nested": (N * each, {"src": nested([S, 3, 4][:N], dtype)}),
    }
    ours = swapped(layer(dtype))
    for limit, (scores, call) in cases.items():
        with limited(dtype, **{limit: scores - over}), torchs_calls() as calls, torch.no_grad():
            ours(**call)
        assert calls.called != over, limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("over", [False, True])
def test_nested_sequences_much_shorter_than_the_longest(over: bool, dtype: torch.dtype) -> None:
    """Torch computes scores of padding, too: as many as all others, or not many."""
    ours, wasted = swapped(layer(dtype)), H * (4 * 36 - (36 + 3 * 4))
    with limited(dtype, wasted=wasted - over), torchs_calls() as calls, torch.no_grad():
        ours(nested([6, 2, 2, 2], dtype))
        assert calls.called != over
    with limited(dtype, wasted=0), torchs_calls() as calls, torch.no_grad():
        ours(nested([6, 5, 5, 2], dtype))
        assert calls.called


# What a layer or its parts may have


def _attention_hook(layer: Any) -> None:
    layer.self_attn.register_forward_hook(lambda *call: None)


def _attention_pre_hook(layer: Any) -> None:
    layer.self_attn.register_forward_pre_hook(lambda *call: None)


def _own_forward(layer: Any) -> None:
    theirs = layer.self_attn.forward
    layer.self_attn.forward = lambda *inputs, **more: theirs(*inputs, **more)


def _subclass_of_attention(layer: Any) -> None:
    layer.self_attn.__class__ = type("Subclass", (flash4_torch.MultiheadAttention,), {})


def _subclass_of_layer(layer: Any) -> None:
    layer.__class__ = type("Subclass", (nn.TransformerEncoderLayer,), {"_ff_block": lambda self, x: x})


class _Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


def _adapter(layer: Any) -> None:
    layer.linear1.__class__ = _Adapted


def _patched(layer: Any) -> None:
    layer.linear2.forward = lambda x: nn.Linear.forward(layer.linear2, x) + 1.0


def _dropout_in_evaluation(layer: Any) -> None:
    layer.dropout1.train()


def _adapter_of_output(layer: Any) -> None:
    layer.self_attn.out_proj = nn.Linear(E, E)


def _tanh_gelu(layer: Any) -> None:
    layer.activation, layer.activation_relu_or_gelu = nn.GELU(approximate="tanh"), 2


def _other_activation(layer: Any) -> None:
    layer.activation = F.gelu


def _no_bias(layer: Any) -> None:
    layer.linear2.register_parameter("bias", None)


def _no_affine(layer: Any) -> None:
    layer.norm2 = nn.LayerNorm(E, elementwise_affine=False)


def _exact_norm(layer: Any) -> None:
    layer.bfloat16().norm1.float()


def _exact_bias(layer: Any) -> None:
    layer.bfloat16().self_attn.in_proj_bias = nn.Parameter(torch.randn(3 * E))


def _parametrized(layer: Any) -> None:
    parametrizations.weight_norm(layer.self_attn, "in_proj_weight")


def _parametrized_norm(layer: Any) -> None:
    prune.l1_unstructured(layer.norm1, "weight", 1)


def _zero_attn(layer: Any) -> None:
    layer.self_attn.add_zero_attn = True


def _bias_kv(layer: Any) -> None:
    attention = layer.self_attn
    attention.bias_k, attention.bias_v = (nn.Parameter(torch.randn(1, 1, E)) for _ in range(2))


def _odd_training(layer: Any) -> None:
    layer.self_attn.train().dropout = 0.0


def _wrapped(layer: Any) -> None:
    class Wrapper(nn.Module):
        def __init__(self, base: nn.Module):
            super().__init__()
            self.base = base

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name == "base" else getattr(self.base, name)

        @property
        def _qkv_same_embed_dim(self) -> bool:
            return self.base._qkv_same_embed_dim

        def forward(self, *inputs: Any, **more: Any) -> Any:
            return self.base(*inputs, **more)

    layer.self_attn = Wrapper(layer.self_attn)


@pytest.mark.parametrize(
    "change",
    [
        _attention_hook,
        _attention_pre_hook,
        _own_forward,
        _subclass_of_attention,
        _subclass_of_layer,
        _adapter,
        _adapter_of_output,
        _patched,
        _dropout_in_evaluation,
        _tanh_gelu,
        _other_activation,
        _no_bias,
        _no_affine,
        _exact_norm,
        _exact_bias,
        _parametrized,
        _parametrized_norm,
        _zero_attn,
        _bias_kv,
        _odd_training,
        _wrapped,
    ],
    ids=lambda change: change.__name__,
)
def test_whatever_torchs_call_does_not_know(change: Callable[[Any], None]) -> None:
    ours = swapped(layer())
    with torchs_calls() as calls, torch.no_grad():
        ours(tokens())
        assert calls.called
        change(ours)
        calls.reset_mock()
        x = tokens(dtype=ours.linear1.weight.dtype)
        torch.manual_seed(0)
        out = ours(x)
        assert not calls.called
        torch.manual_seed(0)
        assert torch.equal(out, without(lambda: ours(x)))


@pytest.mark.parametrize("pre", ["", "_pre"])
def test_hooks_are_called(pre: str) -> None:
    ours, called = swapped(layer()), []
    attention = ours.self_attn
    for_all = getattr(nn.modules.module, f"register_module_forward{pre}_hook")
    with torch.no_grad():
        handle = getattr(attention, f"register_forward{pre}_hook")(lambda *call: called.append("own"))
        assert not encoder._adds_nothing(attention)  # whatever torch asks itself
        ours(tokens())
        handle.remove()
        handle = for_all(lambda module, *call: called.append("all") if module is attention else None)
        try:
            ours(tokens())
        finally:
            handle.remove()
        ours(tokens())
    assert called == ["own", "all"]


# Inputs


def _masks() -> dict[str, dict[str, Any]]:
    causal = nn.Transformer.generate_square_subsequent_mask(S)
    return {
        "a row that sees nothing": {"src_key_padding_mask": hidden([6, 0, 3])},
        "a floating mask": {"src_key_padding_mask": hidden([6, 2, 3]) * -1.5},
        "a mask of rows": {"src_mask": causal},
        "causal": {"src_mask": causal, "is_causal": True},
    }


@pytest.mark.parametrize("name", _masks())
def test_masks_that_it_does_not_serve(name: str) -> None:
    ours, given_masks = swapped(layer()), _masks()[name]
    with torchs_calls() as calls, torch.no_grad():
        out = ours(tokens(), **given_masks)
        assert not calls.called and not out.isnan().any()
        assert torch.equal(out, without(lambda: ours(tokens(), **given_masks)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nested([3, 0, 5]),
        lambda: torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)], layout=torch.jagged),
        lambda: tokens(0),
        lambda: tokens(2, 0),
        lambda: nn.Parameter(tokens(), requires_grad=False),
    ],
    ids=["an empty sequence", "jagged", "no entries", "no tokens", "a parameter"],
)
def test_inputs_that_it_does_not_serve(make: Callable[[], Tensor]) -> None:
    ours, x = swapped(layer()), make()
    with torchs_calls() as calls, torch.no_grad():
        out = ours(x)
        assert not calls.called and out.size(0) == x.size(0)
        if not x.is_nested:
            assert out.shape == x.shape
        elif x.layout == torch.strided:
            assert not any(y.isnan().any() for y in out.unbind())


@pytest.mark.parametrize("width", [4, 16])
def test_errors_are_those_of_the_attention(width: int) -> None:
    ours = swapped(layer())
    for x in (torch.randn(2, 3, width), torch.nested.nested_tensor([torch.randn(3, width)] * 2)):
        with torchs_calls() as calls, torch.no_grad(), pytest.raises((AssertionError, RuntimeError)):
            ours(x)
        assert not calls.called


@pytest.mark.parametrize(
    "call", [{"is_causal": True}, {"src_key_padding_mask": torch.zeros(S, 3, dtype=torch.bool)}]
)
def test_masks_that_do_not_fit(call: dict[str, Any]) -> None:
    ours = swapped(layer())
    with torchs_calls() as calls, torch.no_grad(), pytest.raises((AssertionError, RuntimeError)):
        ours(tokens(), **call)
    assert not calls.called


# Observers


def _observed() -> AbstractContextManager[Any]:
    return testing.backends_used()


def _another_attention() -> AbstractContextManager[Any]:
    return mock.patch.object(F, "scaled_dot_product_attention", lambda *call, **more: None)


@pytest.mark.parametrize(
    "state",
    [
        _observed,
        _another_attention,
        testing.poisoned_memory,
        lambda: FlopCounterMode(display=False),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.profiler.profile(),
    ],
    ids=["observed", "sdpa", "deterministic", "mode", "autocast", "profiled"],
)
def test_who_must_see_the_attention(state: Callable[[], AbstractContextManager[Any]]) -> None:
    ours, x = swapped(layer()), tokens()
    reached = mock.Mock(side_effect=ours.self_attn._project)
    with torchs_calls() as calls, torch.no_grad():
        ours(x)
        with state():
            ours.self_attn.__dict__["_project"] = reached
            ours(x)
    assert calls.call_count == 1 and reached.called


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_forced_backend_serves(monkeypatch: pytest.MonkeyPatch, is_nested: bool) -> None:
    ours, x = swapped(layer()), nested([3, 5]) if is_nested else tokens()
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    name = "attention_varlen" if x.is_nested else "attention"
    monkeypatch.setattr(ops, name, mock.Mock(side_effect=getattr(ops, name)))
    with torchs_calls() as calls, torch.no_grad():
        ours(x)
    assert not calls.called and getattr(ops, name).called
    with testing.backends_used() as used, torch.no_grad():
        ours(x)
    assert used == {(name, "tiled"): 1}


def test_gradients_are_those_of_the_attention() -> None:
    ours, x = swapped(layer()), tokens().requires_grad_()
    with torchs_calls() as calls:
        torch.autograd.grad(ours(x).sum(), x)
    assert not calls.called


def test_context_parallel_attention_is_called() -> None:
    ours = swapped(layer())
    ours.self_attn.flash4_context_parallel = lambda q, k, v, **options: torch.zeros_like(q)
    with torchs_calls() as calls, torch.no_grad():
        ours(tokens())
    assert not calls.called


def test_a_compiled_graph_holds_the_attention() -> None:
    torch.compiler.reset()
    ours, x = swapped(layer()), tokens()
    with torchs_calls() as calls, torch.no_grad():
        torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x), layer()(x))
        assert calls.call_count == 1  # stock's


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_encoder(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Padding, which torch turns into nested sequences, and none."""
    stock = nn.TransformerEncoder(layer(), 2).eval().requires_grad_(False)
    ours = swapped(stock)
    for padding in (None, hidden([6, 4, 3])):
        with context(), torchs_calls() as calls:
            out = ours(tokens(), src_key_padding_mask=padding)
            assert calls.call_count == 2
            assert torch.equal(out, stock(tokens(), src_key_padding_mask=padding))
