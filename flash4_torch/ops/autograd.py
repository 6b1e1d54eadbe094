"""Gradients of the operators.

One pair of save and backward functions per operator serves two paths. Compiled and exported graphs hold the
operator itself, whose `register_autograd` the AOTAutograd cache knows. In eager mode an `autograd.Function`
wraps the operator, because that costs half the host time. It has two forms: the classic one, and one with
`setup_context`, which torch.func needs and which binds its signature on every call (50 µs). Gradients have no
gradient: the backward of a backward operator raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import new_class
from typing import Any

import torch
from torch import Tensor

from ..errors import ForwardModeError, NoGradientError
from ..problem import CallOptions, has_float_mask
from . import decomposition, schema, weights_in_graph

Grads = tuple[Tensor | None, ...]


def save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, attn_mask, sinks, rng_state, *options = inputs
    out, lse, *low = output
    lse_low = low[0] if has_float_mask(attn_mask) else None
    ctx.save_for_backward(q, k, v, out, lse, lse_low, attn_mask, sinks, rng_state)
    ctx.options = options
    ctx.set_materialize_grads(False)


def attention_grads(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None = None) -> Grads:
    mask_grad = ctx.needs_input_grad[3]
    return *_of_output(dout, dlse, ctx.saved_tensors, ctx.options, mask_grad), *_none(7)


def _of_output(
    dout: Tensor | None, dlse: Tensor | None, saved: Sequence[Any], options: Sequence[Any], mask_grad: bool
) -> Grads:
    """Gradients of q, k, v, attn_mask and sinks from those of out and lse."""
    q, k, v, out, lse, lse_low, attn_mask, sinks, rng_state = saved
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dmask, dsinks = attention_backward(
        dout, dlse, q, k, v, out, lse, lse_low, attn_mask, sinks, rng_state, *options, mask_grad
    )
    return dq, dk, dv, dmask if mask_grad else None, None if sinks is None else dsinks


def _save_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, rng_state, *options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, sinks, rng_state)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _varlen_grads(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Grads:
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, sinks, rng_state = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    others = (cu_seqlens_q, cu_seqlens_k, sinks, rng_state)
    dq, dk, dv, dsinks = attention_varlen_backward(dout, dlse, q, k, v, out, lse, *others, *ctx.options)
    return dq, dk, dv, None, None, None if sinks is None else dsinks, *_none(9)


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, _, _, _, _, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = inputs[len(tensors) :]


def _weights_grads(ctx: Any, dweights: Tensor) -> Grads:
    dq, dk, _, *others = _of_weights(dweights, ctx.saved_tensors, ctx.options, ctx.needs_input_grad[4])
    return dq, dk, None, None, *others, *_none(7)


def _of_weights(
    dweights: Tensor,
    saved: Sequence[Any],
    options: Sequence[Any],
    mask_grad: bool,
    each_head: Tensor | None = None,
) -> Grads:
    """Gradients of q, k, v (None), attn_mask and sinks from that of the weights."""
    (q, k, _, _, _, sinks, _), (*_, softcap, _, _) = saved, options
    if weights_in_graph.serves_backward(q, k, softcap):
        return weights_in_graph.backward(dweights, *(*saved, *options, mask_grad), saved=each_head)
    dq, dk, dmask, dsinks = attention_weights_backward(dweights, *saved, *options, mask_grad)
    return dq, dk, None, dmask if mask_grad else None, None if sinks is None else dsinks


def _call_both(args: tuple[Any, ...], saves_weights: bool = False) -> tuple[Any, ...]:
    """(out, lse, weights, lse_low or None, each head's weights or None), by the operators of both."""
    dense, average_heads = args[:-1], args[-1]
    q, k, _, *scored_by, _ = dense
    *_, dropout_p = scored_by
    out, lse, low = below_autograd(schema.attention, dense)
    low = low if has_float_mask(scored_by[0]) else None
    of_weights = q, k, lse, low, *scored_by
    if saves_weights:
        each_head = below_autograd(weights_in_graph.each_head, of_weights)
        return out, lse, weights_in_graph.applied(each_head, dropout_p, average_heads), low, each_head
    weights = below_autograd(schema.attention_weights, (*of_weights, average_heads))
    return out, lse, weights, low, None if average_heads or dropout_p else weights


def _forward_of_both(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
    q, k, v, attn_mask, sinks, rng_state, *options, average_heads = args
    *_, softcap, _, _ = options
    saves_weights = weights_in_graph.saves_weights(q, k, softcap)
    out, lse, weights, low, each_head = _call_both(args, saves_weights)
    ctx.save_for_backward(q, k, v, out, lse, low, attn_mask, sinks, rng_state, each_head)
    ctx.options, ctx.average_heads = options, average_heads
    ctx.set_materialize_grads(False)
    return out, lse, weights


def _grads_of_both(ctx: Any, dout: Tensor | None, dlse: Tensor | None, dweights: Tensor | None) -> Grads:
    *saved, each_head = ctx.saved_tensors
    (q, k, v, _, lse, *scored_by), (*scores, _) = saved, ctx.options
    *_, softcap, _ = scores
    mask_grad, average_heads = ctx.needs_input_grad[3], ctx.average_heads
    of_weights: tuple[Any, ...] = (q, k, lse, *scored_by), (*scores, average_heads), mask_grad, each_head
    grads: Grads
    if dweights is None:
        grads = _of_output(dout, dlse, saved, ctx.options, mask_grad)
    elif dout is None and dlse is None:
        grads = _of_weights(dweights, *of_weights)
    elif dout is not None and weights_in_graph.serves_backward(q, k, softcap):
        output = weights_in_graph.OfOutput(dout, dlse, v)
        given = (*of_weights[0], *of_weights[1], mask_grad)
        grads = weights_in_graph.backward(dweights, *given, output=output, saved=each_head)
    else:
        parts = _of_output(dout, dlse, saved, ctx.options, mask_grad), _of_weights(dweights, *of_weights)
        grads = tuple(x if y is None else y if x is None else x + y for x, y in zip(*parts, strict=True))
    return *grads, *_none(8)


def _none(n: int) -> tuple[None, ...]:
    return (None,) * n


def _differentiable(name: str, save: Callable[..., None], grads: Callable[..., Grads]) -> Callable[..., Any]:
    """Registers the operator's autograd and returns the function that calls it by the right path."""
    op = getattr(schema, name)
    decomposed = decomposition.by_name.get(name)
    torch.library.register_autograd(f"flash4::{name}", grads, setup_context=save, lib=schema.LIBRARY)

    def forward(ctx: Any, *args: Any) -> Any:
        result = below_autograd(op, args)
        save(ctx, args, result)
        return result

    eager = function(name, forward, grads)
    transformed = function(name, op, grads, setup_context=staticmethod(save), generate_vmap_rule=True)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            if torch.autograd.forward_ad._current_level >= 0:
                # In a graph the operator would return a tangent of zeros.
                raise ForwardModeError
            return op(*args)
        if torch._C._is_tracing() and decomposed is not None and torch.onnx.is_in_onnx_export():
            return decomposed(*args)
        # The query that autograd.Function itself makes; there is no public one.
        if torch._C._are_functorch_transforms_active():
            return transformed.apply(*args)
        return eager.apply(*args) if wants_grad(args) else below_autograd(op, args)

    call.__name__ = name
    return call


def function(
    name: str, forward: Callable[..., Any], backward: Callable[..., Grads], **attributes: Any
) -> type[torch.autograd.Function]:
    """An autograd.Function named after the operator, flash4_<name>.

    The class of its nodes is made along with it; profilers, anomaly mode and `grad_fn` show its name. Nodes
    run `backward` at once: torch's own method first asks the Function which of two names has it, in a thread
    that has just woken up.
    """
    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "jvp": staticmethod(_refuse_tangents),
    }
    made = new_class(
        f"flash4_{name}", (torch.autograd.Function,), exec_body=lambda body: body.update(methods | attributes)
    )
    nodes = getattr(made, "_backward_cls", None)
    if nodes is not None:
        nodes.apply = backward
    return made


def below_autograd(op: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls the operator below its autograd kernel, which is Python and takes 12 µs to find nothing to do."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def wants_grad(args: tuple[Any, ...]) -> bool:
    """Whether a derivative is requested: reverse mode, or forward mode, which autograd.Function refuses."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def refuse_tangents(function: str, tensors: Iterable[Any]) -> None:
    """Raises NoGradientError if a tensor has a tangent, which `function` would lose: it has no derivative."""
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NoGradientError(function)


def _refuse_tangents(ctx: Any, *tangents: Tensor) -> Grads:
    raise ForwardModeError


def refusing(name: str, gradients: Callable[..., Any]) -> type[torch.autograd.Function]:
    """An autograd.Function of what computes gradients, which have none; torch.func can transform it."""
    return function(
        name,
        gradients,
        schema.refuse_double_backward,
        setup_context=staticmethod(schema.save_nothing),
        generate_vmap_rule=True,
    )


attention_backward, attention_varlen_backward, attention_weights_backward, _ = (
    _differentiable(name, schema.save_nothing, schema.refuse_double_backward)
    for name in (
        "attention_backward",
        "attention_varlen_backward",
        "attention_weights_backward",
        "attention_weights_signed",
    )
)
attention = _differentiable("attention", save_attention, attention_grads)
attention_varlen = _differentiable("attention_varlen", _save_varlen, _varlen_grads)
attention_weights = _differentiable("attention_weights", _save_weights, _weights_grads)


_both = function("attention_and_weights", _forward_of_both, _grads_of_both)


def _as_one_node(*args: Any) -> tuple[Tensor, ...]:
    """The autograd kernel of `attention_and_weights`: a graph traced through it holds torch's own operators,
    or those of both, and drops the second one where nobody uses the weights."""
    q, k, v, attn_mask, sinks, rng_state, *scored_by, average_heads = args
    options, trains = CallOptions(*scored_by), wants_grad(args)
    if weights_in_graph.serves(q, k, attn_mask, rng_state, options, trains):
        return weights_in_graph.forward(q, k, v, attn_mask, sinks, rng_state, options, average_heads)
    if not trains:
        return _call_both(args)[:3]
    results: tuple[Tensor, ...] = _both.apply(*args)
    return results


schema.LIBRARY.impl("attention_and_weights", _as_one_node, "Autograd")


def in_graph() -> bool:
    """Whether a call becomes a part of a compiled graph that is traced through autograd; not for export."""
    return (
        torch.compiler.is_dynamo_compiling()
        # `is_exporting()` is True in all graphs that torch 2.11 traces.
        and not torch.compiler._is_exporting_flag
        and torch.autograd.forward_ad._current_level < 0
    )


def attention_and_weights(*args: Any) -> tuple[Tensor, ...]:
    """(out, lse, weights), by an operator each."""
    *dense, average_heads = args
    q, k, _, *scored_by, _ = dense
    out, lse, low = attention(*dense)
    # The weights have gradients of their own, in which lse is a function of q and k.
    saved = lse.detach(), low.detach() if has_float_mask(scored_by[0]) else None
    return out, lse, attention_weights(q, k, *saved, *scored_by, average_heads)
