"""Compiling in tests: every function from scratch, and compared with itself in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config

# The cache's key holds the traced graph but not the Python of our gradients, so stale entries would be used.
config.enable_autograd_cache = False


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile(fullgraph=True), remembering nothing of what other tests compiled."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


def results_and_gradients(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """What the function returns, then a gradient of each argument that wants one, from fixed cotangents."""
    results = function(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    return [*results, *torch.autograd.grad(results, leaves, cotangents)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Bitwise equal, strides included."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0, check_stride=True)
