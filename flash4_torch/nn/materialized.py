"""Attention in training whose weights are saved for the backward, as stock attention saves them.

Stock attention holds all weights where it returns or drops some. Up to a size this does, too, and saves no
more: the backward need not compute them anew, and few calls into torch are made, of which small steps
consist. Roundings are those of stock attention, and may differ from the operators'. Calls without gradients
have the same plan, and are run by `evaluated`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn

from .. import ops
from ..ops import autograd
from ..ops.autocast import no_autocast
from ..problem import CallOptions
from ..reference.at_once import FEW, products_dtype
from ..reference.dropout import Dropout
from ..reference.dropout import scale as dropout_scale
from ..reference.host import DTYPES, bias_of, constant
from ..reference.scoring import working_dtype
from .contract import Call, is_causal_by_rule
from .projection import Parameters, Projection, is_vmapped

_MOST_RETURNED = 1 << 22
"""Weights of all heads, at most, of a step that returns them."""
_MOST_RETURNED_IN_16_BITS = 1 << 26
_MOST_DROPPED = 1 << 21
"""The same of a call that drops some and returns none."""


_NOTHING = {dtype: constant([0.0], dtype, (1, 1, 1)) for dtype in DTYPES}
"""Stands where a product is added to nothing."""
_NO_GRADIENTS = None, None, None
"""The gradients of what is no tensor, and of both masks."""


class Sizes(NamedTuple):
    """Batch and sequence lengths of a call."""

    N: int
    Sq: int
    Sk: int


class Materialized(NamedTuple):
    """What all calls of one signature have in common."""

    projection: Projection
    is_causal: bool
    """Whether row i sees keys 0 to i, and `attn_mask` is not read."""
    average_heads: bool | None
    """None if the weights are not returned."""
    options: CallOptions
    products: torch.dtype
    """The dtype of the products of queries, keys, values and weights, and of the weights."""
    wants_grad: bool
    """`prepared.Prepared` has such a field, too."""

    @property
    def num_heads(self) -> int:
        return self.projection.num_heads

    def sizes(self, inputs: Sequence[Tensor]) -> Sizes:
        N, Sq = self.projection.sizes(inputs[0])
        return Sizes(N, Sq, self.projection.sizes(inputs[-1])[1])

    def qkv(self, products: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """Queries, keys and values (N * H, S, D) from the projections."""
        is_plain = sizes.N == 1 and products[0].dtype == self.products and self.products.itemsize > 2
        if is_plain and all([x.is_contiguous() for x in products]):
            return self.projection.heads_of_one(products)
        found: list[Tensor] = []
        for x, n in zip(products, self.projection.parts, strict=True):
            S = sizes.Sk if found else sizes.Sq
            found += self.heads(x, sizes.N, S, n).unbind()
        return found

    def heads(self, rows: Tensor, N: int, S: int, parts: int) -> Tensor:
        """Rows of N * S, ordered as the module's input, (..., parts * embed_dim), as (parts, N * H, S, D)."""
        H = self.num_heads
        if self.projection.batch_first:
            apart = rows.reshape(N, S, parts, H, -1).permute(2, 0, 3, 1, 4)
        else:
            apart = rows.reshape(S, N, parts, H, -1).permute(2, 1, 3, 0, 4)
        if rows.dtype != self.products:
            apart = apart.to(self.products, memory_format=torch.contiguous_format)
        elif self.products.itemsize == 2:
            # Products in 16 bits take twice as long where rows of a head are apart.
            apart = apart.contiguous()
        return apart.reshape(parts, N * H, S, -1)

    def rows(self, heads: Sequence[Tensor], N: int, S: int, dtype: torch.dtype) -> Tensor:
        """The reverse of `heads`, of its parts one by one, in `dtype`: (N * S, parts * embed_dim)."""
        parts = len(heads)
        if N * parts == 1 and dtype == self.products:
            return heads[0].transpose(0, 1).reshape(S, -1)
        together = heads[0] if parts == 1 else torch.stack(tuple(heads))
        apart = together.reshape(parts, N, self.num_heads, S, -1)
        apart = apart.permute(1, 3, 0, 2, 4) if self.projection.batch_first else apart.permute(3, 1, 0, 2, 4)
        rows = apart.reshape(N * S, -1)
        return rows if dtype == self.products else rows.to(dtype)

    def bias(self, attn_mask: Tensor | None, sizes: Sizes) -> Tensor | None:
        """What `attn_mask`, or causal in its place, adds to the scores: (Sq, Sk) or (N * H, Sq, Sk)."""
        if self.is_causal:
            return torch.full((sizes.Sq, sizes.Sk), -math.inf, dtype=self.products).triu_(1)
        return None if attn_mask is None else _as_bias(attn_mask, self.products)

    def added(self, bias: Tensor | None, ignored: Tensor | None) -> Tensor | None:
        """What both masks add to scores (n * H, rows, Sk), to which it broadcasts.

        bias: (rows, Sk) or (n * H, rows, Sk). ignored: key_padding_mask (n, Sk), or (Sk,) if n is 1.
        """
        if ignored is None:
            return bias
        padded = _as_bias(ignored, self.products)
        n, Sk = (1, len(padded)) if padded.dim() == 1 else padded.shape
        if n == 1:
            return padded if bias is None else padded + bias
        padded = padded.view(n, 1, 1, Sk).expand(n, self.num_heads, 1, Sk)
        if bias is not None:
            padded = padded + (bias if bias.dim() == 2 else bias.view(n, self.num_heads, -1, Sk))
        return padded.reshape(n * self.num_heads, -1, Sk)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return bias_of(mask, dtype, hides=True)


