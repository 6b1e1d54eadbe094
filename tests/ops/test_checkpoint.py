"""Activation checkpointing: saved results are not recomputed, and dropout drops the same weights again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash4_torch
from compiling import compiled
from flash4_torch import testing

B, S, H, D = 2, 5, 2, 8


def block(w: Tensor, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    return flash4_torch.attention((q @ w).sin(), k, v, causal=True, dropout_p=dropout_p).cos()


def arguments() -> tuple[Tensor, ...]:
    return torch.randn(D, D, requires_grad=True), *(
        torch.randn(B, S, H, D, requires_grad=True) for _ in "qkv"
    )


def seeded_gradients(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients, with torch's generator moved between forward and backward, as a training step would."""
    torch.manual_seed(3)
    out = function(*tensors)
    torch.rand(7)
    out.sin().sum().backward()
    gradients = tuple(x.grad for x in tensors)
    for x in tensors:
        x.grad = None
    return gradients


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_are_those_without(dropout_p: float, use_reentrant: bool) -> None:
    plain = partial(block, dropout_p=dropout_p)
    tensors = arguments()
    actual = seeded_gradients(partial(checkpoint, plain, use_reentrant=use_reentrant), tensors)
    torch.testing.assert_close(actual, seeded_gradients(plain, tensors), rtol=0, atol=0)


def selective(policy: CheckpointPolicy, dropout_p: float) -> Callable[..., Tensor]:
    """`block` with the policy for its attention; everything else is recomputed."""

    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op == torch.ops.flash4.attention.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, choose)
    return partial(checkpoint, partial(block, dropout_p=dropout_p), use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize(
    ("policy", "forwards"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.PREFER_RECOMPUTE, 2)]
)
def test_selective(policy: CheckpointPolicy, forwards: int, dropout_p: float, compile: bool) -> None:
    function = selective(policy, dropout_p)
    function = compiled(function, backend="aot_eager") if compile else function
    tensors = arguments()
    with testing.backends_used() as used:
        actual = seeded_gradients(function, tensors)
    counts = {operator: n for (operator, _), n in used.items()}
    assert counts == {"attention": forwards, "attention_backward": 1}
    expected = seeded_gradients(partial(block, dropout_p=dropout_p), tensors)
    torch.testing.assert_close(actual, expected)
