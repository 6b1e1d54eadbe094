"""Training steps that save their weights: results are those of the operators, gradients keep their laws."""

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
from flash4_torch.errors import DoubleBackwardError
from flash4_torch.nn import materialized, prepared
from module_masks import masks
from module_ways import Way, ways

E, H, N, S = 16, 2, 3, 6
RUN = materialized.run


def module(dtype: torch.dtype = torch.float32, **more: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return flash4_torch.MultiheadAttention(E, H, dtype=dtype, **more)


@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    way=ways(),
    bias=st.booleans(),
    dropout=st.sampled_from([0.0, 0.3, 1.0]),
    average=st.sampled_from([None, True, False]),
    of=st.sampled_from(["both", "out", "weights"]),
    few=st.sampled_from([0, 1 << 13]),
    cast=st.booleans(),
)
@settings(max_examples=examples(60, 400))
def test_a_step_is_that_of_the_operators(
    data: st.DataObject,
    dtype: torch.dtype,
    way: Way,
    bias: bool,
    dropout: float,
    average: bool | None,
    of: str,
    few: int,
    cast: bool,
) -> None:
    sizes = way.sizes(N, S, 4)
    given_masks = data.draw(masks(H, sizes, dtype, way.batched))
    flags = {"need_weights": average is not None, "average_attn_weights": bool(average)}
    exact = way.module(E, H, torch.float64, bias=bias, dropout=dropout)
    leaves, cast = way.leaves(sizes, E), cast and dtype != torch.float64

    def step(dtype: torch.dtype) -> list[Tensor]:
        attention = way.module(E, H, dtype, bias=bias, dropout=dropout)
        attention.load_state_dict(exact.state_dict())
        given = [x.to(dtype).requires_grad_() for x in leaves]
        own = {
            name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in given_masks.items()
        }
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast and dtype != torch.float64):
            out, weights = attention(*way.inputs(given), **own, **flags)
        made = [x for x in (out, weights) if x is not None]
        chosen = made if of == "both" or weights is None else [out] if of == "out" else [weights]
        ramps = [torch.linspace(-1, 1, a.numel()).view(a.shape).to(a.dtype) for a in chosen]
        inputs = (*given, *attention.parameters())
        grads = torch.autograd.grad(chosen, inputs, ramps, allow_unused=True, materialize_grads=True)
        return [*made, *grads]

    with (
        mock.patch.object(materialized, "FEW", few),
        mock.patch.object(materialized, "run", side_effect=RUN) as run,
    ):
        prepared.clear()
        actual = step(dtype)
        computed = torch.bfloat16 if cast else dtype
        native = materialized.products_dtype(computed) == computed
        held = average is not None or dropout > 0.0
        exact_anyway = few > 0 or native or average is None
        assert run.called == ((held or (few > 0 and computed.itemsize == 2)) and exact_anyway)
    with testing.backends_used():
        expected, peer = step(torch.float64), step(dtype)
    for a, e, p in zip(actual, expected, peer, strict=True):
        assert a.shape == p.shape and a.dtype == p.dtype and a.stride() == p.stride()
        if cast:
            # Their errors are those of 16 bits, whatever dtype they are returned in.
            a, p = a.bfloat16(), p.bfloat16()
        testing.assert_close_as_peer(a, e, p)


def a_step(**more: Any) -> tuple[Tensor, Tensor, Tensor]:
    attention = module(batch_first=True, **more)
    x = torch.randn(N, S, E, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    with mock.patch.object(materialized, "run", side_effect=RUN) as run:
        out, weights = attention(x, x, x)
        assert run.called
    return x, out, weights


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_a_batch_are_those_of_each(create_graph: bool, dropout: float) -> None:
    x, out, weights = a_step(dropout=dropout)
    douts, dweights = torch.randn(4, *out.shape), torch.randn(4, *weights.shape)
    more = {"retain_graph": True, "create_graph": create_graph}
    (batch,) = torch.autograd.grad((out, weights), x, (douts, dweights), is_grads_batched=True, **more)
    for i in range(4):
        (one,) = torch.autograd.grad((out, weights), x, (douts[i], dweights[i]), **more)
        torch.testing.assert_close(batch[i], one)


def test_second_derivatives_are_refused() -> None:
    x, out, weights = a_step()
    for made in (out, weights):
        (dx,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        with pytest.raises(DoubleBackwardError):
            torch.autograd.grad(dx.sum(), x)


def test_a_graph_may_be_used_twice() -> None:
    x, out, weights = a_step(dropout=0.3)
    first, second = (
        torch.autograd.grad(out.sum() + weights.square().sum(), x, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_seeds_and_checkpoints_repeat_its_masks() -> None:
    attention, x = module(batch_first=True, dropout=0.4), torch.randn(N, S, E).requires_grad_()

    def grads(step: Any) -> list[Tensor]:
        torch.manual_seed(3)
        out, weights = step(x)
        return [out, weights, *torch.autograd.grad(out.sum() + weights.square().sum(), x)]

    plain = lambda x: attention(x, x, x)  # noqa: E731
    first, again = grads(plain), grads(plain)
    assert all(map(torch.equal, first, again))
    checkpointed = grads(lambda x: torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False))
    for a, b in zip(first, checkpointed, strict=True):
        torch.testing.assert_close(a, b)


def test_it_saves_no_more_than_stock() -> None:
    """Bytes that autograd's graph keeps, parameters and inputs aside."""
    for dtype, dropout in (
        (torch.float32, 0.0),
        (torch.float32, 0.2),
        (torch.bfloat16, 0.0),
        (torch.bfloat16, 0.2),
    ):
        stock = nn.MultiheadAttention(32, 2, dropout=dropout, batch_first=True, dtype=dtype)
        ours = flash4_torch.MultiheadAttention.from_torch(stock)
        x = torch.randn(2, 128, 32, dtype=dtype, requires_grad=True)
        known = {p.untyped_storage().data_ptr() for p in (x, *stock.parameters())}
        sizes = []
        for attention in (stock, ours):
            out, _ = attention(x, x, x)
            sizes.append(sum(_storages(out, known).values()))
        assert sizes[1] <= sizes[0]


def _storages(out: Tensor, known: set[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    waiting, seen = [out.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        saved = list(getattr(node, "saved_tensors", ()))
        saved += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for x in saved:
            if isinstance(x, Tensor) and (at := x.untyped_storage().data_ptr()) not in known:
                found[at] = x.untyped_storage().nbytes()
        waiting += [next_node for next_node, _ in node.next_functions]
    return found
