"""The module's own fast path: calls like an earlier one, from the inputs to the output projection.

The law is that of `flash4_torch.fast_path`, on which this rests: what was decided for a call holds for all
calls with the same sizes, strides, dtypes and flags, and nobody must be able to tell that it is not decided
again. With gradients, the projections and the attention are one node of autograd.

Autocast casts what calls into torch are given, and keeps parameters that it has cast. So it stays on around
projections without gradients; elsewhere it is off, and everything is cast beforehand.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, float32, float64, is_grad_enabled, nn
from torch._C import _is_any_autocast_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.compiler import is_dynamo_compiling

from ..fast_path import FastAutograd, FastCall, recent
from ..fast_path.conditions import guards_would_miss, must_take_slow_path
from ..ops import autograd
from ..ops.autocast import autocast_dtype, no_autocast
from ..problem import CallOptions, allows_tf32
from . import evaluated, fused, materialized, padding
from .contract import Call
from .materialized import Materialized
from .projection import Parameters, Projection, distinct

Signature = tuple[Any, ...]

_MOST = 1024
"""Signatures to remember; when the memory is full, it is cleared."""
_CHUNK, _SHORTEST, _MANY = 128, 16, 1 << 22
"""Rows to sum at once if there are `_MANY` numbers or more, and the fewest for which that pays."""
_WANTS_GRAD = 3
"""Index of `wants_grad` in a signature."""
_TENSORS = (Tensor, nn.Parameter)
_AUTOCAST = "autocast"
_CAST = (torch.float32, torch.bfloat16, torch.float16, torch.bool)
"""The dtypes that autocast casts, and that of masks."""


class Prepared(NamedTuple):
    """A call's attention, and what the module does around it."""

    attention: FastCall
    projection: Projection
    reads_attn_mask: bool
    wants_grad: bool
    is_fused: bool
    """Whether torch's own call serves the module, and the attention only rows that see nothing."""


Known = Prepared | Materialized
_calls: dict[Signature, Known] = {}
_recent: recent.Known[Known] = {}
"""The same, by torch's own check of all tensors at once."""


def recall(module: nn.MultiheadAttention, call: Call, parameters: Parameters) -> Known | None:
    """What serves a call whose like was looked up before; None if `lookup` must say.

    Torch's check of all tensors stands for whatever the slow path asks of tensors and of the state of torch,
    but for what is asked here.
    """
    if guards_would_miss() or not _adds_nothing(module):
        return None
    try:
        place, present = _place(module, call, parameters)
        calls = _recent.get(place, ())
        if calls and recent.any_nested(present):
            return None
        for guards, known in calls:
            if guards.check(*present):
                # What the check does not see must be as it was.
                if not all([x.data_ptr() for x in present]):
                    return None
                if known.wants_grad and _top_saved_tensors_default_hooks(True) is not None:
                    return None
                return known
    except (AttributeError, TypeError):
        pass  # no tensor, or a flag that is no number: the slow path reports it
    return None


def _adds_nothing(module: nn.MultiheadAttention) -> bool:
    return module.bias_k is None and not module.add_zero_attn


def lookup(
    module: nn.MultiheadAttention, call: Call, parameters: Parameters
) -> tuple[Signature | None, Known | None]:
    """The call's signature (None if it must take the slow path), and the prepared call, if there is one."""
    query, key, value = inputs = call[:3]
    if (
        is_dynamo_compiling()
        or not all([type(x) is Tensor for x in inputs])
        or not query.dim() == key.dim() == value.dim() in (2, 3)
        or must_take_slow_path()
        or not _is_usual(module, call, parameters)
    ):
        return None, None
    dropout = module.dropout if module.training else 0.0
    flags: tuple[Any, ...] = (call.need_weights, call.average_attn_weights, call.is_causal, dropout)
    flags += query is key, key is value, query is value
    if query.dtype is float32 and allows_tf32(float32):
        flags += ("tf32",)
    if _is_any_autocast_enabled():
        flags += (_AUTOCAST, autocast_dtype(query.device.type))
    given = *inputs, call.key_padding_mask, call.attn_mask, *parameters.in_order()
    signature = _signature(module, flags, given)
    if signature is None or not (_AUTOCAST not in flags or _may_be_cast(given, parameters, signature)):
        return None, None
    known = _calls.get(signature)
    if known is not None:
        recent.remember(_recent, *_place(module, call, parameters), known)
    return signature, known


