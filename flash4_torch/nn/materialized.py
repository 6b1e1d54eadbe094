"""Self-attention in training whose weights are saved for the backward, as stock attention saves them.

Stock attention holds all weights where it returns or drops some. Up to a size this does, too, and saves no
more: the backward need not compute them anew, and few calls into torch are made, of which small steps
consist. Roundings are those of stock attention, and may differ from the operators'. Calls without gradients
have the same plan, and are run by `evaluated`.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_legacy_batchedtensor

from .. import ops
from ..ops import autograd
from ..problem import CallOptions
from ..reference.at_once import FEW, products_dtype
from ..reference.dropout import Dropout
from ..reference.dropout import scale as dropout_scale
from ..reference.host import DTYPES, bias_of, constant
from ..reference.scoring import working_dtype
from .contract import Call, is_causal_by_rule

_MOST_RETURNED = 1 << 22
"""Weights of all heads, at most, of a step that returns them."""
_MOST_RETURNED_IN_16_BITS = 1 << 26
_MOST_DROPPED = 1 << 21
"""The same of a call that drops some and returns none."""


_NOTHING = {dtype: constant([0.0], dtype, (1, 1, 1)) for dtype in DTYPES}
"""Stands where a product is added to nothing."""
_NO_GRADIENTS = None, None, None
"""The gradients of both masks, and of what is no tensor."""


class Materialized(NamedTuple):
    """What all calls of one signature have in common."""

    num_heads: int
    batch_first: bool
    is_causal: bool
    """Whether row i sees keys 0 to i, and `attn_mask` is not read."""
    average_heads: bool | None
    """None if the weights are not returned."""
    options: CallOptions
    products: torch.dtype
    """The dtype of the products of queries, keys, values and weights, and of the weights."""
    wants_grad: bool
    """`prepared.Prepared` has such a field, too."""

    def sizes(self, x: Tensor) -> tuple[int, int]:
        """Batch and sequence length of the module's input."""
        rows, columns, _ = x.shape
        return (rows, columns) if self.batch_first else (columns, rows)

    def heads(self, rows: Tensor, N: int, S: int, parts: int) -> Tensor:
        """Rows (N * S, parts * embed_dim), ordered as the module's input, as (parts, N * H, S, D)."""
        H = self.num_heads
        if self.batch_first:
            apart = rows.reshape(N, S, parts, H, -1).permute(2, 0, 3, 1, 4)
        else:
            apart = rows.reshape(S, N, parts, H, -1).permute(2, 1, 3, 0, 4)
        if rows.dtype != self.products:
            apart = apart.to(self.products, memory_format=torch.contiguous_format)
        elif self.products.itemsize == 2:
            # Products in 16 bits take twice as long where rows of a head are apart.
            apart = apart.contiguous()
        return apart.reshape(parts, N * H, S, -1)

    def rows(self, heads: Tensor, N: int, S: int, parts: int, dtype: torch.dtype) -> Tensor:
        """The reverse of `heads`, in `dtype`."""
        apart = heads.reshape(parts, N, self.num_heads, S, -1)
        apart = apart.permute(1, 3, 0, 2, 4) if self.batch_first else apart.permute(3, 1, 0, 2, 4)
        rows = apart.reshape(N * S, -1)
        return rows if dtype == self.products else rows.to(dtype)

    def bias(self, attn_mask: Tensor | None, S: int) -> Tensor | None:
        """What `attn_mask`, or causal in its place, adds to the scores: (S, S) or (N * H, S, S)."""
        if self.is_causal:
            return torch.full((S, S), -math.inf, dtype=self.products).triu_(1)
        return None if attn_mask is None else _as_bias(attn_mask, self.products)

    def added(self, bias: Tensor | None, ignored: Tensor | None) -> Tensor | None:
        """What both masks add to scores (n * H, rows, S), to which it broadcasts.

        bias: (rows, S) or (n * H, rows, S). ignored: key_padding_mask (n, S).
        """
        if ignored is None:
            return bias
        padded = _as_bias(ignored, self.products)
        n, S = padded.shape
        if n == 1:
            return padded if bias is None else padded + bias
        padded = padded.view(n, 1, 1, S).expand(n, self.num_heads, 1, S)
        if bias is not None:
            padded = padded + (bias if bias.dim() == 2 else bias.view(n, self.num_heads, -1, S))
        return padded.reshape(n * self.num_heads, -1, S)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return bias_of(mask, dtype, hides=True)