def of(
    module: nn.MultiheadAttention, call: Call, options: CallOptions, wants_grad: bool
) -> Materialized | None:
    """What serves calls like this; None if something else does."""
    query, is_causal, projection = call.query, is_causal_by_rule(module, call), Projection.of(module, call)
    dtype = projection.cast or query.dtype
    if query.device.type != "cpu" or dtype not in DTYPES or (not wants_grad and options.dropout_p):
        return None
    inputs, parameters = projection.inputs(call), Parameters.of(module)
    projected = *inputs, *parameters.weights, parameters.bias
    if wants_grad and not any(x is not None and x.requires_grad for x in projected):
        return None  # only the output projection has gradients
    for mask in (call.key_padding_mask, None if is_causal else call.attn_mask):
        if mask is not None and (mask.dtype not in (torch.bool, dtype, query.dtype) or mask.requires_grad):
            return None
    sizes = Sizes(*projection.sizes(query), projection.sizes(call.key)[1])
    count = sizes.N * module.num_heads * sizes.Sq * sizes.Sk
    products = _products(dtype, count, call.need_weights)
    if products is None or not 0 < count <= _most(call, options, dtype, wants_grad):
        return None
    average_heads = call.average_attn_weights if call.need_weights else None
    return Materialized(projection, is_causal, average_heads, options, products, wants_grad)


def _most(call: Call, options: CallOptions, dtype: torch.dtype, wants_grad: bool) -> float:
    """The weights that a call may have."""
    in_16_bits = dtype.itemsize == 2
    if call.need_weights:
        # Without gradients no more than a block of them is held at once.
        return math.inf if not wants_grad else _MOST_RETURNED_IN_16_BITS if in_16_bits else _MOST_RETURNED
    if options.dropout_p:
        return _MOST_DROPPED
    return FEW - 1 if in_16_bits and wants_grad else 0  # torch's flash kernel is as fast


def _products(dtype: torch.dtype, count: int, need_weights: bool) -> torch.dtype | None:
    """The dtype of the products of so many weights; None if they are better not made at once."""
    # Where stock returns no weights it does not round them either.
    if count < FEW or not need_weights:
        return working_dtype(dtype)
    return dtype if products_dtype(dtype) == dtype else None


def run(plan: Materialized, call: Call, parameters: Parameters) -> tuple[Tensor, Tensor | None]:
    """The module's output and the weights, or None."""
    mask = None if plan.is_causal else call.attn_mask
    inputs = plan.projection.inputs(call)
    found = _apply(plan, call.key_padding_mask, mask, *inputs, *parameters.in_order())
    if plan.average_heads is None:
        return found[0], None
    out, weights = found
    return out, weights if plan.projection.is_batched else weights.squeeze(0)


def _forward(
    ctx: Any, plan: Materialized, ignored: Tensor | None, mask: Tensor | None, *given: Any
) -> tuple[Tensor, ...]:
    with no_autocast():
        return _attend(ctx, plan, ignored, mask, given)


