"""Attention weights in compiled graphs: written in torch's own operators, and equal to ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from flash4_torch import MultiheadAttention, ops
from flash4_torch.ops import weights_in_graph
from flash4_torch.problem import CallOptions
from test_decomposition import masks, scorings

FLASH4 = torch.ops.flash4


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    B, Sq, Sk, Hk, group = (draw(st.integers(1, n)) for n in (3, 6, 6, 2, 3))
    shapes = (B, Sq, Hk * group, 4), (B, Sk, Hk, 4), (B, Sk, Hk, 4)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    sinks = torch.randn(Hk * group, dtype=torch.float64) if draw(st.booleans()) else None
    return (q, k, v), draw(masks(B, Hk * group, Sq, Sk)), sinks


@given(calls(), scorings(), st.booleans())
def test_output_and_weights_together(call: Any, scoring: tuple[Any, ...], average: bool) -> None:
    qkv, mask, sinks = call
    options = CallOptions(*scoring)
    expected = ops.attention_and_weights(*qkv, mask, sinks, None, options, average)
    actual = weights_in_graph.forward(*qkv, mask, sinks, options, average)
    torch.testing.assert_close(actual, expected)


@given(calls(), scorings(), st.booleans(), st.sampled_from([0.0, 0.4]))
def test_gradients(call: Any, scoring: tuple[Any, ...], average: bool, p: float) -> None:
    (q, k, v), mask, sinks = call
    scale, left, right, *_ = scoring
    scoring = scale, left, right, 0.0, p
    rng_state = ops.draw_rng_state(q.device) if p else None
    _, lse, low = FLASH4.attention.default(q, k, v, mask, sinks, rng_state, *scoring, False)
    beside = lse, low if low.numel() else None, mask, sinks, rng_state
    weights = FLASH4.attention_weights.default(q, k, *beside, *scoring, average)
    dweights, mask_grad = torch.randn_like(weights), mask is not None and mask.is_floating_point()
    expected = FLASH4.attention_weights_backward.default(
        dweights, q, k, *beside, *scoring, average, mask_grad
    )
    actual = weights_in_graph.backward(dweights, q, k, *beside, *scoring, average, mask_grad)
    has = True, True, mask_grad, sinks is not None
    for x, y, wanted in zip(actual, expected, has, strict=True):
        assert (x is not None) == wanted
        if x is not None:
            torch.testing.assert_close(x, y)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_a_graph_calls(dropout: float) -> None:
    """A graph for the CPU calls nothing of ours without dropout, and with it not the weights' backward."""
    called: list[list[str]] = [[], []]

    def collect(index: int) -> Any:
        def compiler(graph: GraphModule, _: list[Tensor]) -> Any:
            called[index] += [node.name for node in graph.graph.nodes if "flash4" in str(node.target)]
            return make_boxed_func(graph)

        return compiler

    module = MultiheadAttention(8, 2, dropout, batch_first=True)
    x = torch.randn(2, 5, 8)
    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=collect(0), bw_compiler=collect(1))
    out, weights = torch.compile(module, fullgraph=True, backend=backend)(x, x, x)
    (out.sum() + weights.square().sum()).backward()
    forward, backward = called
    if dropout:
        assert forward and "attention_backward" in " ".join(backward)
        assert "attention_weights_backward" not in " ".join(backward)
    else:
        assert not forward and not backward
