"""`attention` against its float64 definition: values and all gradients, within twice plain torch's error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash4_torch
from cases import Case, cases, finite_sum
from flash4_torch import testing


def results_and_gradients(
    case: Case, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor
) -> list[torch.Tensor]:
    """out, lse and the gradients of a functional of both."""
    loss = (out.double() * dout).sum() + finite_sum(lse.double(), dlse)
    return [out, lse, *torch.autograd.grad(loss, case.differentiable)]


NAMES = ("out", "lse", "dq", "dk", "dv", "dmask")


def assert_matches(case: Case, dropout_p: float = 0.0) -> None:
    dropout = {}
    if dropout_p > 0.0:
        dropout = {"dropout_p": dropout_p, "rng_state": testing.peek_rng_state()}
    with testing.poisoned_memory():
        out, lse = flash4_torch.attention(
            case.q, case.k, case.v, **case.kwargs, dropout_p=dropout_p, return_lse=True
        )
        cotangents = torch.randn_like(out, dtype=torch.float64), torch.randn_like(lse, dtype=torch.float64)
        actual = results_and_gradients(case, out, lse, *cotangents)
    exact = results_and_gradients(case, *case.exact(**dropout), *cotangents)
    peer = results_and_gradients(case, *case.exact(case.q.dtype, **dropout), *cotangents)
    # The backward subtracts dout . out with out as it was stored; the error sums up in a broadcast mask's
    # gradient, whose exact value may cancel.
    stored = torch.finfo(case.q.dtype).eps * (cotangents[0] * out).norm().item()
    for name, a, e, p in zip(NAMES, actual, exact, peer, strict=False):
        noise = stored if name == "dmask" else 0.0
        testing.assert_close_as_peer(a, e.double(), p, what=name, noise=noise)


@given(cases())
@settings(max_examples=300)
def test_values_and_gradients(case: Case) -> None:
    assert_matches(case)


@given(cases(), st.sampled_from([0.001, 0.1, 0.5, 0.97, 1.0]))
@settings(max_examples=150)
def test_values_and_gradients_with_dropout(case: Case, dropout_p: float) -> None:
    assert_matches(case, dropout_p)


@given(cases(attn_mask=None, softcap=0.0, window=(None, None)))
def test_plain_calls_that_torchs_own_kernel_serves(case: Case) -> None:
    assert_matches(case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_sequences_cross_every_tile(
    monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype, causal: bool
) -> None:
    monkeypatch.setenv("FLASH4_BACKEND", backend)
    q, k, v = (torch.randn(2, 601, 2, 24, dtype=torch.float64).to(dtype).requires_grad_() for _ in "qkv")
    case = Case(q, k, v, {"causal": causal})
    out = flash4_torch.attention(q, k, v, causal=causal)
    dout = torch.randn_like(out)
    actual = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    results = []
    for dtype_ in (torch.float64, dtype):
        other, _ = case.exact(dtype_)
        results.append([other, *torch.autograd.grad(other, (q, k, v), dout.to(dtype_))])
    for name, a, e, p in zip(("out", "dq", "dk", "dv"), actual, *results, strict=True):
        testing.assert_close_as_peer(a, e.double(), p, what=name)


def needs_grad(x: torch.Tensor | None) -> bool:
    return x is not None and x.requires_grad


@given(cases(dtypes=(torch.float64,)), st.booleans())
@settings(max_examples=25)
def test_gradcheck(case: Case, through_lse: bool) -> None:
    def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kwargs = dict(case.kwargs)
        names = [name for name in ("attn_mask", "sinks") if needs_grad(kwargs[name])]
        kwargs |= dict(zip(names, inputs[3:], strict=True))
        out, lse = flash4_torch.attention(*inputs[:3], **kwargs, return_lse=True)
        return (out, lse.masked_fill(torch.isinf(lse), 0.0)) if through_lse else (out,)

    mask = case.kwargs["attn_mask"]
    if mask is not None and mask.requires_grad:
        # Finite differences of -inf are NaN; masked scores have no gradient anyway.
        finite = torch.where(torch.isinf(mask), -1.0, mask).double().detach().requires_grad_()
        case.kwargs["attn_mask"] = finite
    if case.kwargs["sinks"] is not None:
        case.kwargs["sinks"] = case.kwargs["sinks"].detach().double().requires_grad_()
    fresh = (x.detach().clone(memory_format=torch.contiguous_format) for x in case.differentiable)
    inputs = tuple(x.requires_grad_() for x in fresh)
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
