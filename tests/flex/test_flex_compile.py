"""flex_attention under torch.compile, checkpointing and autocast, against its eager self."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flash4_torch
from flex_mods import H


class Biased(nn.Module):
    """A layer with a learned bias, a number that may change, and a mask over documents."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, 64, dtype=torch.float64))
        self.gain = 0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block_mask: Any = None) -> Any:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * self.gain + self.table[h, (i - j).abs()]

        return flash4_torch.flex_attention(q, k, v, score_mod, block_mask, return_lse=True)


def call(S: int) -> list[Tensor]:
    return [torch.randn(2, H, S, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]


def agree(model: Biased, other: Callable[..., Any], S: int, block_mask: Any = None) -> None:
    inputs = call(S)
    expected, found = model(*inputs, block_mask), other(*inputs, block_mask)
    upstream = [torch.randn_like(x) for x in expected]
    wanted = [*inputs, model.table]
    grads = [torch.autograd.grad(results, wanted, upstream) for results in (expected, found)]
    for x, y in zip((*expected, *grads[0]), (*found, *grads[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def masked(S: int) -> Any:
    document = torch.arange(64) // 9
    return flash4_torch.create_block_mask(
        lambda b, h, i, j: document[i] == document[j], None, None, S, S, "cpu", 16
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_graphs_do_not_break(backend: str) -> None:
    """Gradients of what a function captures come through, too, and a new length may compile once more."""
    torch._dynamo.reset()
    model = Biased()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    agree(model, compiled, 20)
    agree(model, compiled, 33)
    agree(model, compiled, 33, masked(33))


def test_recomputed_activations_agree() -> None:
    model = Biased()
    agree(model, lambda *inputs: checkpoint(model, *inputs, use_reentrant=False), 20, masked(20))


def test_autocast_casts_the_inputs() -> None:
    """The function's own operations are not cast: scores stay float32."""
    q, k, v = (x.detach().float() for x in call(20))
    gain = torch.rand(3)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + torch.dot(gain, gain)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash4_torch.flex_attention(q, k, v, score_mod)
    narrow = flash4_torch.flex_attention(*(x.bfloat16() for x in (q, k, v)), score_mod)
    assert out.dtype == torch.bfloat16 and torch.equal(out, narrow)
