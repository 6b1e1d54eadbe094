"""Attention of compiled graphs on a CPU: torch's own operator, with the results of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import decomposition
from torch.fx.experimental.proxy_tensor import make_fx

import flash4_torch
from compiling import compiled, results_and_gradients
from flash4_torch.backends.scoring import known_low, low_of
from flash4_torch.ops import cpu_in_graph, schema, small_in_graph
from flash4_torch.ops.impl import describe_inputs
from flash4_torch.problem import CallOptions, Inputs
from flash4_torch.reference import tiled

# torch 2.11's inductor imports a module that uses TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

NAMES = ("attention", "attention_backward")


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of the operator for a call that torch's kernel serves."""
    B, Sq, Sk, H, D = (draw(st.integers(1, n)) for n in (3, 9, 9, 3, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    q, k, v = (torch.randn(B, S, H, D, generator=generator) for S in (Sq, Sk, Sk))
    shape = tuple(draw(st.sampled_from([1, n])) for n in (B, H, Sq, Sk))
    seen = torch.rand(shape, generator=generator) < 0.4
    kind = draw(st.sampled_from(["", "bool", "float", "large"]))
    mask = {"": None, "bool": seen}.get(kind)
    if kind in ("float", "large"):
        mask = torch.randn(shape, generator=generator) * (1.0 if kind == "float" else 1e4)
        mask = mask.masked_fill(~seen, -torch.inf)
    options = CallOptions(D**-0.5, window_right=Sq - Sk if draw(st.booleans()) else None)
    return q, k, v, mask, None, None, *options


def traced(function: Any, *args: Any) -> tuple[list[str], Any]:
    """The names of the operators in Inductor's graph of a function, and what the graph returns."""
    graph = make_fx(function, decomposition_table=decomposition.select_decomp_table())(*args)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    names = [
        node.target.name()
        for node in graph.graph.nodes
        if node.op == "call_function" and hasattr(node.target, "name")
    ]
    return names, graph(*args)


@given(calls())
def test_forward(call: Any) -> None:
    """Out and lse, -inf in rows that see nothing; nothing of ours is called."""
    out, lse, low = schema.attention(*call)
    names, found = traced(lambda *args: schema.attention(*args)[:2], *call)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert not [name for name in names if name.startswith("flash4")]
    for a, b in zip(found, (out, lse), strict=True):
        torch.testing.assert_close(a, b)
        assert a.is_contiguous()
    _, found = traced(lambda *args: schema.attention(*args)[2], *call)
    assert found.shape == low.shape
    if low.numel() and call[3].abs().nan_to_num(0.0, 0.0, 0.0).max() > 1e3:
        torch.testing.assert_close(lse.double() + found, lse.double() + low, rtol=0.0, atol=1e-3)


@given(calls())
def test_backward(call: Any) -> None:
    out, lse, low = schema.attention(*call)
    low = low if low.numel() else None
    dout = torch.randn_like(out)
    q, k, v, *others = call
    arguments = dout, None, q, k, v, out, lse, low, *others, False
    expected = schema.attention_backward(*arguments)[:3]
    names, found = traced(lambda *args: schema.attention_backward(*args)[:3], *arguments)
    assert not [name for name in names if name.startswith("flash4")]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("S", [5, 16, 40])
def test_an_infinite_key_poisons_the_rows_that_see_it(dtype: torch.dtype, S: int) -> None:
    q, k, v = (
        torch.randn(1, S, 1, 32, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(3)
    )
    k[0, 1, 0, 0] = torch.inf
    call = q, k, v, None, None, None, *CallOptions(1.0)
    _, out = traced(lambda *args: schema.attention(*args)[0], *call)
    assert out[0, :, 0].isnan().any(-1).equal(q[0, :, 0, 0] > 0)


def test_what_the_kernel_does_not_serve_keeps_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 4, 2, 8)
    options = CallOptions(0.3)
    state, sinks = torch.tensor([1, 2]), torch.randn(2)
    served = q, q, q, None, None, None, *options
    for limit in ("MOST", "MOST_DROPPED"):
        monkeypatch.setattr(small_in_graph, limit, 0)
    others = [
        (q, q, q, None, sinks, None, *options),
        (q, q, q, None, None, state, *options._replace(dropout_p=0.5)),
        (q, q, q, None, None, None, *options._replace(window_left=1)),
        (q, q, q, None, None, None, *options._replace(window_right=1)),
        (q, q, q, None, None, None, *options._replace(softcap=2.0)),
        (q, q, q[..., :4], None, None, None, *options),
        (q[:0], q[:0], q[:0], None, None, None, *options),
    ]
    for call in others:
        assert traced(schema.attention, *call)[0] == ["flash4::attention"]
    assert "flash4::attention" not in traced(schema.attention, *served)[0]
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    assert traced(schema.attention, *served)[0] == ["flash4::attention"]


@pytest.mark.parametrize("lengths", [(7, 7), (7, 9)])
def test_any_length_by_one_graph(lengths: tuple[int, int]) -> None:
    """Sizes may be unknown; torch.compile's results and gradients equal eager ones."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash4_torch.attention(q, k, v)

    graph = compiled(attend, dynamic=True)
    for extra in (0, 3):
        Sq, Sk = (length + extra for length in lengths)
        qkv = [torch.randn(2, S, 2, 8, requires_grad=True) for S in (Sq, Sk, Sk)]
        for a, b in zip(
            *(results_and_gradients(function, tuple(qkv)) for function in (graph, attend)), strict=True
        ):
            torch.testing.assert_close(a, b)


def test_inductors_table_has_both() -> None:
    table = decomposition.select_decomp_table()
    assert {table[getattr(schema, name)] for name in NAMES} == {
        cpu_in_graph._attention,
        cpu_in_graph._attention_backward,
    }


def test_only_a_cpu_leaves_out_lses_rounding_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for a GPU, for which `meta` stands, read it however small lse is."""
    error = torch.empty(0)
    monkeypatch.setattr(tiled, "lse_low", lambda *args, **kwargs: error)
    for device, lse, expected in (("meta", 1.0, error), ("cpu", 1.0, None), ("cpu", 1e3, error)):
        q, mask = torch.empty(1, 4, 1, 8, device=device), torch.empty(1, 1, 4, 4, device=device)
        inputs = Inputs(q, q, q, mask)
        problem = describe_inputs(inputs, CallOptions(1.0))
        given = torch.full((1, 1, 4), lse, device=device)
        assert low_of(given, inputs, problem) is expected
        assert known_low(error, given, inputs, problem) is error
        # Torch's kernels on a GPU have none to tell.
        assert known_low(None, given, inputs, problem) is (None if device == "meta" else expected)
