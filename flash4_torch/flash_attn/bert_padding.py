"""flash-attn's helpers between padded and packed sequences, flash_attn.bert_padding; any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of padded sequences, packed.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or int, True or 1 where there is a token.
        unused_mask: (B, S), 1 where there is a place that is kept but does not count. Default: nowhere.

    Returns:
        (T, ...), the tokens and kept places; indices (T,), where they were in (B * S, ...); cu_seqlens
        (B + 1,), int32; the longest length, for which the host waits; and (B,), int32, how many tokens count.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = torch.flatten(kept.flatten().nonzero())
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = max(lengths.tolist(), default=0)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens (T, ...) at their places in (batch, seqlen, ...), zeros elsewhere.

    `indices` is what `unpad_input` returned.
    """
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Entries of (N, ...) along the first dimension, (T, ...)."""
    return input.index_select(0, indices)
