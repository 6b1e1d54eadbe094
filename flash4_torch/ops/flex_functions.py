"""A user's functions as arguments of the operator, in eager mode and where torch.compile records a call.

Dynamo hands a function to an operator of higher order only, as a graph whose arguments are the tensors and
sizes that the function captures. Ours takes its arguments in the order of torch's flex_attention, so that
Dynamo records its functions by the rules of torch's own; below Dynamo it is at once the tracing and the call
of the operator that eager mode makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

from ..flex_problem import Mods
from ..problem import CallOptions
from ..reference.scoring import working_dtype
from .after_import import after_import
from .flex import flex_attention, flex_max_scores

Function = Callable[..., Tensor]


def with_functions(
    mods: Mods,
    q: Tensor,
    score_mod: Function | None,
    mask_mod: Function | None,
    of_score: tuple[Any, ...] = (),
    of_mask: tuple[Any, ...] = (),
) -> Mods:
    """The arguments with both functions traced; a graph of Dynamo's takes `of_score` and `of_mask`."""
    # Tracing needs make_fx, which not every import of the package should load.
    from ..flex.recorded import Recorded
    from ..flex.trace import MASK, SCORE, Traced, always_true, is_identity, trace, without_autocast

    def traced(function: Function, kind: str, lanes: int, captured: tuple[Any, ...]) -> Traced:
        extra: tuple[Tensor, ...] = ()
        if isinstance(function, fx.GraphModule):
            with without_autocast(q.device):
                function = Recorded(function, kind, lanes, captured)
            extra = function.extra
        return trace(function, kind, q.device, working_dtype(q.dtype), extra)

    if score_mod is not None:
        found = traced(score_mod, SCORE, 5, of_score)
        if not is_identity(found.program):
            mods = mods._replace(score_mod=found.text, captured=found.tensors, scalars=found.scalars)
    if mask_mod is not None:
        found = traced(mask_mod, MASK, 4, of_mask)
        if not always_true(found.program):
            mods = mods._replace(
                mask_mod=found.text,
                captured=(*mods.captured, *(x.detach() for x in found.tensors)),
                scalars=(*mods.scalars, *found.scalars),
            )
    return mods


class _FlexAttention(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("flash4_flex_attention", cacheable=True)

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = super().__call__(*arguments)
        return result


recorded_flex_attention = _FlexAttention()
"""(out, lse) of q, k, v, score_mod, beside, scale, options and what both functions capture.

`beside` are the tensors of `Mods`, q_block, kv_block, max_seqlen_q, max_seqlen_k and mask_mod. `options` has,
beside a call's, "max_scores": whether these are a third result.
"""


# torch 2.11 would trace this frame where DDP runs a call that it could not record.
@torch._disable_dynamo
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Function,
    beside: tuple[Any, ...],
    scale: float,
    options: dict[str, Any],
    of_score: tuple[Any, ...] = (),
    of_mask: tuple[Any, ...] = (),
) -> tuple[Tensor, ...]:
    *tensors, q_block, kv_block, max_seqlen_q, max_seqlen_k, mask_mod = beside
    mods = Mods((), *tensors)._replace(q_block=q_block, kv_block=kv_block)
    mods = mods._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    mods = with_functions(mods, q, score_mod, mask_mod, of_score, of_mask)
    named = {name: option for name, option in options.items() if name != "max_scores"}
    return results(q, k, v, mods, CallOptions(scale=scale, **named), options["max_scores"])


def results(
    q: Tensor, k: Tensor, v: Tensor, mods: Mods, options: CallOptions, max_scores: bool
) -> tuple[Tensor, ...]:
    """(out, lse), or with the largest score of each row."""
    both = flex_attention(q, k, v, mods, options)
    return (*both, flex_max_scores(q, k, mods, options)) if max_scores else both


def _in_mode(mode: Any, *arguments: Any) -> tuple[Tensor, ...]:
    with mode:
        return _attend(*arguments)


def _register_modes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    for mode in (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode):
        if mode not in recorded_flex_attention.python_key_table:
            recorded_flex_attention.py_impl(mode)(_in_mode)


def _tell_dynamo() -> None:
    from torch._dynamo.variables import higher_order_ops

    known = higher_order_ops._hop_name_to_variable_class
    known[recorded_flex_attention.__name__] = higher_order_ops.FlexAttentionHigherOrderVariable


recorded_flex_attention.py_impl(DispatchKey.CompositeImplicitAutograd)(_attend)
after_import("torch._dynamo.variables.higher_order_ops", _tell_dynamo)
after_import("torch._functorch.aot_autograd", _register_modes)
