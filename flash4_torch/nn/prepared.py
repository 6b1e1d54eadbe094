"""The module's own fast path: self-attention like an earlier call's, from the input to the output projection.

The law is that of `flash4_torch.fast_path`, on which this rests: what was decided for a call holds for all
calls with the same sizes, strides, dtypes and flags, and nobody must be able to tell that it is not decided
again. With gradients, the projections and the attention are one node of autograd.
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

from ..fast_path import FastAutograd, FastCall, recent, view
from ..fast_path.conditions import guards_would_miss, must_take_slow_path
from ..ops import autograd
from ..problem import CallOptions, allows_tf32
from . import evaluated, fused, materialized, padding
from .contract import Call
from .materialized import Materialized

Signature = tuple[Any, ...]

_MOST = 1024
"""Signatures to remember; when the memory is full, it is cleared."""
_CHUNK, _SHORTEST, _MANY = 128, 16, 1 << 22
"""Rows to sum at once if there are `_MANY` numbers or more, and the fewest for which that pays."""
_WANTS_GRAD = 3
"""Index of `wants_grad` in a signature."""
_TENSORS = (Tensor, nn.Parameter)


class Prepared(NamedTuple):
    """A call's attention, and what the module does around it."""

    attention: FastCall
    num_heads: int
    batch_first: bool
    reads_attn_mask: bool
    wants_grad: bool
    is_fused: bool
    """Whether torch's own call serves the module, and the attention only rows that see nothing."""

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k and v (N, S, H, D), views of the projection."""
        S, N, width = qkv.shape
        heads = qkv.view(S, N, 3, self.num_heads, width // (3 * self.num_heads))
        return (heads if self.batch_first else heads.transpose(0, 1)).unbind(2)

    def heads_past_dispatcher(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """The same without autograd, of a projection without gaps."""
        S, N, width = qkv.shape
        E, H = width // 3, self.num_heads
        sizes, strides = (S, N, H, E // H), (N * width, width, E // H, 1)
        if not self.batch_first:
            sizes, strides = (N, S, *sizes[2:]), (width, N * width, *strides[2:])
        return view(qkv, sizes, strides), view(qkv, sizes, strides, E), view(qkv, sizes, strides, 2 * E)

    def rows(self, out: Tensor) -> Tensor:
        """out (N, S, H, D) in the layout of the module's inputs, (..., embed_dim)."""
        rows = out.flatten(2)
        return rows if self.batch_first else rows.transpose(0, 1).contiguous()


Known = Prepared | Materialized
_calls: dict[Signature, Known] = {}
_recent: recent.Known[Known] = {}
"""The same, by torch's own check of all tensors at once."""


class _Parameters(NamedTuple):
    in_proj_weight: Any
    in_proj_bias: Any
    out_proj_weight: Any
    out_proj_bias: Any


def parameters_of(module: nn.MultiheadAttention) -> _Parameters:
    """The parameters, past `Module.__getattr__` where they are plain: it takes a microsecond for each."""
    own = module._parameters
    try:
        of_out: Any = module._modules["out_proj"]._parameters  # type: ignore[union-attr]
        return _Parameters(own["in_proj_weight"], own["in_proj_bias"], of_out["weight"], of_out["bias"])
    except KeyError:
        # Parametrised, or put in place by a wrapper.
        return _Parameters(
            module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias
        )


def recall(module: nn.MultiheadAttention, call: Call, parameters: _Parameters) -> Known | None:
    """What serves a call whose like was looked up before; None if `lookup` must say.

    Torch's check of all tensors stands for whatever the slow path asks of tensors and of the state of torch,
    but for what is asked here.
    """
    query = call.query
    if not (query is call.key is call.value) or guards_would_miss() or not _adds_nothing(module):
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
    module: nn.MultiheadAttention, call: Call, parameters: _Parameters
) -> tuple[Signature | None, Known | None]:
    """The call's signature (None if it must take the slow path), and the prepared call, if there is one."""
    query = call.query
    if (
        is_dynamo_compiling()
        or not (query is call.key is call.value)
        or type(query) is not Tensor
        or query.dim() != 3
        or must_take_slow_path()
        or _is_any_autocast_enabled()
        or not _is_usual(module, call, parameters)
    ):
        return None, None
    dropout = module.dropout if module.training else 0.0
    flags: tuple[Any, ...] = (call.need_weights, call.average_attn_weights, call.is_causal, dropout)
    if query.dtype is float32 and allows_tf32(float32):
        flags += ("tf32",)
    signature = _signature(module, flags, (query, call.key_padding_mask, call.attn_mask, *parameters))
    if signature is None:
        return None, None
    known = _calls.get(signature)
    if known is not None:
        recent.remember(_recent, *_place(module, call, parameters), known)
    return signature, known


