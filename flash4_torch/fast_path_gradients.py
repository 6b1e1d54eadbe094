"""The fast path through autograd: `flash4_torch.fast_path`, for calls whose tensors require gradients.

The same law holds. The forward is prepared like one without gradients, and saves what the slow path saves.
The backward is prepared once the slow path has served one with the same strides, and launched if no observer
is active; otherwise the slow path's backward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from . import backends
from .backends import ALIGNMENT, BackwardLaunch, Launch, Prepares
from .ops import autograd, draw_rng_state
from .ops.impl import backward_of, dense_extent, describe
from .problem import CallOptions, Inputs, Saved

_MOST = 64
"""Combinations of strides to remember per signature of the forward."""

Strides = tuple[tuple[int, ...], ...]


class FastAutograd:
    """The calls of one signature, forward and backward."""

    __slots__ = ("backwards", "forward", "must_take_slow_path", "options")

    def __init__(self, forward: Launch, options: CallOptions, must_take_slow_path: Callable[[], bool]):
        self.forward = forward
        self.options = options
        self.must_take_slow_path = must_take_slow_path
        self.backwards: dict[Strides, BackwardLaunch | None] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rng_state = draw_rng_state(q.device) if self.options.dropout_p > 0.0 else None
        results: tuple[Tensor, Tensor] = _apply(q, k, v, rng_state, self)
        return results

    def lookup(self, dout: Tensor | None, dlse: Tensor | None, saved: tuple[Tensor, ...]) -> Strides | None:
        """The key of a prepared backward; None if the backward must take the slow path."""
        if (
            is_dynamo_compiling()
            or dlse is not None
            or type(dout) is not Tensor
            or is_grad_enabled()  # gradients of gradients are requested
            or self.must_take_slow_path()
        ):
            return None
        q, k, v, out, lse, *_ = saved
        try:
            dout_at = dout.data_ptr()
            pointers = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout_at
        except RuntimeError:
            return None  # a batch of gradients (vmap) has no pointer
        # As in `fast_path.lookup`, which has already checked the saved tensors.
        if pointers % ALIGNMENT or not dout_at or dout.is_neg():
            return None
        return dout.stride(), q.stride(), k.stride(), v.stride(), out.stride(), lse.stride()

    def record(self, strides: Strides, dout: Tensor, saved: tuple[Tensor, ...]) -> None:
        """Prepares backwards with these strides, after the slow path has served one."""
        if strides in self.backwards or len(self.backwards) >= _MOST:
            return
        q, k, v, out, lse, _, _, _, rng_state = saved
        forward = describe(q, v.shape[-1], dense_extent(q, k), None, None, self.options)
        problem = backward_of(forward, None)
        backend, launch = backends.choose(problem), None
        if isinstance(backend, Prepares):
            inputs = Inputs(q, k, v, rng_state=rng_state)
            launch = backend.prepare_backward(Saved(dout, None, out, lse), inputs, problem)
        self.backwards[strides] = launch


def _forward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, rng_state: Tensor | None, fast_autograd: FastAutograd
) -> tuple[Tensor, Tensor]:
    """The forward of `ops.autograd`, except that the prepared launch runs."""
    out, lse = fast_autograd.forward(q, k, v, rng_state)
    autograd.save_attention(ctx, (q, k, v, None, None, rng_state, *fast_autograd.options), (out, lse))
    ctx.fast_autograd = fast_autograd
    return out, lse


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    fast_autograd: FastAutograd = ctx.fast_autograd
    saved = ctx.saved_tensors
    strides = fast_autograd.lookup(dout, dlse, saved)
    launch = None if strides is None else fast_autograd.backwards.get(strides)
    if launch is not None and dout is not None:
        q, k, v, out, lse, _, _, _, rng_state = saved
        return *launch(dout, q, k, v, out, lse, rng_state), None, None
    grads = autograd.attention_grads(ctx, dout, dlse)
    if strides is not None and dout is not None:
        fast_autograd.record(strides, dout, saved)
    return *grads[:3], None, None


_function: Any = autograd.function("attention", _forward, _backward)
# Skips the checks of `Function.apply`: for a signature to bind, and for transforms, which `fast_path.lookup`
# has ruled out.
_apply = super(torch.autograd.Function, _function).apply
