"""Torch's own call of a whole module in evaluation: where it serves, and that nobody can tell."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import flash4_torch
from flash4_torch import testing
from flash4_torch.nn import fused

N, S, E, H = 3, 6, 16, 2
CALL = torch._native_multi_head_attention


def module(dtype: torch.dtype = torch.float32, **more: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return flash4_torch.MultiheadAttention(E, H, batch_first=True, dtype=dtype, **more).eval()


def an_input(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, S, E, generator=torch.Generator().manual_seed(1)).to(dtype)


@st.composite
def masks(draw: st.DrawFn) -> dict[str, Any]:
    """Bool masks, of which some leave rows nothing."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    share, found = draw(st.sampled_from([0.2, 0.6])), {}
    if draw(st.booleans()):
        found["key_padding_mask"] = torch.rand(N, S, generator=generator) < share
    kind = draw(st.sampled_from(["", "rows", "heads", "causal"]))
    if kind == "causal":
        return found | {"attn_mask": torch.full((S, S), -torch.inf).triu_(1) < 0.0, "is_causal": True}
    if kind:
        found["attn_mask"] = (
            torch.rand((S, S) if kind == "rows" else (N * H, S, S), generator=generator) < share
        )
    return found


def by_definition(attention: nn.MultiheadAttention, x: Tensor, dtype: torch.dtype, **given: Any) -> Any:
    """Output and weights of each head by plain torch; rows that see nothing have weights 0."""
    weight, bias = attention.in_proj_weight.to(dtype), attention.in_proj_bias.to(dtype)
    q, k, v = F.linear(x.to(dtype), weight, bias).view(N, S, 3, H, -1).permute(2, 0, 3, 1, 4)
    hidden = torch.zeros(N, H, S, S, dtype=torch.bool)
    if (mask := given.get("key_padding_mask")) is not None:
        hidden |= mask[:, None, None]
    if (mask := given.get("attn_mask")) is not None:
        hidden |= mask if mask.dim() == 2 else mask.view(N, H, S, S)
    scores = (q @ k.mT * (E // H) ** -0.5).masked_fill(hidden, -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1))
    rows = (weights @ v).transpose(1, 2).flatten(2)
    return F.linear(rows, attention.out_proj.weight.to(dtype), attention.out_proj.bias.to(dtype)), weights


@given(masks(), st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_results_are_those_of_attention(
    given_masks: dict[str, Any], need_weights: bool, average: bool, dtype: torch.dtype
) -> None:
    attention, x = module(dtype), an_input(dtype)
    with torch.no_grad(), mock.patch.object(fused, "_call", side_effect=CALL) as call:
        step = lambda: attention(  # noqa: E731
            x, x, x, need_weights=need_weights, average_attn_weights=average, **given_masks
        )
        (out, weights), *later = [step() for _ in range(3)]
        assert call.call_count == 3
        exact, peer = (by_definition(attention, x, t, **given_masks) for t in (torch.float64, dtype))
    testing.assert_close_as_peer(out, exact[0], peer[0])
    assert out.is_contiguous() and (weights is None) == (not need_weights)
    if weights is not None:
        expected = [each.mean(1) if average else each for _, each in (exact, peer)]
        testing.assert_close_as_peer(weights, *expected)
    for again in later:
        assert torch.equal(again[0], out) and (weights is None or torch.equal(again[1], weights))


def test_nan_comes_through() -> None:
    attention, x = module(), an_input()
    x[1, 2, 3] = torch.nan
    padding = torch.zeros(N, S, dtype=torch.bool)
    with torch.no_grad():
        for mask in (None, padding):
            for _ in range(2):
                out, _ = attention(x, x, x, key_padding_mask=mask)
                assert out[1].isnan().all() and not out[0].isnan().any()


def test_autocast_has_the_limits_of_its_dtype() -> None:
    attention, x = module(), torch.randn(1, 300, E)
    for cast in (False, True):
        context = torch.autocast("cpu", torch.bfloat16, enabled=cast)
        with mock.patch.object(fused, "_call", side_effect=CALL) as call, torch.no_grad(), context:
            for _ in range(2):
                attention(x, x, x, need_weights=False)
            assert call.called == cast


def test_where_it_does_not_serve() -> None:
    x, large = an_input(), torch.randn(1, 512, E)
    floating, row = torch.randn(S, S), x[0]
    calls = {
        "gradients": lambda: module()(x, x, x),
        "training": lambda: module(dropout=0.5).train()(x, x, x),
        "sequence first": lambda: flash4_torch.MultiheadAttention(E, H).eval()(x, x, x),
        "floating mask": lambda: module()(x, x, x, attn_mask=floating),
        "many scores": lambda: module()(large, large, large),
        "other keys": lambda: module()(x, x.clone(), x),
        "no batch": lambda: module()(row, row, row, need_weights=False),
        "no bias": lambda: module(bias=False)(x, x, x),
        "no entries": lambda: module()(x[:0], x[:0], x[:0]),
        "observed": lambda: _observed(x),
    }
    with mock.patch.object(fused, "_call", side_effect=CALL) as call:
        for name, step in calls.items():
            with torch.set_grad_enabled(name == "gradients"):
                for _ in range(2):
                    step()
            assert not call.called, name


def _observed(x: Tensor) -> None:
    with testing.backends_used() as used:
        module()(x, x, x)
    assert used
