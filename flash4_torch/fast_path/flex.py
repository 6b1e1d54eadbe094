"""The fast path of calls with functions; the law is that of `fast_path`.

What functions read is part of a call's flags, and their captured tensors are among its tensors. Calls with a
block mask are kept with the mask's lists, as long as these live and nobody changes them; such a call also
knows the data of the tensors that mask_mod captures, which may have been evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..backends import BackwardLaunch, Order, tile_counters
from ..backends import flex as backends
from ..backends.flex import FlexBackwardLaunch, FlexLaunch, PreparesFlex, intervals, tables
from ..flex_problem import NUM_TENSORS, FlexInputs, FlexProblem, FlexSaved, Mods
from ..ops import autograd
from ..ops import flex as ops
from ..problem import CallOptions
from .calls import Door, FastCall
from .gradients import Backwards, Grads, Strides
from .recent import Memory

DOOR = Door("flex_attention", Order(heads_first=True, out_heads_first=True))

Lists = tuple[Tensor | None, ...]
"""The lists of a block mask; none without one."""
OfCaptured = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""Function that gives the programs' tensors, of those that functions read."""


class _Known(NamedTuple):
    """The calls with one block mask, and its lists when they were made."""

    lists: tables.Versions
    memory: Memory


_of_mask: WeakIdKeyDictionary = WeakIdKeyDictionary()


def memory_of(lists: Lists) -> Memory | None:
    """The calls with a block mask, kept with its lists; None if they are not kept."""
    first = lists[0]
    found: _Known | None = _of_mask.get(first)
    if found is not None and tables.are_same(found.lists, lists):
        return found.memory
    if not all(map(tables.may_be_kept, lists)):
        return None
    # Of others the operator gets views, which are new ones in each call.
    if any(x is not None and x.dim() != rank for x, rank in zip(lists, (3, 4, 3, 4), strict=True)):
        return None
    _of_mask[first] = found = _Known(tables.versions(lists), Memory())
    return found.memory


def stream_of(q: Any) -> int | None:
    """The stream on which what is made of a block mask is read; None while it is captured."""
    if not q.is_cuda:
        return 0
    index = q.get_device()
    return None if tile_counters.is_capturing(index) else tile_counters.current_stream(index)


data_of = intervals.Data.of
"""A tensor's data as it is now."""


class Served(NamedTuple):
    """A call that the slow path has served."""

    inputs: FlexInputs
    """q, k and v are views (B, S, H, D) of the caller's."""
    options: CallOptions
    has_lse: bool
    of_captured: OfCaptured
    data: tuple[tuple[int, intervals.Data], ...]
    """Places of captured tensors whose values may have been evaluated, and their data."""
    order: Order
    """The order of the caller's tensors, out included."""


class FlexCall(FastCall):
    """The calls of one signature: `run` takes q, k, v, what functions captured, and the lists."""

    __slots__ = ("data",)

    def __init__(self, launch: FlexLaunch, served: Served):
        self.launch, self.data = launch, served.data
        self.run = partial(_run, launch, served.of_captured, served.has_lse)

    def is_of(self, captured: Sequence[Tensor]) -> bool:
        """Whether tensors whose values may have been evaluated still have them."""
        return not self.data or all([data.is_still(captured[place]) for place, data in self.data])


def _run(
    launch: FlexLaunch,
    of_captured: OfCaptured,
    has_lse: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: Sequence[Tensor],
    lists: Lists,
) -> Any:
    out, lse, _ = launch(q, k, v, of_captured(captured))
    return (out, lse) if has_lse else out


class FlexAutograd(FlexCall):
    """The calls of one signature, forward and backward."""

    __slots__ = ()
    is_recorded = True

    def __init__(self, launch: FlexLaunch, served: Served):
        super().__init__(launch, served)
        self.run = partial(_run_recorded, _Step(launch, served), served.of_captured)


def _run_recorded(
    step: _Step,
    of_captured: OfCaptured,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: Sequence[Tensor],
    lists: Lists,
) -> Any:
    return _apply(step, lists, q, k, v, *of_captured(captured))


