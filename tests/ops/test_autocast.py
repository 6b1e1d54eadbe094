"""Autocast on the CPU: attention runs in the autocast dtype, as if its inputs had been cast by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash4_torch
from compiling import assert_same, compiled, results_and_gradients
from flash4_torch import ops
from flash4_torch.problem import CallOptions

B, SQ, SK, HQ, HK, D = 2, 5, 7, 4, 2, 8

OPTIONS = CallOptions(scale=0.3, window_right=0)

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def dense(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a mask that requires a gradient."""
    q, k, v = (torch.randn(B, S, H, D, dtype=dtype) for S, H in ((SQ, HQ), (SK, HK), (SK, HK)))
    tensors = q, k, v, torch.randn(1, HQ, SQ, SK)
    return tuple(x.requires_grad_() for x in tensors)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return flash4_torch.attention(q, k, v, attn_mask=mask, softcap=2.0, return_lse=True)


def varlen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    lengths = torch.tensor([0, SQ, B * SQ]), torch.tensor([0, SK, B * SK])
    return flash4_torch.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=lengths[0],
        cu_seqlens_k=lengths[1],
        max_seqlen_q=SQ,
        max_seqlen_k=SK,
        return_lse=True,
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash4_torch.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def operator(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.flash4.attention.default(q, k, v, mask, None, None, *OPTIONS)


def inner(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ops.attention(*ops.autocast_inputs(q, k, v), mask, None, None, OPTIONS)


def weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ops.attention_and_weights(*ops.autocast_inputs(q, k, v), mask, None, None, OPTIONS, True)[2]


Function = Callable[..., Any]
functions = pytest.mark.parametrize("function", [attention, varlen, sdpa, operator, inner, weights])


def under_autocast(function: Function, dtype: torch.dtype = torch.bfloat16) -> Function:
    def call(*arguments: Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            return function(*arguments)

    return call


def cast_by_hand(function: Function, dtype: torch.dtype) -> Function:
    return lambda q, k, v, mask: function(q.to(dtype), k.to(dtype), v.to(dtype), mask)


def gradients(function: Function, arguments: tuple[Tensor, ...]) -> list[Tensor | None]:
    results = function(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    return list(
        torch.autograd.grad(sum(x.float().sin().sum() for x in results), arguments, allow_unused=True)
    )


@functions
@dtypes
def test_equals_casting_by_hand(function: Function, dtype: torch.dtype) -> None:
    arguments = dense()
    actual, expected = under_autocast(function, dtype), cast_by_hand(function, dtype)
    torch.testing.assert_close(actual(*arguments), expected(*arguments), rtol=0, atol=0)
    torch.testing.assert_close(gradients(actual, arguments), gradients(expected, arguments), rtol=0, atol=0)


@dtypes
def test_dtypes(dtype: torch.dtype) -> None:
    """Results are in the autocast dtype, lse in float32, gradients in the parameters' dtype."""
    arguments = dense()
    out, lse = under_autocast(attention, dtype)(*arguments)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert [g.dtype for g in gradients(under_autocast(attention, dtype), arguments)] == [torch.float32] * 4


@functions
def test_float64_is_left_alone(function: Function) -> None:
    arguments = dense(torch.float64)
    torch.testing.assert_close(under_autocast(function)(*arguments), function(*arguments), rtol=0, atol=0)


@functions
def test_off_inside_on(function: Function) -> None:
    def off(*arguments: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(*arguments)

    arguments = dense()
    torch.testing.assert_close(under_autocast(off)(*arguments), function(*arguments), rtol=0, atol=0)


@functions
def test_backward_under_autocast_is_no_less_exact(function: Function) -> None:
    """Autocast must not lower the precision of what a backend computes in float32."""
    arguments = dense()
    outside = gradients(under_autocast(function), arguments)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(function, arguments)
    torch.testing.assert_close(inside, outside, rtol=0, atol=0)


def test_parameters_of_a_model() -> None:
    project = nn.Linear(D, 3 * D)
    x = torch.randn(B, SQ, D)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = project(x).unflatten(-1, (3, 1, D)).unbind(-3)
        assert q.dtype == torch.bfloat16
        loss = flash4_torch.attention(q, k, v, causal=True).float().sin().sum()
    loss.backward()
    for parameter in project.parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().sum() > 0


def test_compiled_inside_and_outside() -> None:
    """The context may be part of the graph or surround it."""
    arguments = dense()
    expected = results_and_gradients(under_autocast(attention), arguments)
    within = compiled(under_autocast(attention), backend="aot_eager")
    assert_same(results_and_gradients(within, arguments), expected)
    around = under_autocast(compiled(attention, backend="aot_eager"))
    assert_same(results_and_gradients(around, arguments), expected)
