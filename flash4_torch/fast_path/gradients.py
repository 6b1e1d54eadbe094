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
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_dynamo_compiling

from ..backends import ALIGNMENT, BackwardLaunch, Launch
from ..ops import autograd
from ..ops.impl import backward_of
from ..problem import CallOptions, Inputs, Problem, Saved
from .calls import Door, FastCall
from .conditions import must_take_slow_path, prepares

_MOST = 64
"""Combinations of strides to remember per signature of the forward."""

Strides = tuple[int, ...]
"""Those of dout; -1 follows under autocast."""
Grads = tuple[Tensor | None, ...]


class FastAutograd(FastCall):
    """The calls of one signature, forward and backward."""

    __slots__ = ("average_heads", "backwards", "options", "problem")
    is_recorded = True

    def __init__(
        self,
        door: Door,
        launch: Launch,
        average_heads: bool | None,
        options: CallOptions,
        inputs: Inputs,
        problem: Problem,
    ):
        super().__init__(door, launch, options, inputs)
        self.average_heads = average_heads
        self.options = options
        self.problem = problem
        self.backwards: dict[Strides, BackwardLaunch | None] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        apply = _dense if self.average_heads is None else _with_weights
        results: tuple[Tensor, ...] = (_varlen if self.door.varlen else apply)(q, k, v, *others, self)
        return results

    def lookup(self, dout: Tensor | None, more: Grads) -> Strides | None:
        """The key of a prepared backward; None if the backward must take the slow path.

        Saved tensors are laid out as the forward's signature says.
        """
        if (
            is_dynamo_compiling()
            or type(dout) is not Tensor
            or any(x is not None for x in more)
            or is_grad_enabled()  # gradients of gradients are requested
            or must_take_slow_path()
        ):
            return None
        try:
            dout_at = dout.data_ptr()
        except RuntimeError:
            return None  # a batch of gradients (vmap) has no pointer
        # As in `fast_path.lookup`, which has already checked the other tensors.
        if dout_at % ALIGNMENT or not dout_at or dout.is_neg():
            return None
        return (*dout.stride(), -1) if _is_any_autocast_enabled() else dout.stride()

    def gradients(self, dout: Tensor | None, more: Grads, saved: Saved, inputs: Inputs) -> Grads:
        """Gradients of q, k, v and the sinks, from those of out and `more`: of lse and, if any, the weights.

        `saved` has the forward's results.
        """
        strides = self.lookup(dout, more)
        if strides is None or dout is None:
            return _slow(self, dout, more, saved, inputs)
        saved = saved._replace(dout=dout)
        launch = self.backwards.get(strides)
        if launch is not None:
            found = launch(saved, inputs)
            return found.dq, found.dk, found.dv, found.dsinks
        grads = _slow(self, dout, more, saved, inputs)
        self.record(strides, saved, inputs)
        return grads

    def record(self, strides: Strides, saved: Saved, inputs: Inputs) -> None:
        """Prepares backwards with these strides, after the slow path has served one."""
        if strides in self.backwards or len(self.backwards) >= _MOST:
            return
        problem = backward_of(self.problem, None)
        backend = prepares(problem)
        self.backwards[strides] = (
            None if backend is None else backend.prepare_backward(saved, inputs, problem)
        )


def _forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
    """The forward of `ops.autograd`, except that the prepared launch runs."""
    *tensors, call = args
    rng_state = call.rng_state()
    out, lse, low, weights = call.launch(call.inputs(rng_state, *tensors))
    # The caller's tensors, not their views: autograd finds out whether they are changed before the backward.
    ctx.save_for_backward(*tensors, out, lse, low, rng_state)
    ctx.call = call
    ctx.set_materialize_grads(False)
    if call.door.out_heads_first:
        out = out.transpose(1, 2)
    return (out, lse) if weights is None else (out, lse, weights)


def _backward(ctx: Any, dout: Tensor | None, *more: Tensor | None) -> Grads:
    call: FastAutograd = ctx.call
    *tensors, out, lse, low, rng_state = ctx.saved_tensors
    if dout is not None and call.door.out_heads_first:
        dout = dout.transpose(1, 2)
    inputs = call.inputs(rng_state, *tensors)
    dq, dk, dv, dsinks = call.gradients(dout, more, Saved(out, None, out, lse, False, low), inputs)
    if call.door.heads_first:
        dq, dk, dv = (None if x is None else x.transpose(1, 2) for x in (dq, dk, dv))
    return dq, dk, dv, *(None,) * (2 if call.door.varlen else 1), dsinks, None


def _slow(call: FastAutograd, dout: Tensor | None, more: Grads, saved: Saved, inputs: Inputs) -> Grads:
    """Gradients of q, k, v and the sinks by the operators."""
    q, k, v, mask, sinks, rng_state, ends_q, ends_k, _ = inputs
    dlse, *of_weights = more
    dweights = of_weights[0] if of_weights else None
    grads: list[Tensor | None] = [None] * 4
    scored_by = sinks, rng_state
    if dout is not None or dlse is not None or dweights is None:
        given = torch.zeros_like(saved.out) if dout is None else dout
        before = given, dlse, q, k, v, saved.out, saved.lse
        if call.door.varlen:
            sequences = ends_q, ends_k, *scored_by, call.problem.extent.Sq, call.problem.extent.Sk
            grads = [*autograd.attention_varlen_backward(*before, *sequences, *call.options)]
        else:
            masked_by = saved.lse_low, mask, *scored_by
            found = autograd.attention_backward(*before, *masked_by, *call.options, False)
            grads = [*found[:3], found[4]]
    if dweights is not None:
        *scores, _ = call.options
        dq, dk, _, dsinks = autograd.attention_weights_backward(
            dweights,
            q,
            k,
            saved.lse,
            saved.lse_low,
            mask,
            *scored_by,
            *scores,
            bool(call.average_heads),
            False,
        )
        grads = [_sum(a, b) for a, b in zip(grads, (dq, dk, None, dsinks), strict=True)]
    return *grads[:3], None if sinks is None else grads[3]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _apply_of(name: str) -> Callable[..., Any]:
    function: Any = autograd.function(name, _forward, _backward)
    # Skips the checks of `Function.apply`: for a signature to bind, and for transforms, which
    # `fast_path.lookup` has ruled out.
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return apply


_dense, _with_weights, _varlen = map(_apply_of, ("attention", "attention_and_weights", "attention_varlen"))
