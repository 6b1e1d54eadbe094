"""The public functions' signatures, and what their checks let through: sizes in tracing, torch's numbers."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import flash4_torch
from flash4_torch import fast_path
from flash4_torch.errors import ArgumentError, KeywordError
from on_cpu import gpu

X = torch.randn(2, 6, 2, 8)
DENSE = (
    "causal", "window", "scale", "softcap", "attn_mask", "sinks", "dropout_p", "deterministic", "return_lse",
    "score_mod", "mask_mod", "block_mask",
)  # fmt: skip
PARAMETERS = {
    flash4_torch.attention: ("q", "k", "v", *DENSE),
    flash4_torch.support: ("q", "k", "v", *DENSE),
    flash4_torch.attention_varlen: (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
        *(name for name in DENSE if name != "attn_mask"),
    ),
    flash4_torch.scaled_dot_product_attention: (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", PARAMETERS, ids=lambda f: f.__name__)
def test_signatures_show_the_arguments_and_no_more(function: Callable[..., Any]) -> None:
    assert tuple(inspect.signature(function).parameters) == PARAMETERS[function]
    spec = inspect.getfullargspec(function)
    assert (*spec.args, *spec.kwonlyargs) == PARAMETERS[function] and spec.varkw is None
    assert "unknown" not in pydoc.plain(pydoc.render_doc(function)).partition("\n\n")[2].partition("\n")[0]


def test_an_unknown_keyword_is_a_type_error_as_everywhere() -> None:
    with pytest.raises(
        TypeError, match="attention has no argument 'softmax_scale'; it is called 'scale' here"
    ):
        flash4_torch.attention(X, X, X, softmax_scale=1.0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_calls_that_were_made_before_are_checked_all_the_same() -> None:
    x = torch.randn(1, 128, 2, 64).bfloat16()
    with gpu():
        for _ in range(2):
            flash4_torch.attention(x, x, x)
        assert any(fast_path.MEMORY.calls.values())
        with pytest.raises(KeywordError):
            flash4_torch.attention(x, x, x, is_causal=False)
        for return_lse in ("no", 0, 1, None, [], torch.tensor(True)):
            with pytest.raises(ArgumentError, match="return_lse is"):
                flash4_torch.attention(x, x, x, return_lse=return_lse)
        assert len(flash4_torch.attention(x, x, x, return_lse=True)) == 2


def by_sizes(x: Tensor) -> Tensor:
    """Every argument that may come from a size comes from one."""
    S = x.shape[1]
    options: dict[str, Any] = {"causal": S > 3, "window": (S, S // 2), "deterministic": S < 9}
    out, lse = flash4_torch.attention(x, x, x, **options, return_lse=S > 2)
    return out * lse.sum()


def varlen_by_sizes(x: Tensor) -> Tensor:
    T = x.shape[1]
    lengths = torch.tensor([0, T])
    out: Tensor = flash4_torch.attention_varlen(
        x[0], x[0], x[0], cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=T, max_seqlen_k=T,
        causal=T > 3, window=(T // 2, None), return_lse=T > 99,
    )  # fmt: skip
    return out


def sdpa_by_sizes(x: Tensor) -> Tensor:
    return flash4_torch.scaled_dot_product_attention(
        x, x, x, is_causal=x.shape[1] > 3, enable_gqa=x.shape[1] > 9
    )


@pytest.mark.parametrize("function", [by_sizes, varlen_by_sizes, sdpa_by_sizes])
def test_sizes_that_are_traced_pass_the_checks(function: Callable[[Tensor], Tensor]) -> None:
    expected = function(X)
    torch.testing.assert_close(make_fx(function, tracing_mode="symbolic")(X)(X), expected)
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(X), expected)


def test_a_bad_call_fails_the_same_under_compile() -> None:
    for changed in ({"softmax_scale": 1.0}, {"causal": "no"}, {"scale": 1e39}, {"window": (2**70, None)}):

        def call(x: Tensor, changed: dict[str, Any] = changed) -> Tensor:
            return flash4_torch.attention(x, x, x, **changed)

        with pytest.raises((ArgumentError, KeywordError)) as eager:
            call(X)
        with pytest.raises(type(eager.value)) as compiled:
            torch.compile(call, backend="eager")(X)
        assert str(compiled.value) == str(eager.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"scale": torch.tensor(0.5)},
        {"scale": True},
        {"scale": np.float32(0.5)},
        {"scale": np.float64(0.5)},
        {"scale": 2},
        {"dropout_p": torch.tensor(0.0)},
        {"dropout_p": False},
        {"dropout_p": np.float32(0)},
    ],
    ids=str,
)
def test_what_torch_takes_for_a_number_is_one(changed: dict[str, Any]) -> None:
    x = X.transpose(1, 2)
    out = flash4_torch.scaled_dot_product_attention(x, x, x, **changed)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x, **changed))


@pytest.mark.parametrize("scale", [1e-38, 1e-42, 1e-50, 5e-324, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scales_that_are_nothing_in_float32_attend_evenly(scale: float, causal: bool) -> None:
    x = X.clone().requires_grad_()
    for mask in (None, torch.ones(6, 6, dtype=torch.bool).tril()):
        out, lse = flash4_torch.attention(
            x, x, x, scale=scale, causal=causal, attn_mask=mask, return_lse=True
        )
        seen = torch.ones(6, 6).tril() if causal or mask is not None else torch.ones(6, 6)
        torch.testing.assert_close(lse, seen.sum(1).log().expand(2, 2, 6))
        even = torch.einsum("ij,bjhd->bihd", seen / seen.sum(1, keepdim=True), X)
        torch.testing.assert_close(out, even)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        of_keys = (seen / seen.sum(1, keepdim=True)).sum(0)
        torch.testing.assert_close(gradient, of_keys[:, None, None].expand(x.shape))


RANKS = (), (1,), (7,), (5, 7), (5, 1), (4, 5, 7), (1, 5, 7), (4, 1, 1), (2, 1, 1, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", RANKS, ids=str)
@pytest.mark.parametrize("is_bool", [True, False])
def test_a_mask_has_any_rank(shape: tuple[int, ...], is_bool: bool, dtype: torch.dtype) -> None:
    """A mask gives what its view with four dimensions does, for the first time and again."""
    q, k = (torch.randn(2, S, 4, 8, dtype=dtype, requires_grad=True) for S in (5, 7))
    mask = torch.rand(shape) > 0.3 if is_bool else torch.randn(shape, dtype=dtype)
    expected = None
    for view in (mask[(None,) * (4 - len(shape))], mask, mask, mask):
        out, lse = flash4_torch.attention(q, k, k, attn_mask=view, return_lse=True)
        found = (out, lse, *torch.autograd.grad(out.square().sum(), (q, k)))
        expected = expected or found
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        with torch.no_grad():
            torch.testing.assert_close(flash4_torch.attention(q, k, k, attn_mask=view), out)
