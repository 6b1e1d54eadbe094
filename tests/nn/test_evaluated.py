"""Evaluation that returns weights: results are those of the operators, in blocks of any size."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flash4_torch
from everything import examples
from flash4_torch import testing
from flash4_torch.nn import evaluated, fused, materialized, prepared
from module_masks import masks
from module_ways import Way, ways

E, H, N, S = 16, 2, 3, 6
RUN, EMPTY = evaluated.run, Tensor.new_empty


def module(dtype: torch.dtype = torch.float32, **more: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return flash4_torch.MultiheadAttention(E, H, dtype=dtype, **more).eval()


def poisoned(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return EMPTY(x, *args, **kwargs).fill_(torch.nan)


@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    way=ways(),
    bias=st.booleans(),
    average=st.booleans(),
    block=st.sampled_from([1, 4 * H * S, 2 * H * S * S, 1 << 21]),
    few=st.sampled_from([0, 1 << 13]),
    grad_enabled=st.booleans(),
    cast=st.booleans(),
)
@settings(max_examples=examples(60, 400))
def test_results_are_those_of_the_operators(
    data: st.DataObject,
    dtype: torch.dtype,
    way: Way,
    bias: bool,
    average: bool,
    block: int,
    few: int,
    grad_enabled: bool,
    cast: bool,
) -> None:
    sizes = way.sizes(N, S, 4)
    given_masks = data.draw(masks(H, sizes, dtype, way.batched))
    exact, leaves = way.module(E, H, torch.float64, bias=bias).eval(), way.leaves(sizes, E)
    cast = cast and dtype != torch.float64

    def results(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        attention = way.module(E, H, dtype, bias=bias).eval().requires_grad_(False)
        attention.load_state_dict(exact.state_dict())
        inputs = way.inputs([x.to(dtype) for x in leaves])
        own = {
            name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in given_masks.items()
        }
        casting = torch.autocast("cpu", torch.bfloat16, enabled=cast and dtype != torch.float64)
        with torch.set_grad_enabled(grad_enabled), casting:
            found: tuple[Tensor, Tensor] = attention(*inputs, average_attn_weights=average, **own)
        return found

    with (
        mock.patch.object(fused, "serves", return_value=False),
        mock.patch.object(evaluated, "_BLOCK", block),
        mock.patch.object(materialized, "FEW", few),
        mock.patch.object(Tensor, "new_empty", poisoned),
        mock.patch.object(evaluated, "run", side_effect=RUN) as run,
    ):
        prepared.clear()
        actual, again = results(dtype), results(dtype)
        computed = torch.bfloat16 if cast else dtype
        native = materialized.products_dtype(computed) == computed
        assert run.call_count == (2 if few > 0 or native else 0)
    with testing.backends_used():
        expected, peer = results(torch.float64), results(dtype)
    for a, b, e, p in zip(actual, again, expected, peer, strict=True):
        assert torch.equal(a, b) and a.shape == p.shape and a.dtype == p.dtype and a.stride() == p.stride()
        testing.assert_close_as_peer(a, e, p)


@pytest.mark.parametrize("block", [H * S, 1 << 21])
def test_nan_stays_in_its_entry(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluated, "_BLOCK", block)
    x = torch.randn(N, S, E)
    x[1, 2, 3] = torch.nan
    with torch.no_grad():
        for mask in (None, torch.randn(S, S)):
            for made in module(batch_first=True)(x, x, x, attn_mask=mask):
                assert made[1].isnan().all() and made[[0, 2]].isfinite().all()


def test_results_may_be_changed_where_there_are_gradients() -> None:
    attention, x, mask = module(batch_first=True), torch.randn(N, S, E), torch.randn(S, S)
    for average in (True, False):
        with torch.no_grad():
            made = attention(x, x, x, attn_mask=mask, average_attn_weights=average)
        for result in made:
            factor = torch.ones((), requires_grad=True)
            result *= factor
            assert torch.autograd.grad(result.sum(), factor)[0].isfinite()


def test_where_it_does_not_serve() -> None:
    x, mask = torch.randn(N, S, E), torch.randn(S, S)
    own = lambda **more: module(batch_first=True, **more)  # noqa: E731
    calls = {
        "no weights": lambda: own()(x, x, x, attn_mask=mask, need_weights=False),
        "dropout": lambda: own(dropout=0.5).train()(x, x, x, attn_mask=mask),
        "a mask of another dtype": lambda: own()(x, x, x, attn_mask=mask.double()),
        "torch's own call": lambda: own()(x, x, x),
    }
    with mock.patch.object(evaluated, "run", side_effect=RUN) as run, torch.no_grad():
        for name, call in calls.items():
            for _ in range(2):
                call()
            assert not run.called, name