def _place(
    module: nn.MultiheadAttention, call: Call, parameters: Parameters
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Everything but tensors that a call depends on, and the tensors that there are."""
    query, key, value, padding_mask, need_weights, mask, average, is_causal = call
    weights, bias, out_weight, out_bias = parameters
    present = *distinct(call), *weights, bias, out_weight, out_bias
    if padding_mask is not None or mask is not None or bias is None or out_bias is None:
        present = tuple([x for x in (padding_mask, mask, *present) if x is not None])
    dropout = module.dropout if module.training else 0.0
    cast = autocast_dtype(query.device.type) if _is_any_autocast_enabled() else None
    place = (
        is_grad_enabled(), module.num_heads, module.batch_first, query is key, key is value, query is value,
        need_weights, type(need_weights), average, type(average), is_causal, type(is_causal),
        dropout, type(dropout), query.dtype is float32 and allows_tf32(float32), cast,
        padding_mask is None, mask is None, bias is None, out_bias is None, len(weights),
    )  # fmt: skip
    return place, present


def _signature(
    module: nn.MultiheadAttention, flags: tuple[Any, ...], given: tuple[Any, ...]
) -> Signature | None:
    """What is compared where torch's own check knows no such call; None if it must take the slow path."""
    may_need_grad, wants_grad = is_grad_enabled(), False
    tensors: tuple[Any, ...] = ()
    for x in given:
        if x is None:
            tensors += (None,)
            continue
        if type(x) not in _TENSORS or not x.data_ptr() or x.is_neg():
            return None
        needs_grad = may_need_grad and x.requires_grad
        wants_grad = wants_grad or needs_grad
        tensors += ((x.shape, x.stride(), x.dtype, x.get_device(), needs_grad),)
    if wants_grad and _top_saved_tensors_default_hooks(True) is not None:
        return None
    return tensors, flags, tuple(map(type, flags)), wants_grad, module.num_heads, module.batch_first


def _is_usual(module: nn.MultiheadAttention, call: Call, parameters: Parameters) -> bool:
    """Whether the module does nothing to its projections, and the call causes no warning."""
    weights, bias = parameters.weights, parameters.bias
    padding_mask, mask = call.key_padding_mask, call.attn_mask
    return (
        all([x is not None and (bias is None or bias.dtype == x.dtype) for x in weights])
        and _adds_nothing(module)
        and (padding_mask is None or mask is None or padding_mask.dtype == mask.dtype)
    )


def _may_be_cast(given: tuple[Any, ...], parameters: Parameters, signature: Signature) -> bool:
    """Whether autocast gives all tensors its dtype, and gradients can refuse to have gradients: what was cast
    is no part of a graph, but weights are."""
    has_graph = not signature[_WANTS_GRAD] or all([x.requires_grad for x in parameters.weights])
    return has_graph and all([x is None or x.dtype in _CAST for x in given])


def record(
    signature: Signature,
    attention: FastCall | None,
    module: nn.MultiheadAttention,
    call: Call,
    reads_attn_mask: bool,
) -> Prepared | None:
    """Remembers a call that the slow path has served, or torch's own call will, and its attention if that is
    prepared."""
    if attention is None:
        return None
    wants_grad: bool = signature[_WANTS_GRAD]
    if wants_grad and (not isinstance(attention, FastAutograd) or attention.mask_grad):
        return None  # only the output projection has gradients, or a mask has one
    is_fused = not wants_grad and fused.serves(module, call)
    found = Prepared(attention, Projection.of(module, call), reads_attn_mask, wants_grad, is_fused)
    _keep(signature, found)
    return found


def record_materialized(
    signature: Signature, module: nn.MultiheadAttention, call: Call, options: CallOptions
) -> Materialized | None:
    """Remembers a call, not served yet, whose weights are best held at once; None for others."""
    wants_grad = signature[_WANTS_GRAD]
    if not wants_grad and fused.serves(module, call):
        return None
    found = materialized.of(module, call, options, wants_grad)
    if found is not None:
        _keep(signature, found)
    return found


def _keep(signature: Signature, found: Known) -> None:
    if len(_calls) >= _MOST:
        clear()
    _calls[signature] = found


def clear() -> None:
    """Forgets all signatures."""
    _calls.clear()
    _recent.clear()


def run(prepared: Known, call: Call, parameters: Parameters) -> tuple[Tensor, Tensor | None]:
    """The module's output and the weights, or None."""
    if isinstance(prepared, Materialized):
        serves = materialized.run if prepared.wants_grad else evaluated.run
        return serves(prepared, call, parameters)
    projection = prepared.projection
    if prepared.is_fused:
        both = fused.run(call, parameters, projection.num_heads)
        if both is not None:
            return both
    mask = call.attn_mask if prepared.reads_attn_mask else None
    if mask is not None or call.key_padding_mask is not None:
        mask = padding.merge(call.key_padding_mask, mask, projection.num_heads, 0)
    inputs = projection.inputs(call)
    if prepared.wants_grad:
        found: tuple[Tensor, ...] = _apply(prepared, mask, *inputs, *parameters.in_order())
        weights = found[1] if len(found) > 1 else None
        out = found[0]
    else:
        attention = prepared.attention
        products = projection.products(inputs, parameters.weights, parameters.bias)
        q, k, v = projection.heads_past_dispatcher(products)
        out, _, _, weights = attention.launch(q, k, v, mask, None, attention.draw())
        out = F.linear(projection.rows(out), parameters.out_weight, parameters.out_bias)
    if weights is not None and not projection.is_batched:
        weights = weights.squeeze(0)
    return out, weights


def _forward(ctx: Any, prepared: Prepared, mask: Tensor | None, *given: Tensor | None) -> tuple[Tensor, ...]:
    projection, attention = prepared.projection, prepared.attention
    with no_autocast():
        tensors = projection.casts(*given)
        inputs, weights, (bias, out_weight, out_bias) = projection.apart(tensors)
        q, k, v = projection.heads_past_dispatcher(projection.products(inputs, weights, bias))
        rng_state = attention.draw()
        out, lse, low, shown = attention.launch(q, k, v, mask, None, rng_state)
        made = q, k, v, mask, rng_state, out, lse, low
        # A graph of gradients begins with parameters, and not with what they were cast to.
        originals = () if projection.cast is None else projection.apart(given)[1]
        ctx.save_for_backward(*inputs, *weights, bias, out_weight, *made, *originals)
        ctx.prepared = prepared
        ctx.set_materialize_grads(False)
        y = F.linear(projection.rows(out), out_weight, out_bias)
        # `linear` of three dimensions is a view, and autograd forbids to change a function's views in place.
        y = torch.ops.aten._unsafe_view.default(y, y.shape)
    return (y,) if shown is None else (y, shown)


def _backward(ctx: Any, dy: Tensor | None, dweights: Tensor | None = None) -> tuple[Tensor | None, ...]:
    with no_autocast():
        return None, None, *_gradients(ctx.prepared, ctx, dy, dweights)


def _gradients(
    prepared: Prepared, ctx: Any, dy: Tensor | None, dweights: Tensor | None
) -> list[Tensor | None]:
    """Those of inputs and parameters."""
    projection = prepared.projection
    inputs, weights, (bias, out_weight, q, k, v, mask, rng_state, *rest) = projection.apart(ctx.saved_tensors)
    out, lse, low, *originals = rest
    if is_grad_enabled():
        # Second derivatives are refused by the attention's own gradients, which therefore need a graph.
        q, k, v = projection.heads(projection.products(inputs, projection.casts(*originals) or weights, bias))
    tensors = q, k, v, mask, None, rng_state
    *of_heads, needs_out_weight, needs_out_bias = ctx.needs_input_grad[2:]
    dout_weight = dout_bias = dout = None
    if dy is not None:
        # Reshaped, because vmap does not know how to flatten.
        dy_rows = dy.reshape(-1, dy.shape[-1])
        if needs_out_weight:
            dout_weight = dy_rows.t() @ projection.rows(out).reshape(dy_rows.shape[0], -1)
        if needs_out_bias:
            dout_bias = _sum_of_rows(dy_rows)
        dout = projection.heads_of_rows(dy_rows @ out_weight, *projection.sizes(inputs[0]))
    found: list[Tensor | None] = [None] * len(of_heads)
    if any(of_heads):
        grads = _attention_grads(prepared.attention, dout, dweights, (out, lse, low), tensors)
        # Autograd keeps what the node saved until it ends; what nobody needs any more is freed at once.
        del dout
        rows = projection.rows_of_grads(grads)
        found = projection.backward(rows, inputs, weights, of_heads, _sum_of_rows)
    return [*found, dout_weight, dout_bias]


def _sum_of_rows(rows: Tensor) -> Tensor:
    """The sum (width,) of rows (R, width), rounded once.

    To sum many rows at once, torch's kernel for GPUs takes partial sums of 130 MiB, of any width: it counts
    each several times. To sum up to 255 it takes none.
    """
    chunk = math.gcd(len(rows), _CHUNK)
    if not rows.is_cuda or rows.numel() < _MANY or chunk < _SHORTEST:
        return rows.sum(0)
    return _sum_in_parts(rows, chunk)


def _sum_in_parts(rows: Tensor, chunk: int) -> Tensor:
    """The same by sums of `chunk` rows each, float32 until the end. A CPU would convert them first."""
    dtype = rows.dtype
    while len(rows) > chunk and len(rows) % chunk == 0:
        rows = rows.unflatten(0, (-1, chunk)).sum(1, dtype=None if dtype is float64 else float32)
    return rows.sum(0).to(dtype)


def _attention_grads(
    attention: FastCall,
    dout: Tensor | None,
    dweights: Tensor | None,
    results: tuple[Any, ...],
    tensors: tuple[Any, ...],
) -> list[Tensor]:
    """dq, dk and dv; zeros where nothing that was made of them has a gradient."""
    if not isinstance(attention, FastAutograd):
        raise AssertionError("an attention that needs gradients has them prepared")
    found = attention.gradients(dout, (None, dweights), (*results, *tensors))[:3]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(tensors[:3], found, strict=True)]


_function: Any = autograd.function("MultiheadAttention", _forward, _backward)
# Skips the checks of `Function.apply`, for which `lookup` stands.
_apply = super(torch.autograd.Function, _function).apply