def of(
    module: nn.MultiheadAttention, call: Call, options: CallOptions, wants_grad: bool
) -> Materialized | None:
    """What serves self-attention like this; None if something else does."""
    query, is_causal = call.query, is_causal_by_rule(module, call)
    most: float
    if query.device.type != "cpu" or query.dtype not in DTYPES:
        return None
    projected = query, module.in_proj_weight, module.in_proj_bias
    if wants_grad and not any(x is not None and x.requires_grad for x in projected):
        return None  # only the output projection has gradients
    for mask in (call.key_padding_mask, None if is_causal else call.attn_mask):
        if mask is not None and (mask.dtype not in (torch.bool, query.dtype) or mask.requires_grad):
            return None
    if not wants_grad and options.dropout_p:
        return None
    in_16_bits = query.dtype.itemsize == 2
    if call.need_weights:
        # Without gradients no more than a block of them is held at once.
        most = math.inf if not wants_grad else _MOST_RETURNED_IN_16_BITS if in_16_bits else _MOST_RETURNED
    elif options.dropout_p:
        most = _MOST_DROPPED
    elif in_16_bits:
        most = FEW - 1
    else:
        return None  # torch's flash kernel is as fast
    N, S = query.shape[:2] if module.batch_first else query.shape[1::-1]
    count = N * module.num_heads * S * S
    # Where stock returns no weights it does not round them either.
    is_exact = count < FEW or not call.need_weights
    products = working_dtype(query.dtype) if is_exact else products_dtype(query.dtype)
    if not 0 < query.numel() or count > most or not (is_exact or products == query.dtype):
        return None
    return Materialized(
        module.num_heads,
        module.batch_first,
        is_causal,
        call.average_attn_weights if call.need_weights else None,
        options,
        products,
        wants_grad,
    )