def _place(
    module: nn.MultiheadAttention, call: Call, parameters: _Parameters
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Everything but tensors that a call depends on, and the tensors that there are."""
    query, _, _, padding_mask, need_weights, mask, average, is_causal = call
    weight, bias, out_weight, out_bias = parameters
    present: tuple[Any, ...] = query, weight, bias, out_weight, out_bias
    if padding_mask is not None or mask is not None or bias is None or out_bias is None:
        given = query, padding_mask, mask, *parameters
        present = tuple([x for x in given if x is not None])
    dropout = module.dropout if module.training else 0.0
    place = (
        is_grad_enabled(), module.num_heads, module.batch_first,
        need_weights, type(need_weights), average, type(average), is_causal, type(is_causal),
        dropout, type(dropout), query.dtype is float32 and allows_tf32(float32),
        padding_mask is None, mask is None, bias is None, out_bias is None,
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


def _is_usual(module: nn.MultiheadAttention, call: Call, parameters: _Parameters) -> bool:
    """Whether the module does nothing to its projections, and the call causes no warning."""
    weight, bias, *_ = parameters
    padding_mask, mask = call.key_padding_mask, call.attn_mask
    return (
        weight is not None
        and (bias is None or bias.dtype == weight.dtype)
        and _adds_nothing(module)
        and (padding_mask is None or mask is None or padding_mask.dtype == mask.dtype)
    )


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
    found = Prepared(attention, module.num_heads, module.batch_first, reads_attn_mask, wants_grad, is_fused)
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


def run(prepared: Known, call: Call, parameters: _Parameters) -> tuple[Tensor, Tensor | None]:
    """The module's output and the weights, or None."""
    if isinstance(prepared, Materialized):
        serves = materialized.run if prepared.wants_grad else evaluated.run
        return serves(prepared, call, parameters)
    if prepared.is_fused:
        both = fused.run(call, parameters, prepared.num_heads)
        if both is not None:
            return both
    mask = call.attn_mask if prepared.reads_attn_mask else None
    if mask is not None or call.key_padding_mask is not None:
        mask = padding.merge(call.key_padding_mask, mask, prepared.num_heads, 0)
    if prepared.wants_grad:
        found: tuple[Tensor, ...] = _apply(call.query, *parameters, mask, prepared)
        return found[0], found[1] if len(found) > 1 else None
    weight, bias, out_weight, out_bias = parameters
    attention = prepared.attention
    qkv = F.linear(call.query, weight, bias)
    heads = prepared.heads_past_dispatcher(qkv) if qkv.is_contiguous() else prepared.heads(qkv)
    out, _, _, weights = attention.launch(*heads, mask, None, attention.draw())
    return F.linear(prepared.rows(out), out_weight, out_bias), weights


def _forward(ctx: Any, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    weight, bias, out_weight, out_bias, mask, prepared = others
    attention: FastCall = prepared.attention
    heads = prepared.heads(F.linear(x, weight, bias))
    rng_state = attention.draw()
    out, lse, low, weights = attention.launch(*heads, mask, None, rng_state)
    ctx.save_for_backward(x, weight, bias, out_weight, *heads, mask, rng_state, out, lse, low)
    ctx.prepared = prepared
    ctx.set_materialize_grads(False)
    y = F.linear(prepared.rows(out), out_weight, out_bias)
    # `linear` of three dimensions is a view, and autograd forbids to change a function's views in place.
    y = torch.ops.aten._unsafe_view.default(y, y.shape)
    return (y,) if weights is None else (y, weights)


def _backward(ctx: Any, dy: Tensor | None, dweights: Tensor | None = None) -> tuple[Tensor | None, ...]:
    x, weight, bias, out_weight, q, k, v, mask, rng_state, out, lse, low = ctx.saved_tensors
    prepared: Prepared = ctx.prepared
    if is_grad_enabled():
        # Second derivatives are refused by the attention's own gradients, which therefore need a graph.
        q, k, v = prepared.heads(F.linear(x, weight, bias))
    tensors = q, k, v, mask, None, rng_state
    needs_x, needs_weight, needs_bias, needs_out_weight, needs_out_bias, *_ = ctx.needs_input_grad
    dx = dweight = dbias = dout_weight = dout_bias = dout = None
    if dy is not None:
        # Reshaped, because vmap does not know how to flatten.
        dy_rows = dy.reshape(-1, dy.shape[-1])
        if needs_out_weight:
            dout_weight = dy_rows.t() @ prepared.rows(out).flatten(0, 1)
        if needs_out_bias:
            dout_bias = _sum_of_rows(dy_rows)
        dout = (dy_rows @ out_weight).view(*dy.shape[:2], prepared.num_heads, -1)
        dout = dout if prepared.batch_first else dout.transpose(0, 1)
    if needs_x or needs_weight or needs_bias:
        grads = _attention_grads(prepared.attention, dout, dweights, (out, lse, low), tensors)
        # Autograd keeps what the node saved until it ends; what nobody needs any more is freed at once.
        del dout
        parts = [g.reshape(*g.shape[:2], -1) for g in grads]
        dqkv = torch.cat(parts if prepared.batch_first else [x.transpose(0, 1) for x in parts], -1)
        del grads, parts
        rows = dqkv.reshape(-1, dqkv.shape[-1])
        if needs_x:
            dx = (rows @ weight).view(x.shape)
        if needs_weight:
            dweight = rows.t() @ x.flatten(0, 1)
        if needs_bias:
            dbias = _sum_of_rows(rows)
    return dx, dweight, dbias, dout_weight, dout_bias, None, None


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
) -> tuple[Tensor, ...]:
    """dq, dk and dv; zeros where nothing that was made of them has a gradient."""
    if not isinstance(attention, FastAutograd):
        raise AssertionError("an attention that needs gradients has them prepared")
    found = attention.gradients(dout, (None, dweights), (*results, *tensors))[:3]
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(tensors[:3], found, strict=True))


_function: Any = autograd.function("MultiheadAttention", _forward, _backward)
# Skips the checks of `Function.apply`, for which `lookup` stands.
_apply = super(torch.autograd.Function, _function).apply
