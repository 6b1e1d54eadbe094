"""Self-attention without gradients that returns its weights: one softmax for the output and the weights.

A block is some rows of all heads of a batch entry, or several entries, so that memory is linear in the
sequence length, and stays in a CPU's caches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract import Call
from .materialized import Materialized, weights_of

_BLOCK = 1 << 21
"""Weights of a block, at most, unless one row has more."""


def run(
    plan: Materialized, call: Call, parameters: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The module's output and the weights, or None."""
    x, (weight, bias, out_weight, out_bias) = call.query, parameters
    N, S = plan.sizes(x)
    qkv = plan.heads(F.linear(x.flatten(0, 1), weight, bias), N, S, 3)
    masks = plan.bias(call.attn_mask, S), call.key_padding_mask
    attend = _at_once if N * plan.num_heads * S * S <= _BLOCK else _in_blocks
    rows, weights = attend(plan, qkv, masks, N, x.dtype)
    # Not a view: who made it without gradients could not change it in place where there are some.
    return F.linear(rows, out_weight, out_bias).resize_(x.shape), weights


def _at_once(
    plan: Materialized, qkv: Tensor, masks: tuple[Tensor | None, Tensor | None], N: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The rows (N * S, embed_dim) that the output projection takes, and the weights or None."""
    q, k, v = qkv.unbind()
    H, S, _ = q.shape[0] // N, *q.shape[1:]
    weights = weights_of(plan, q, k, plan.added(*masks))
    rows = plan.rows(torch.bmm(weights, v), N, S, 1, dtype)
    if plan.average_heads is None:
        return rows, None
    weights.resize_(N, H, S, S)
    shown = weights.sum(1).mul_(1.0 / H) if plan.average_heads else weights
    return rows, shown if dtype == plan.products else shown.to(dtype)


def _in_blocks(
    plan: Materialized, qkv: Tensor, masks: tuple[Tensor | None, Tensor | None], N: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The same, a block after the other."""
    (bias, ignored), H, (S, D) = masks, plan.num_heads, qkv.shape[2:]
    q, k, v = qkv.view(3, N, H, S, D).unbind()
    if bias is not None and bias.dim() == 3:
        bias = bias.view(N, H, S, S)
    rows = qkv.new_empty((N, S, H, D) if plan.batch_first else (S, N, H, D), dtype=dtype)
    out = rows if plan.batch_first else rows.transpose(0, 1)
    shown = None
    if plan.average_heads is not None:
        shown = qkv.new_empty((N, S, S) if plan.average_heads else (N, H, S, S), dtype=dtype)
    for n, i in _blocks(N, H, S):
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
    return rows.view(N * S, H * D), shown


def _blocks(N: int, H: int, S: int) -> Iterator[tuple[slice, slice]]:
    """Batch entries and rows of all blocks: all rows, if there are several entries."""
    entries, rows = max(1, _BLOCK // (H * S * S)), min(S, max(1, _BLOCK // (H * S)))
    for n in range(0, N, entries):
        for i in range(0, S, rows):
            yield slice(n, n + entries), slice(i, i + rows)
