"""The fast path through autograd: `flash4_torch.fast_path`, for calls whose tensors require gradients.

The same law holds. The forward is prepared like one without gradients, and saves what the slow path saves.
The backward is prepared once the slow path has served one with the same strides, and launched if no observer
is active; otherwise the slow path's backward runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled
from torch._C._dynamo.guards import TensorGuards
from torch.compiler import is_dynamo_compiling

from ..backends import ALIGNMENT, BackwardLaunch, Launch
from ..backends.base import Views
from ..backends.tiled import backward_of_both
from ..backends.views import no_view
from ..ops import autograd
from ..ops.autocast import no_autocast
from ..ops.impl import backward_of
from ..problem import CallOptions, Inputs, Problem, Saved
from . import recent
from .calls import Door, FastCall, Returned
from .conditions import (
    below_autocast,
    guards_would_miss,
    guards_would_see,
    must_take_slow_path,
    prepares,
)

_MOST = 64
"""Combinations of strides to remember per signature of the forward."""

Strides = tuple[int, ...]
"""Those of dout; -1 follows under autocast."""
Grads = tuple[Tensor | None, ...]
Tensors = Sequence[Any]
"""Those of a launch: the fields of `Inputs` one by one, of which the last may be missing."""


class Backwards(ABC):
    """The prepared backwards of one signature, by the strides of dout."""

    # Those of two bases cannot both be laid out.
    __slots__ = ()
    backwards: dict[Strides, BackwardLaunch | None]
    recent: list[tuple[TensorGuards, BackwardLaunch]]

    def lookup(self, dout: Any, more: Grads) -> tuple[Strides | None, BackwardLaunch | None]:
        """The key of a prepared backward, and the backward, if known.

        There is no key if it must take the slow path, or if it needs none to be found. Saved tensors are laid
        out as the forward's signature says.
        """
        if (
            is_dynamo_compiling()
            or type(dout) is not Tensor
            or (more and any(x is not None for x in more))
            or is_grad_enabled()  # gradients of gradients are requested
            or guards_would_miss()
        ):
            return None, None
        for guards, launch in self.recent:
            if guards.check(dout):
                dout_at = dout.data_ptr()
                if dout_at and not dout_at % ALIGNMENT:
                    return None, launch
        if guards_would_see():
            return None, None
        return self._by_strides(dout)

    def _by_strides(self, dout: Tensor) -> tuple[Strides | None, BackwardLaunch | None]:
        """What `lookup` returns where no observer is active."""
        try:
            dout_at = dout.data_ptr()
        except RuntimeError:
            return None, None  # a batch of gradients (vmap) has no pointer
        # As in `fast_path.lookup`, which has already checked the other tensors.
        if dout_at % ALIGNMENT or not dout_at or dout.is_neg():
            return None, None
        strides = dout.stride()
        if _is_any_autocast_enabled():
            strides = *strides, -1
            return strides, self.backwards.get(strides)
        launch = self.backwards.get(strides)
        if launch is not None:
            recent.guard(self.recent, (dout,), launch)
        return strides, launch

    def gradients(self, dout: Tensor | None, more: Grads, saved: Tensors) -> Any:
        """What a launch gives, from the gradients of out and `more`: of lse and, if any, the weights.

        saved: what a launch takes besides dout, which begins with the forward's out, lse and low.
        """
        strides, launch = self.lookup(dout, more)
        if launch is not None:
            return launch(dout, *saved)
        grads = self.slow(dout, more, *saved)
        if strides is not None and dout is not None and strides not in self.backwards:
            self._record(strides, dout, saved)
        return grads

    def _record(self, strides: Strides, dout: Tensor, saved: Tensors) -> None:
        """Prepares backwards with these strides, after the slow path has served one."""
        if len(self.backwards) < _MOST:
            self.backwards[strides] = self.prepared(dout, *saved)

    @abstractmethod
    def slow(self, dout: Tensor | None, more: Grads, *saved: Any) -> Any:
        """The gradients by the slow path."""

    @abstractmethod
    def prepared(self, dout: Tensor, *saved: Any) -> BackwardLaunch | None:
        """The launch of such a backward, None if none can be prepared."""


class FastAutograd(FastCall, Backwards):
    """The calls of one signature, forward and backward."""

    __slots__ = ("backwards", "door", "mask_grad", "options", "problem", "recent", "returned", "seen")
    is_recorded = True

    def __init__(
        self,
        door: Door,
        launch: Launch,
        options: CallOptions,
        inputs: Inputs,
        returned: Returned,
        problem: Problem,
        mask_grad: bool = False,
    ):
        super().__init__(door, launch, options, inputs, returned)
        self.backwards, self.recent = {}, []
        self.door, self.options, self.returned, self.problem = door, options, returned, problem
        self.mask_grad = mask_grad
        self.seen = Views.of(inputs, door.order)
        apply = _dense if returned.average_heads is None else _with_weights
        self.run = partial(_varlen if door.varlen else apply, self)

    def lookup(self, dout: Any, more: Grads) -> tuple[Strides | None, BackwardLaunch | None]:
        """Backwards with a gradient of the mask are not prepared."""
        return (None, None) if self.mask_grad else super().lookup(dout, more)

    def inputs(self, tensors: Tensors) -> Inputs:
        """The tensors of a call as the operators take them."""
        return self.seen(*tensors)

    def slow(
        self, dout: Tensor | None, more: Grads, out: Tensor, lse: Tensor, low: Tensor | None, *tensors: Any
    ) -> Grads:
        return _slow(self, dout, more, out, lse, low, tensors)

    def prepared(
        self, dout: Tensor, out: Tensor, lse: Tensor, low: Tensor | None, *tensors: Any
    ) -> BackwardLaunch | None:
        problem, order = backward_of(self.problem, None), self.door.order
        backend = prepares(problem)
        if backend is None:
            return None
        if order.out_heads_first:
            dout, out = dout.transpose(1, 2), out.transpose(1, 2)
        saved = Saved(dout, None, out, lse, False, low)
        launch = backend.prepare_backward(saved, self.inputs(tensors), problem, order)
        return None if launch is None else below_autocast(launch)


def _forward(ctx: Any, call: FastAutograd, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
    """The forward of `ops.autograd`, except that the prepared launch runs."""
    rng_state = call.draw()
    if call.door.varlen:
        ends_q, ends_k, sinks = others
        tensors = q, k, v, None, sinks, rng_state, ends_q, ends_k
    else:
        tensors = q, k, v, *others, rng_state
    out, lse, low, weights = call.launch(*tensors)
    out = no_view(out)
    # The caller's tensors, not their views: autograd finds out whether they are changed before the backward.
    ctx.save_for_backward(out, lse, low, *tensors)
    ctx.call = call
    if not call.returned.lse:
        return out
    ctx.set_materialize_grads(False)
    lse = lse.contiguous()
    return (out, lse) if weights is None else (out, lse, weights)


def _backward(ctx: Any, dout: Tensor | None, *more: Tensor | None) -> Grads:
    call: FastAutograd = ctx.call
    dq, dk, dv, dsinks, *of_mask = call.gradients(dout, more, ctx.saved_tensors)
    if call.door.varlen:
        return None, dq, dk, dv, None, None, dsinks
    dmask = of_mask[0].view_as(ctx.saved_tensors[6]) if call.mask_grad else None
    return None, dq, dk, dv, dmask, dsinks


def _slow(
    call: FastAutograd,
    dout: Tensor | None,
    more: Grads,
    out: Tensor,
    lse: Tensor,
    low: Tensor | None,
    tensors: Tensors,
) -> Grads:
    """Gradients of q, k, v, the sinks and the mask by the operators, or all at once."""
    inputs = call.inputs(tensors)
    q, k, v, mask, sinks, rng_state, ends_q, ends_k, _ = inputs
    heads_first, out_heads_first = call.door.order
    if out_heads_first:
        out, dout = out.transpose(1, 2), None if dout is None else dout.transpose(1, 2)
    dlse, *of_weights = more or (None,)
    dweights = of_weights[0] if of_weights else None
    if dout is not None and dweights is not None and not is_grad_enabled() and not must_take_slow_path():
        saved = Saved(dout, dlse, out, lse, call.mask_grad, low)
        with no_autocast():
            both = backward_of_both(saved, dweights, inputs, call.problem)
        if both is not None:
            return *[x.transpose(1, 2) if heads_first else x for x in both[:3]], None, both.dmask
    grads: list[Tensor | None] = [None] * 5
    scored_by = sinks, rng_state
    if dout is not None or dlse is not None or dweights is None:
        given = torch.zeros_like(out) if dout is None else dout
        before = given, dlse, q, k, v, out, lse
        if call.door.varlen:
            sequences = ends_q, ends_k, *scored_by, call.problem.extent.Sq, call.problem.extent.Sk
            grads = [*autograd.attention_varlen_backward(*before, *sequences, *call.options)]
        else:
            masked_by = low, mask, *scored_by
            found = autograd.attention_backward(*before, *masked_by, *call.options, call.mask_grad)
            grads = [*found[:3], found[4], found[3]]
    if dweights is not None:
        *scores, _ = call.options
        dq, dk, dmask, dsinks = autograd.attention_weights_backward(
            dweights,
            q,
            k,
            lse,
            low,
            mask,
            *scored_by,
            *scores,
            bool(call.returned.average_heads),
            call.mask_grad,
        )
        grads = [_sum(a, b) for a, b in zip(grads, (dq, dk, None, dsinks, dmask), strict=True)]
    dqkv = [None if x is None else x.transpose(1, 2) for x in grads[:3]] if heads_first else grads[:3]
    return *dqkv, None if sinks is None else grads[3], grads[4] if call.mask_grad else None


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _apply_of(name: str) -> Callable[..., Any]:
    function: Any = autograd.function(name, _forward, _backward)
    # Skips the checks of `Function.apply`: for a signature to bind, and for transforms, which
    # `fast_path.lookup` has ruled out.
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return apply


_dense, _with_weights, _varlen = map(_apply_of, ("attention", "attention_and_weights", "attention_varlen"))