def _attend(
    ctx: Any, plan: Materialized, ignored: Tensor | None, mask: Tensor | None, given: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    projection, p, nothing = plan.projection, plan.options.dropout_p, _NOTHING[plan.products]
    inputs, weights, (bias, out_weight, out_bias) = projection.apart(projection.casts(*given))
    sizes, dtype = plan.sizes(inputs), inputs[0].dtype
    (N, Sq, Sk), H = sizes, plan.num_heads
    q, k, v = plan.qkv(projection.products(inputs, weights, bias), sizes)
    probs = weights_of(plan, q, k, plan.added(plan.bias(mask, sizes), ignored))
    # Autograd forbids to change a function's views in place, so these are none.
    probs.resize_(N, H, Sq, Sk)
    rng_state = kept = None
    applied, factor = probs, 1.0
    if p:
        rng_state = ops.draw_rng_state(q.device)
        kept = Dropout(rng_state, p).keep_all(N, H, Sq, Sk)
        # The factor is left to the products, which do not round it.
        applied, factor = probs * kept, dropout_scale(p)
    rows = plan.rows([_product(nothing, applied.view(N * H, Sq, Sk), v, factor)], N, Sq, dtype)
    y = F.linear(rows, out_weight, out_bias)
    # The state, too, as everywhere: whoever wants to see the mask again looks for it.
    made = kept, probs, applied if p else None, q, k, v, rows, rng_state
    # A graph of gradients begins with parameters, and not with what they were cast to.
    originals = () if projection.cast is None else projection.apart(given)[1]
    ctx.save_for_backward(*inputs, *weights, bias, out_weight, out_bias, *made, *originals)
    ctx.plan = plan
    ctx.set_materialize_grads(False)
    y.resize_(given[0].shape)
    if plan.average_heads is None:
        return (y,)
    each_head = applied * factor if p and not plan.average_heads else applied
    shown = applied.sum(1).mul_(factor / H) if plan.average_heads else each_head
    return y, shown if dtype == plan.products else shown.to(dtype)


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
    *of_heads, of_out_weight, of_out_bias = ctx.needs_input_grad[len(_NO_GRADIENTS) :]
    wanted = *of_heads, of_out_weight and dy is not None, of_out_bias and dy is not None
    # Gradients have no gradients; these say so.
    gradients = _recorded_gradients if is_grad_enabled() else _gradients
    with no_autocast():
        found = iter(gradients(ctx.plan, wanted, dy, dweights, *ctx.saved_tensors))
    return *_NO_GRADIENTS, *(next(found) if wants else None for wants in wanted)


def _gradients(
    plan: Materialized,
    wanted: tuple[bool, ...],
    dy: Tensor | None,
    dweights: Tensor | None,
    *saved: Any,
) -> tuple[Tensor, ...]:
    """The wanted gradients of inputs and parameters.

    dv = w^T dout;   dq = scale * ds k;   dk = scale * ds^T q;   ds = w * (dw - rowsum(w * dw))

    Here dw is dout v^T + dweights, which dropout multiplies by its factors.
    """
    *of_heads, wants_out_weight, wants_out_bias = wanted
    inputs, weights, (_, out_weight, _, kept, probs, applied, q, k, v, rows, *_) = plan.projection.apart(
        saved
    )
    sizes, nothing, dtype = plan.sizes(inputs), _NOTHING[plan.products], inputs[0].dtype
    (N, Sq, Sk), H = sizes, plan.num_heads
    of_output: list[Tensor] = []
    dout = None
    if dy is not None:
        dy_rows = dy.reshape(N * Sq, -1)  # which vmap knows, unlike flatten
        if wants_out_weight:
            of_output.append(torch.mm(dy_rows.t(), rows))
        if wants_out_bias:
            of_output.append(dy_rows.sum(0))
        dout = plan.heads(torch.mm(dy_rows, out_weight), N, Sq, 1)[0]
    if not any(of_heads):
        return tuple(of_output)
    probs, factor = probs.view(N * H, Sq, Sk), 1.0
    applied = probs if applied is None else applied.view(N * H, Sq, Sk)
    if kept is not None:
        kept, factor = kept.view(N * H, Sq, Sk), dropout_scale(plan.options.dropout_p)
    dv = torch.zeros_like(v) if dout is None else _product(nothing, applied.transpose(1, 2), dout, factor)
    dw = _gradient_of_weights(plan, dout, dweights, v, factor)
    # In place, as in the forward, unless vmap, which does not let it, has many of them.
    given = None if is_vmapped(dw) else dw
    if kept is not None:
        dw = torch.mul(dw, kept, out=given)
    ds = torch._softmax_backward_data(dw, probs, -1, probs.dtype, grad_input=given)
    scale = plan.options.scale
    dq, dk = _product(nothing, ds, k, scale), _product(nothing, ds.transpose(1, 2), q, scale)
    of_products: list[Tensor] = []
    grads = [dq, dk, dv]
    for n in plan.projection.parts:
        S = Sk if of_products else Sq
        of_products.append(plan.rows(grads[:n], N, S, dtype))
        del grads[:n]
    found = plan.projection.backward(of_products, inputs, weights, of_heads, _sum)
    return *(x for x in found if x is not None), *of_output


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(0)


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
