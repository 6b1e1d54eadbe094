"""Attention without gradients that returns its weights: one softmax for the output and the weights.

A block is some rows of all heads of a batch entry, or several entries, so that memory is linear in the
sequence length, and stays in a CPU's caches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.autocast import no_autocast
from .contract import Call
from .materialized import Materialized, Sizes, weights_of
from .projection import Parameters

Masks = tuple[Tensor | None, Tensor | None]
"""What is added to the scores, and the keys that are ignored."""

_BLOCK = 1 << 21
"""Weights of a block, at most, unless one row has more."""


def run(plan: Materialized, call: Call, parameters: Parameters) -> tuple[Tensor, Tensor | None]:
    """The module's output and the weights, or None."""
    projection = plan.projection
    inputs = projection.inputs(call)
    sizes = plan.sizes(inputs)
    made = projection.products(inputs, parameters.weights, parameters.bias)
    with no_autocast():
        masks = plan.bias(call.attn_mask, sizes), call.key_padding_mask
        attend = _at_once if sizes.N * plan.num_heads * sizes.Sq * sizes.Sk <= _BLOCK else _in_blocks
        rows, weights = attend(plan, plan.qkv(made, sizes), masks, sizes, made[0].dtype)
    # Not a view: who made it without gradients could not change it in place where there are some.
    out = F.linear(rows, parameters.out_weight, parameters.out_bias).resize_(call.query.shape)
    return out, weights if weights is None or projection.is_batched else weights.squeeze(0)


def _at_once(
    plan: Materialized, qkv: list[Tensor], masks: Masks, sizes: Sizes, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The rows (N * Sq, embed_dim) that the output projection takes, and the weights or None."""
    q, k, v = qkv
    N, Sq, Sk = sizes
    weights = weights_of(plan, q, k, plan.added(*masks))
    rows = plan.rows([torch.bmm(weights, v)], N, Sq, dtype)
    if plan.average_heads is None:
        return rows, None
    H = plan.num_heads
    weights.resize_(N, H, Sq, Sk)
    shown = weights.mean(1) if plan.average_heads else weights
    return rows, shown if dtype == plan.products else shown.to(dtype)


def _in_blocks(
    plan: Materialized, qkv: list[Tensor], masks: Masks, sizes: Sizes, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The same, a block after the other."""
    (bias, ignored), (N, Sq, Sk), H, batch_first = masks, sizes, plan.num_heads, plan.projection.batch_first
    q, k, v = (x.view(N, H, *x.shape[1:]) for x in qkv)
    D = q.shape[3]
    if bias is not None and bias.dim() == 3:
        bias = bias.view(N, H, Sq, Sk)
    if ignored is not None and ignored.dim() == 1:
        ignored = ignored[None]
    rows = q.new_empty((N, Sq, H, D) if batch_first else (Sq, N, H, D), dtype=dtype)
    out = rows if batch_first else rows.transpose(0, 1)
    shown = None
    if plan.average_heads is not None:
        shown = q.new_empty((N, Sq, Sk) if plan.average_heads else (N, H, Sq, Sk), dtype=dtype)
    for n, i in _blocks(H, sizes):
        of_rows = None
        if bias is not None:
            of_rows = bias[i] if bias.dim() == 2 else bias[n, :, i].flatten(0, 1)
        added = plan.added(of_rows, None if ignored is None else ignored[n])
        weights = weights_of(plan, q[n, :, i].flatten(0, 1), k[n].flatten(0, 1), added)
        made = torch.bmm(weights, v[n].flatten(0, 1))
        weights = weights.view(-1, H, *weights.shape[1:])
        out[n, i] = made.view(*weights.shape[:3], D).transpose(1, 2)
        if shown is not None and plan.average_heads:
            torch.mul(weights.sum(1), 1.0 / H, out=shown[n, i])
        elif shown is not None:
            shown[n, :, i] = weights
        del weights
    return rows.view(N * Sq, H * D), shown


def _blocks(H: int, sizes: Sizes) -> Iterator[tuple[slice, slice]]:
    """Batch entries and rows of all blocks: all rows, if there are several entries."""
    N, Sq, Sk = sizes
    entries, rows = max(1, _BLOCK // (H * Sq * Sk)), min(Sq, max(1, _BLOCK // (H * Sk)))
    for n in range(0, N, entries):
        for i in range(0, Sq, rows):
            yield slice(n, n + entries), slice(i, i + rows)