def run(
    plan: Materialized, call: Call, parameters: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The module's output and the weights, or None."""
    mask = None if plan.is_causal else call.attn_mask
    found = _apply(call.query, *parameters, call.key_padding_mask, mask, plan)
    return found if plan.average_heads is not None else (found[0], None)


def _forward(ctx: Any, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    weight, bias, out_weight, out_bias, ignored, mask, plan = others
    (N, S), H, p, nothing = plan.sizes(x), plan.num_heads, plan.options.dropout_p, _NOTHING[plan.products]
    heads = plan.heads(F.linear(x.flatten(0, 1), weight, bias), N, S, 3)
    q, k, v = heads.unbind()
    weights = weights_of(plan, q, k, plan.added(plan.bias(mask, S), ignored))
    # Autograd forbids to change a function's views in place, so these are none.
    weights.resize_(N, H, S, S)
    rng_state = kept = None
    applied, factor = weights, 1.0
    if p:
        rng_state = ops.draw_rng_state(x.device)
        kept = Dropout(rng_state, p).keep_all(N, H, S, S)
        # The factor is left to the products, which do not round it.
        applied, factor = weights * kept, dropout_scale(p)
    rows = plan.rows(_product(nothing, applied.view(N * H, S, S), v, factor), N, S, 1, x.dtype)
    y = F.linear(rows, out_weight, out_bias)
    # The state, too, as everywhere: whoever wants to see the mask again looks for it.
    made = kept, weights, applied if p else None, heads, rows, rng_state
    ctx.save_for_backward(x, weight, bias, out_weight, out_bias, *made)
    ctx.plan = plan
    ctx.set_materialize_grads(False)
    y.resize_(x.shape)
    if plan.average_heads is None:
        return (y,)
    each_head = applied * factor if p and not plan.average_heads else applied
    shown = applied.sum(1).mul_(factor / H) if plan.average_heads else each_head
    return y, shown if x.dtype == plan.products else shown.to(x.dtype)


def weights_of(plan: Materialized, q: Tensor, k: Tensor, added: Tensor | None) -> Tensor:
    """The weights (matrices, rows, keys) before dropout, 0 in rows that see nothing."""
    scores = _scores(plan, q, k, added)
    # In place: memory that is touched for the first time takes longer than the exponentials.
    weights = torch.softmax(scores, -1, out=scores)
    if added is not None and math.isnan(weights.select(-1, 0).sum().item()):
        # A row that sees nothing; the safe one, which takes twice as long, gives it weights 0.
        weights = torch._safe_softmax(_scores(plan, q, k, added), -1)
    return weights


def _scores(plan: Materialized, q: Tensor, k: Tensor, added: Tensor | None) -> Tensor:
    scale, k_columns = plan.options.scale, k.transpose(1, 2)
    if added is None:
        return torch.baddbmm(_NOTHING[plan.products], q, k_columns, beta=0, alpha=scale)
    return torch.baddbmm(added, q, k_columns, alpha=scale)


def _product(nothing: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """factor * a b, of batches of matrices."""
    return torch.bmm(a, b) if factor == 1.0 else torch.baddbmm(nothing, a, b, beta=0, alpha=factor)


def _backward(ctx: Any, dy: Tensor | None, dweights: Tensor | None = None) -> tuple[Tensor | None, ...]:
    if dy is None and dweights is None:
        return (None,) * len(ctx.needs_input_grad)
    is_attentions = True, True, True, dy is not None, dy is not None
    wanted = tuple(map(operator.and_, ctx.needs_input_grad, is_attentions))
    # Gradients have no gradients; these say so.
    gradients = _recorded_gradients if is_grad_enabled() else _gradients
    found = iter(gradients(ctx.plan, wanted, dy, dweights, *ctx.saved_tensors))
    return *(next(found) if wants else None for wants in wanted), *_NO_GRADIENTS


def _gradients(
    plan: Materialized,
    wanted: tuple[bool, ...],
    dy: Tensor | None,
    dweights: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    kept: Tensor | None,
    weights: Tensor,
    applied: Tensor | None,
    heads: Tensor,
    rows: Tensor,
    rng_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """The wanted gradients of input, projection's weight and bias, output projection's weight and bias.

    dv = w^T dout;   dq = scale * ds k;   dk = scale * ds^T q;   ds = w * (dw - rowsum(w * dw))

    Here dw is dout v^T + dweights, which dropout multiplies by its factors.
    """
    wants_x, wants_weight, wants_bias, wants_out_weight, wants_out_bias = wanted
    (N, S), H, nothing = plan.sizes(x), plan.num_heads, _NOTHING[plan.products]
    found, of_output, dout = [], [], None
    if dy is not None:
        dy_rows = dy.reshape(N * S, -1)  # which vmap knows, unlike flatten
        if wants_out_weight:
            of_output.append(torch.mm(dy_rows.t(), rows))
        if wants_out_bias:
            of_output.append(dy_rows.sum(0))
        dout = plan.heads(torch.mm(dy_rows, out_weight), N, S, 1)[0]
    if not (wants_x or wants_weight or wants_bias):
        return tuple(of_output)
    q, k, v = heads.unbind()
    weights, factor = weights.view(N * H, S, S), 1.0
    applied = weights if applied is None else applied.view(N * H, S, S)
    if kept is not None:
        kept, factor = kept.view(N * H, S, S), dropout_scale(plan.options.dropout_p)
    dv = torch.zeros_like(v) if dout is None else _product(nothing, applied.transpose(1, 2), dout, factor)
    dw = _gradient_of_weights(plan, dout, dweights, v, factor)
    # In place, as in the forward, unless vmap, which does not let it, has many of them.
    made = None if is_legacy_batchedtensor(dw) or _are_functorch_transforms_active() else dw
    if kept is not None:
        dw = torch.mul(dw, kept, out=made)
    ds = torch._softmax_backward_data(dw, weights, -1, weights.dtype, grad_input=made)
    scale = plan.options.scale
    dq, dk = _product(nothing, ds, k, scale), _product(nothing, ds.transpose(1, 2), q, scale)
    dqkv = plan.rows(torch.stack((dq, dk, dv)), N, S, 3, x.dtype)
    if wants_x:
        found.append(torch.mm(dqkv, weight).view(x.shape))
    if wants_weight:
        found.append(torch.mm(dqkv.t(), x.flatten(0, 1)))
    if wants_bias:
        found.append(dqkv.sum(0))
    return *found, *of_output


def _gradient_of_weights(
    plan: Materialized, dout: Tensor | None, dweights: Tensor | None, v: Tensor, factor: float
) -> Tensor:
    """The gradient (N * H, S, S) of the weights before dropout, but for what it drops."""
    if dweights is None:
        if dout is None:
            raise AssertionError("a backward has a gradient of the output or of the weights")
        return _product(_NOTHING[v.dtype], dout, v.transpose(1, 2), factor)
    dweights = dweights.to(plan.products)
    if plan.average_heads:
        factor_of_weights = factor / plan.num_heads
        if len(dweights) > 1:
            dweights = dweights.repeat_interleave(plan.num_heads, 0)
    else:
        factor_of_weights, dweights = factor, dweights.reshape(-1, *dweights.shape[2:])
    if dout is None:
        return (dweights * factor_of_weights).expand(len(v), -1, -1).contiguous()
    return torch.baddbmm(dweights, dout, v.transpose(1, 2), beta=factor_of_weights, alpha=factor)


_recorded_gradients = autograd.refusing("MultiheadAttention_backward", _gradients).apply
_function: Any = autograd.function("MultiheadAttention", _forward, _backward)
# Skips the checks of `Function.apply`, for which `prepared.lookup` stands.
_apply = super(torch.autograd.Function, _function).apply
