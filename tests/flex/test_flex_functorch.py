"""torch.func over programmable attention: vmap and grad equal loops, also over captured tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import flash4_torch
from flash4_torch.testing import backends_used
from flex_mods import H

N, S = 3, 9


def inputs() -> list[Tensor]:
    """q, k and v, mapped over N, and a table of H biases that is mapped or not."""
    shapes = (N, 2, S, H, 4), (N, 2, S, 2, 4), (N, 2, S, 2, 6), (N, H)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def of_entry(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i - j >= b


def attend(mask_mod: Callable[..., Tensor], block_mask: Any = None) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        functions = {"mask_mod": mask_mod} if block_mask is None else {"block_mask": block_mask}
        return flash4_torch.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s * 2 + bias[h], **functions, return_lse=True
        )

    return function


def gradients(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def total(*arguments: Tensor) -> Tensor:
        out, lse = function(*arguments)
        return out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()

    return grad(total, (0, 1, 2, 3))


@pytest.mark.parametrize("mask_mod", [causal, of_entry])
@pytest.mark.parametrize("of_bias", [None, 0])
@pytest.mark.parametrize("of_keys", [None, 0])
def test_mapped_calls_equal_loops(
    mask_mod: Callable[..., Tensor], of_bias: int | None, of_keys: int | None
) -> None:
    """Results and gradients; what all entries share gets each entry's own gradient."""
    q, k, v, bias = inputs()
    dims = 0, of_keys, 0, of_bias
    arguments = [q, k if of_keys == 0 else k[0], v, bias if of_bias == 0 else bias[0]]
    for function in (attend(mask_mod), gradients(attend(mask_mod))):
        found = vmap(function, dims)(*arguments)
        each = [
            function(*(x if d is None else x[n] for x, d in zip(arguments, dims, strict=True)))
            for n in range(N)
        ]
        for x, y in zip(found, map(torch.stack, zip(*each, strict=True)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_entries_join_the_batch_where_nothing_tells_them_apart() -> None:
    """One call serves all, unless a program reads b or a tensor that differs."""
    q, k, v, bias = inputs()
    blocks = flash4_torch.create_block_mask(causal, None, None, S, S, "cpu", 4)
    for function, of_bias, calls in (
        (attend(causal), None, 1),
        (attend(causal, blocks), None, 1),
        (attend(of_entry), None, N),
        (attend(causal), 0, N),
    ):
        with backends_used() as used:
            vmap(function, (0, 0, 0, of_bias))(q, k, v, bias if of_bias == 0 else bias[0])
        assert sum(used.values()) == calls


def test_a_backward_of_mapped_results_is_right() -> None:
    q, k, v, bias = (x.requires_grad_() for x in inputs())
    function = attend(causal)
    found = torch.autograd.grad(vmap(function)(q, k, v, bias)[0].sin().sum(), [q, k, v, bias])
    each = torch.stack([function(*x)[0] for x in zip(q, k, v, bias, strict=True)])
    for x, y in zip(found, torch.autograd.grad(each.sin().sum(), [q, k, v, bias]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_no_entries_give_nothing() -> None:
    q, k, v, bias = (x[:0] for x in inputs())
    out, lse = vmap(attend(causal))(q, k, v, bias)
    assert out.shape == (0, 2, S, H, 6) and lse.shape == (0, 2, H, S)
