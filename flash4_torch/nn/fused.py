"""Torch's own call of a whole module in evaluation: the one that stock modules make, where it is the fastest.

It holds the weights of all heads, as stock attention does, in exchange for a call from Python instead of
eight; and in 16 bits its products are faster than those of torch's flash kernel. So it serves what has few
scores. A row that sees nothing is NaN there; such calls are served like all others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..ops.autocast import autocast_dtype
from . import padding
from .contract import Call
from .projection import Parameters

_call = torch._native_multi_head_attention

_PLAIN = 1 << 17
"""Scores of a batch entry, at most, without a mask."""
_PLAIN_WITH_WEIGHTS = 1 << 18
_PLAIN_IN_16_BITS = 1 << 21
_MASKED = 1 << 12
"""The same with masks."""
_MASKED_WITH_WEIGHTS = 1 << 13
_MOST = 1 << 24
"""Scores of the whole call."""


def serves(module: nn.MultiheadAttention, call: Call) -> bool:
    """Whether torch's call serves calls like this self-attention, which has no gradients."""
    query = call.query
    in_16_bits = (autocast_dtype("cpu") or query.dtype) in (torch.bfloat16, torch.float16)
    is_packed = query is call.key is call.value and module.in_proj_weight is not None
    if query.device.type != "cpu" or query.dim() != 3 or not (module.batch_first and is_packed):
        return False
    if module.training and (module.dropout or in_16_bits):
        return False  # stock's training does not round scores to 16 bits
    has_biases = module.in_proj_bias is not None and module.out_proj.bias is not None
    if not has_biases or module.num_heads % 2 or query.numel() == 0:
        return False
    masks = [x for x in (call.key_padding_mask, call.attn_mask) if x is not None]
    N, S, _ = query.shape
    scores = module.num_heads * S * S
    if masks:
        is_bool = all(x.dtype == torch.bool for x in masks) or (call.is_causal and len(masks) == 1)
        most = (_MASKED_WITH_WEIGHTS if call.need_weights else _MASKED) if is_bool else 0
    elif in_16_bits:
        most = _PLAIN_IN_16_BITS
    else:
        most = _PLAIN_WITH_WEIGHTS if call.need_weights else _PLAIN
    return scores <= most and N * scores <= _MOST


def run(call: Call, parameters: Parameters, num_heads: int) -> tuple[Tensor, Tensor | None] | None:
    """The module's output and the weights, or None; None instead of both if a row may see nothing."""
    query = call.query
    mask = kind = None
    if call.attn_mask is not None or call.key_padding_mask is not None or call.is_causal:
        mask, kind = _ignored(call, num_heads)
    out, weights = _call(
        query,
        query,
        query,
        query.shape[-1],
        num_heads,
        parameters.weights[0],
        parameters.bias,
        parameters.out_weight,
        parameters.out_bias,
        mask,
        call.need_weights,
        call.average_attn_weights,
        kind,
    )
    if mask is not None and math.isnan(out.sum().item()):
        return None
    return out, weights if call.need_weights else None


def _ignored(call: Call, num_heads: int) -> tuple[Tensor | None, int | None]:
    """The mask, True where a key is ignored, and torch's number for its kind."""
    padding_mask, mask = call.key_padding_mask, call.attn_mask
    if call.is_causal:
        S = call.query.shape[1]
        mask = torch.ones(S, S, dtype=torch.bool).triu_(1)
    if padding_mask is None:
        if mask is None:
            return None, None
        if mask.dim() == 2:
            return mask, 0
    elif mask is None:
        return padding_mask, 1
    N, S, _ = call.query.shape
    ignored = padding.ignored(padding_mask, mask, num_heads)
    return None if ignored is None else ignored.expand(N, num_heads, S, S), 2
