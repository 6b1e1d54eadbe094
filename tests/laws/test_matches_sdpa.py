"""`scaled_dot_product_attention` is torch's: same arguments, same results and gradients, same errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from cases import FLOAT_DTYPES
from flash4_torch import env, testing


@st.composite
def sdpa_calls(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Any]]:
    """Calls of 2 to 5 dimensions with batch and heads that may broadcast."""
    rank = draw(st.integers(2, 5))
    dtype = draw(st.sampled_from(FLOAT_DTYPES))
    L, S = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    E, Ev = draw(st.sampled_from([1, 7, 8])), draw(st.sampled_from([3, 8]))
    leading = tuple(draw(st.integers(1, 3)) for _ in range(rank - 2))
    gqa = rank > 2 and draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def randn(lead: tuple[int, ...], *sizes: int) -> Tensor:
        x = torch.randn(*lead, *sizes, generator=generator, dtype=torch.float64).to(dtype)
        return x.requires_grad_()

    q_lead = (*leading[:-1], leading[-1] * 2) if gqa else leading
    k_lead = leading if gqa else tuple(draw(st.sampled_from([1, n])) for n in leading)
    tensors = [randn(q_lead, L, E), randn(k_lead, S, E), randn(k_lead, S, Ev)]
    kwargs: dict[str, Any] = {"scale": draw(st.sampled_from([None, 0.5])), "enable_gqa": gqa}
    style = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if style == "causal":
        kwargs["is_causal"] = True
    elif style != "none":
        shape = (*(draw(st.sampled_from([1, n])) for n in q_lead), L, S)
        mask = torch.rand(shape, generator=generator) < 0.7
        kwargs["attn_mask"] = (
            mask if style == "bool" else torch.zeros(shape, dtype=dtype).masked_fill(~mask, -2.0)
        )
    return tensors, kwargs


@given(sdpa_calls())
@settings(max_examples=200)
def test_values_and_gradients(call: tuple[list[Tensor], dict[str, Any]]) -> None:
    tensors, kwargs = call
    out = flash4_torch.scaled_dot_product_attention(*tensors, **kwargs)
    peer = F.scaled_dot_product_attention(*tensors, **kwargs)
    assert (out.shape, out.dtype, out.device) == (peer.shape, peer.dtype, peer.device)
    exact_kwargs = dict(kwargs)
    if "attn_mask" in kwargs and kwargs["attn_mask"].dtype != torch.bool:
        exact_kwargs["attn_mask"] = kwargs["attn_mask"].double()
    exact = F.scaled_dot_product_attention(*(x.double() for x in tensors), **exact_kwargs)
    dout = torch.randn_like(out)
    gradients = [torch.autograd.grad(o, tensors, dout.to(o.dtype)) for o in (out, exact, peer)]
    for a, e, p in zip((out, *gradients[0]), (exact, *gradients[1]), (peer, *gradients[2]), strict=True):
        # Torch computes some calls of few elements in float32 throughout: one rounding of terms near 1.
        testing.assert_close_as_peer(a, e.double(), p, noise=2 * torch.finfo(a.dtype).eps)


@given(sdpa_calls())
def test_our_backends_serve_it(call: tuple[list[Tensor], dict[str, Any]]) -> None:
    tensors, kwargs = call
    with testing.backends_used() as used:
        flash4_torch.scaled_dot_product_attention(*tensors, **kwargs)
    assert sum(used.values()) == 1


def test_causal_is_top_left() -> None:
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    out = flash4_torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_fully_masked_rows_give_zero() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in "qkv")
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    out = flash4_torch.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (out[:, :, 2] == 0).all()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


X = torch.randn(2, 3, 4, 8)
BAD = {
    "dtypes differ": ((X, X.double(), X), {}),
    "integer query": ((X.long(), X.long(), X.long()), {}),
    "head sizes differ": ((X, X[..., :4], X), {}),
    "batch sizes differ": ((X, X[:1].repeat(3, 1, 1, 1), X), {}),
    "heads without enable_gqa": ((X.repeat(1, 2, 1, 1), X, X), {}),
    "heads not a multiple with enable_gqa": ((X, X[:, :2], X[:, :2]), {"enable_gqa": True}),
    "one-dimensional": ((X[0, 0, 0], X[0, 0, 0], X[0, 0, 0]), {}),
    "ranks differ": ((X, X[0, 0, 0], X), {}),
    "mask, causal and dropout": (
        (X, X, X),
        {"attn_mask": X[0, 0, :, :4], "is_causal": True, "dropout_p": 0.1},
    ),
    "mask of another shape": ((X, X, X), {"attn_mask": torch.ones(5, 4, dtype=torch.bool)}),
    "integer mask": ((X, X, X), {"attn_mask": torch.ones(4, 4, dtype=torch.long)}),
    "dropout over 1": ((X, X, X), {"dropout_p": 1.5}),
    "meta and cpu": ((X, X.to("meta"), X), {}),
    "not a tensor": ((X, 3, X), {}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_torchs(name: str) -> None:
    args, kwargs = BAD[name]
    with pytest.raises(Exception) as theirs:
        F.scaled_dot_product_attention(*args, **kwargs)
    with pytest.raises(type(theirs.value)) as ours:
        flash4_torch.scaled_dot_product_attention(*args, **kwargs)
    assert str(ours.value) == str(theirs.value)


def test_ours_in_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What we leave to torch goes to torch's own function, and does not come back."""
    q, mask = torch.randn(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(q, q, q, mask, is_causal=True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash4_torch.scaled_dot_product_attention)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q, mask, is_causal=True), expected)
    with pytest.raises(RuntimeError, match="dtype"):
        F.scaled_dot_product_attention(q, q.half(), q)


def test_mask_and_causal_together_are_what_torch_makes_of_them() -> None:
    mask = torch.rand(4, 4) < 0.7
    out = flash4_torch.scaled_dot_product_attention(X, X, X, attn_mask=mask, is_causal=True)
    assert torch.equal(out, F.scaled_dot_product_attention(X, X, X, attn_mask=mask, is_causal=True))


def test_values_shorter_than_keys_are_refused() -> None:
    """Torch's CPU kernel reads past the end of value here."""
    with pytest.raises(flash4_torch.errors.ShapeError, match=r"value is .* key"):
        flash4_torch.scaled_dot_product_attention(X, X, X[:, :, :2])


def test_dropout_follows_the_generator() -> None:
    q, k, v = (torch.randn(1, 2, 32, 8) for _ in "qkv")
    call = lambda: flash4_torch.scaled_dot_product_attention(q, k, v, dropout_p=0.5)  # noqa: E731
    torch.manual_seed(1)
    first, second = call(), call()
    torch.manual_seed(1)
    assert torch.equal(first, call())
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@given(Sq=st.integers(1, 30), Sk=st.integers(1, 30))
@settings(max_examples=30)
def test_causal_as_torch_aligns_it_is_a_window(backend: str, Sq: int, Sk: int) -> None:
    """Row i sees keys up to i if the right bound is Sq - Sk, of either sign."""
    q, k, v = (torch.randn(2, S, 2, 8, requires_grad=True) for S in (Sq, Sk, Sk))
    dout = torch.randn(2, Sq, 2, 8)
    peer = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    wanted = [peer.transpose(1, 2), *torch.autograd.grad(peer, (q, k, v), dout.transpose(1, 2))]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(env.BACKEND.name, backend)
        out = flash4_torch.attention(q, k, v, window=(None, Sq - Sk))
        found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
