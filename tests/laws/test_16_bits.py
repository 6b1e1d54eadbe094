"""16 bits on a CPU, calls beyond the smallest: large scores with a common part are as exact as torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flash4_torch
from everything import examples
from flash4_torch.testing import assert_close_as_peer

DTYPES = (torch.bfloat16, torch.float16)


@settings(max_examples=examples(12, 60))
@given(
    dtype=st.sampled_from(DTYPES),
    Sq=st.sampled_from([64, 128, 191, 192, 260]),
    Sk=st.sampled_from([64, 191, 300]),
    D=st.sampled_from([32, 64, 72]),
    causal=st.booleans(),
    offset=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 99),
)
def test_attention(
    dtype: torch.dtype, Sq: int, Sk: int, D: int, causal: bool, offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, S, 4, D, generator=generator) for S in (Sq, Sk, Sk, Sq))
    q, k, v, dout = (x.to(dtype) for x in (2 * q + offset, 2 * k + offset, v, dout))
    # Each row sees a key, so that torch's kernel, which is given a mask, has no NaN.
    band = torch.ones(Sq, Sk, dtype=torch.bool).tril(max(0, Sk - Sq)) if causal else None

    def by_torch(work: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(work).requires_grad_() for x in (q, k, v)]
        heads = (x.transpose(1, 2) for x in leaves)
        out = F.scaled_dot_product_attention(*heads, attn_mask=band).transpose(1, 2)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(work))

    leaves = [x.requires_grad_() for x in (q, k, v)]
    window = (None, max(0, Sk - Sq) + Sq - Sk) if causal else (None, None)
    out = flash4_torch.attention(*leaves, window=window)
    found = out.detach(), *torch.autograd.grad(out, leaves, dout)
    for own, exact, peer in zip(found, by_torch(torch.float64), by_torch(dtype), strict=True):
        assert_close_as_peer(own, exact, peer)


@pytest.mark.parametrize("how", ["training", "dropout", "no gradients"])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(3, 20))
@given(S=st.sampled_from([66, 128, 200]), offset=st.sampled_from([0.0, 3.0]), seed=st.integers(0, 99))
def test_modules_in_training(dtype: torch.dtype, how: str, S: int, offset: float, seed: int) -> None:
    """A dropout that drops nothing, with which stock's scores are not rounded either."""
    torch.manual_seed(seed)
    stock = nn.MultiheadAttention(64, 2, dropout=1e-9 if how == "dropout" else 0.0, batch_first=True)
    with torch.no_grad():
        stock.in_proj_weight.mul_(2.0)
        stock.in_proj_bias[:128] = offset  # that of queries and keys
    x, dy = torch.randn(2, S, 64).to(dtype), torch.randn(2, S, 64).to(dtype)

    def results(module: nn.Module, work: torch.dtype) -> tuple[Tensor, ...]:
        leaf = x.to(work).requires_grad_(how != "no gradients")
        with torch.set_grad_enabled(leaf.requires_grad):
            y = module(leaf, leaf, leaf, need_weights=False)[0]
        return (y,) if how == "no gradients" else (y.detach(), torch.autograd.grad(y, leaf, dy.to(work))[0])

    peer = results(stock.to(dtype), dtype)
    swapped = flash4_torch.MultiheadAttention.from_torch(stock)
    found = results(swapped, dtype)
    exact = results(stock.double(), torch.float64)
    for own, e, p in zip(found, exact, peer, strict=True):
        assert_close_as_peer(own, e, p)
