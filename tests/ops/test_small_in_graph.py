"""Small calls in compiled graphs on a CPU: written in torch's own operators, and equal to ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.virtualized import V

import flash4_torch
from compiling import compiled, results_and_gradients
from flash4_torch import MultiheadAttention, ops
from flash4_torch.ops import schema, small_in_graph
from flash4_torch.problem import CallOptions
from test_cpu_in_graph import traced
from test_decomposition import masks, scorings

# torch 2.11's inductor imports a module that uses TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of the operator for a call that is written out."""
    B, Sq, Sk, Hk, group = (draw(st.integers(1, n)) for n in (3, 6, 6, 2, 3))
    shapes = (B, Sq, Hk * group, 4), (B, Sk, Hk, 4), (B, Sk, Hk, draw(st.sampled_from([3, 4])))
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    sinks = torch.randn(Hk * group, dtype=torch.float64) if draw(st.booleans()) else None
    scale, left, right, *_ = draw(scorings())
    options = CallOptions(scale, left, right, dropout_p=draw(st.sampled_from([0.0, 0.4, 1.0])))
    rng_state = ops.draw_rng_state(q.device) if options.dropout_p else None
    return q, k, v, draw(masks(B, Hk * group, Sq, Sk)), sinks, rng_state, options


@given(calls())
def test_forward(call: Any) -> None:
    """Out, lse and lse_low are the operator's."""
    *tensors, options = call
    for a, b in zip(small_in_graph.forward(*call), schema.attention(*tensors, *options), strict=True):
        assert a.shape == b.shape and a.is_contiguous()
        torch.testing.assert_close(a, b)


@given(calls(), st.booleans())
def test_backward(call: Any, has_dlse: bool) -> None:
    """The gradients of all inputs, from those of out and lse, are the operator's."""
    q, k, v, mask, sinks, rng_state, options = call
    scored_by = mask, sinks, rng_state
    out, lse, low = schema.attention(q, k, v, *scored_by, *options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if has_dlse else None
    mask_grad = mask is not None and mask.is_floating_point()
    saved = out, lse, low if low.numel() else None
    expected = schema.attention_backward(dout, dlse, q, k, v, *saved, *scored_by, *options, mask_grad)
    found = small_in_graph.backward(dout, dlse, q, k, v, lse, *scored_by, options, mask_grad)
    for a, b in zip(found, expected, strict=True):
        assert a.is_contiguous() and a.shape == b.shape and a.dtype == b.dtype
        loose: dict[str, Any] = {"rtol": 4e-3, "atol": 4e-3} if a.dtype == torch.float16 else {}
        torch.testing.assert_close(a, b, **loose)


def arguments(kind: str, S: int = 4) -> tuple[Any, ...]:
    """The operator's arguments for a call of 2 * S * S weights that torch's kernel does not serve."""
    q = torch.randn(1, S, 2, 8)
    options = CallOptions(0.3)
    tensors: list[Tensor | None] = [q, q, q, None, None, None]
    if kind == "dropout":
        tensors[5], options = ops.draw_rng_state(q.device), options._replace(dropout_p=0.5)
    elif kind == "part":
        tensors[5], options = torch.tensor([1, 2, 0, 0, 0, 2, 2]), options._replace(dropout_p=0.5)
    elif kind == "sinks":
        tensors[4] = torch.randn(2)
    elif kind == "values":
        tensors[2] = q[..., :4]
    else:
        changed: dict[str, Any] = {kind: 1}
        options = options._replace(**changed)
    return *tensors, *options


WRITTEN = "dropout", "sinks", "values", "window_left", "window_right"


def called(*call: Any) -> list[str]:
    """Our operators in Inductor's graphs of a call and of its backward."""
    out, lse, _ = schema.attention(*call)
    q, k, v, *others = call
    given = torch.randn_like(out), None, q, k, v, out, lse, None, *others, False
    names = traced(schema.attention, *call)[0] + traced(schema.attention_backward, *given)[0]
    return [name for name in names if name.startswith("flash4")]


BOTH = ["flash4::attention", "flash4::attention_backward"]


@pytest.mark.parametrize("kind", WRITTEN)
def test_up_to_the_limit_nothing_of_ours_is_called(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, limit = arguments(kind), "MOST_DROPPED" if kind == "dropout" else "MOST"
    monkeypatch.setattr(small_in_graph, limit, 2 * 4 * 4)
    assert called(*call) == []
    monkeypatch.setattr(small_in_graph, limit, 2 * 4 * 4 - 1)
    assert called(*call) == BOTH


@pytest.mark.parametrize("kind", ["softcap", "part"])
def test_softcap_and_parts_of_a_call_keep_the_operator(kind: str) -> None:
    assert called(*arguments(kind)) == BOTH


def test_packages_and_a_chosen_backend_keep_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    call = arguments("dropout")
    with V.set_aot_compilation(True):
        assert called(*call) == BOTH
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    assert called(*call) == BOTH


@pytest.mark.parametrize("mask_grad", [False, True])
@pytest.mark.parametrize("has_dlse", [False, True])
def test_the_backward_of_a_floating_mask(mask_grad: bool, has_dlse: bool) -> None:
    """Torch's kernel does not serve it, though it does serve the forward."""
    q, *_ = arguments("sinks")
    call = q, q, q, torch.randn(1, 1, 4, 4), None, None, *CallOptions(0.3)
    out, lse, low = schema.attention(*call)
    dlse = torch.randn_like(lse) if has_dlse else None
    given = torch.randn_like(out), dlse, q, q, q, out, lse, low, *call[3:], mask_grad
    names, found = traced(schema.attention_backward, *given)
    assert not [name for name in names if name.startswith("flash4")]
    torch.testing.assert_close(found, schema.attention_backward(*given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_drops_what_an_eager_one_drops(dtype: torch.dtype) -> None:
    """The module's output and gradients are those of eager mode with the same seed."""
    module = MultiheadAttention(32, 2, 0.3, batch_first=True, dtype=dtype)
    x = torch.randn(2, 21, 32, dtype=dtype, requires_grad=True)

    def found(attend: Any) -> list[Tensor]:
        torch.manual_seed(1)
        out, _ = attend(x, x, x, need_weights=False)
        return [out, *torch.autograd.grad(out.square().sum(), (x, *module.parameters()))]

    loose: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found(compiled(module)), found(module), **loose)


def test_any_length_by_one_graph() -> None:
    """Sizes may be unknown, with dropout and a window, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash4_torch.attention(q, k, v, dropout_p=0.3, window=(3, 0))

    graph = compiled(attend, dynamic=True)
    for S in (7, 9):
        qkv = tuple(torch.randn(2, S, 2, 8, requires_grad=True) for _ in "qkv")
        steps = []
        for function in (graph, attend):
            torch.manual_seed(2)
            steps.append(results_and_gradients(function, qkv))
        torch.testing.assert_close(*steps)