class _Step(Backwards):
    """The launches of a signature."""

    __slots__ = (
        "backwards",
        "has_blocks",
        "has_lse",
        "launch",
        "mods",
        "options",
        "order",
        "recent",
        "wanted",
    )

    def __init__(self, launch: FlexLaunch, served: Served):
        self.backwards, self.recent = {}, []
        mods, self.launch = served.inputs.mods, launch
        self.options, self.has_lse, self.order = served.options, served.has_lse, served.order
        self.has_blocks = mods.kv_num_blocks is not None
        self.mods = mods.of_tensors((), [None] * NUM_TENSORS)
        self.wanted = tuple(x.requires_grad for x in mods.captured[: ops.tensors_of_score(mods)])

    def lookup(self, dout: Any, more: Grads) -> tuple[Strides | None, BackwardLaunch | None]:
        if self.has_blocks and stream_of(dout) is None:
            return None, None
        return super().lookup(dout, more)

    def slow(
        self,
        dout: Tensor | None,
        more: Grads,
        out: Tensor,
        lse: Tensor,
        low: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: Sequence[Tensor],
        lists: Lists,
    ) -> Any:
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = more[0] if more else None
        low = torch.zeros_like(lse) if low is None else low
        q, k, v, out, dout = map(self._in_order, (q, k, v, out, dout))
        mods = self._mods(captured, lists)
        arguments = dout, dlse, q, k, v, out, lse, low, *mods, *self.options, list(self.wanted)
        dq, dk, dv, _, dcaptured = ops.flex_attention_backward(*arguments)
        return *map(self._in_order, (dq, dk, dv)), dcaptured

    def prepared(
        self,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        low: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: Sequence[Tensor],
        lists: Lists,
    ) -> FlexBackwardLaunch | None:
        q, k, v, out, dout = map(self._in_order, (q, k, v, out, dout))
        given = FlexInputs(q, k, v, self._mods(captured, lists))
        inputs, problem = _described(given, self.options)
        problem = ops.backward_of(problem, inputs.mods, self.wanted, False)
        backend = backends.choose(problem)
        if not isinstance(backend, PreparesFlex):
            return None
        saved = FlexSaved(dout, None, out, lse, torch.zeros_like(lse) if low is None else low)
        launch = backend.prepare_backward(saved, inputs, problem, self.order)
        return None if launch is None else lambda *tensors: launch(*tensors[:-1])

    def _in_order(self, x: Tensor) -> Tensor:
        """The caller's (B, H, S, D) or (B, S, H, D) as the latter, and back."""
        return x.transpose(1, 2) if self.order.heads_first else x

    def _mods(self, captured: Sequence[Tensor], lists: Lists) -> Mods:
        return self.mods.of_tensors(list(captured), (*lists, *[None] * (NUM_TENSORS - len(lists))))


def _described(inputs: FlexInputs, options: CallOptions) -> tuple[FlexInputs, FlexProblem]:
    inputs, options = ops.with_softcap(inputs, options)
    return inputs, ops.describe(inputs, options)


def prepared(served: Served, wants_grad: bool) -> FlexCall | None:
    """What serves calls like one that the slow path has served; None if that does."""
    inputs, problem = _described(served.inputs, served.options)
    backend = backends.choose(problem)
    if not isinstance(backend, PreparesFlex):
        return None
    mods = served.inputs.mods
    if wants_grad and any(x.requires_grad for x in mods.captured[ops.tensors_of_score(mods) :]):
        # mask_mod's tensors have no gradient.
        return None
    launch = backend.prepare(inputs, problem, served.order)
    if launch is None:
        return None
    return (FlexAutograd if wants_grad else FlexCall)(launch, served)


def _forward(ctx: Any, step: _Step, lists: Lists, q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> Any:
    out, lse, low = step.launch(q, k, v, captured)
    # Autograd finds out whether any of them is changed before the backward.
    ctx.save_for_backward(out, lse, low, q, k, v, *lists, *captured)
    ctx.step, ctx.lists = step, len(lists)
    if not step.has_lse:
        return out
    ctx.set_materialize_grads(False)
    return out, lse


def _backward(ctx: Any, dout: Tensor | None, *more: Tensor | None) -> Grads:
    out, lse, low, q, k, v, *others = ctx.saved_tensors
    step: _Step = ctx.step
    lists, captured = tuple(others[: ctx.lists]), tuple(others[ctx.lists :])
    saved = out, lse, low, q, k, v, captured, lists
    dq, dk, dv, dcaptured = step.gradients(dout, more, saved)
    found = [x if wants else None for x, wants in zip(dcaptured, step.wanted, strict=False)]
    found += [None] * (len(captured) - len(found))
    return None, None, dq, dk, dv, *found


_function: Any = autograd.function("flex_attention", _forward, _backward)
# As in `gradients`.
_apply: Callable[..., Any] = super(torch.autograd.Function, _function).apply


def clear() -> None:
    """Forgets the calls with block masks."""
    _of_mask.clear()
