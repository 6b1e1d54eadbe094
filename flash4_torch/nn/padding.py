"""Merges the two masks of nn.MultiheadAttention into the one that attention takes, as small as possible.

`nn.MultiheadAttention` has a key_padding_mask, (S,) or (N, S), and an attn_mask, (L, S) or (N * H, L, S);
True means ignore, floats are added. `ops.attention` has one mask that broadcasts to (N, H, L, S), where True
means attend.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def check_dtypes(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> None:
    """Raises and warns about mask dtypes exactly as nn.MultiheadAttention does.

    torch's own check also converts a bool mask to float, 4 bytes per element, so it is given empty masks.
    """
    if key_padding_mask is None and attn_mask is None:
        return
    F._canonical_mask(
        mask=_empty_like(key_padding_mask),
        mask_name="key_padding_mask",
        other_type=F._none_or_dtype(attn_mask),
        other_name="attn_mask",
        target_type=torch.float32,
    )
    F._canonical_mask(
        mask=_empty_like(attn_mask),
        mask_name="attn_mask",
        other_type=None,
        other_name="",
        target_type=torch.float32,
        check_other=False,
    )


def merge(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, num_heads: int, extra_keys: int
) -> Tensor | None:
    """One 4-D mask for `ops.attention`, or None; the last `extra_keys` keys, not in the masks, stay visible.

    Bool masks stay bool, and nothing is expanded unless both masks are given: a key_padding_mask alone gives
    (N, 1, 1, S), an attn_mask alone (1, 1, L, S) or (N, H, L, S).
    """
    if key_padding_mask is None and attn_mask is None:
        return None
    merged = ignored(_widen(key_padding_mask, extra_keys), _widen(attn_mask, extra_keys), num_heads)
    if merged is None or merged.is_floating_point():
        return merged
    return merged.logical_not()


def ignored(key_padding_mask: Tensor | None, attn_mask: Tensor | None, num_heads: int) -> Tensor | None:
    """Both masks as one of four dimensions, as the module takes them: True where a key is ignored."""
    padding, mask = key_padding_mask, attn_mask
    if padding is not None:
        padding = (padding if padding.dim() == 2 else padding[None])[:, None, None]
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else _split_heads(mask, num_heads)
    return _both(padding, mask)


def _empty_like(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.new_empty(0)


def _widen(mask: Tensor | None, extra_keys: int) -> Tensor | None:
    return mask if mask is None or extra_keys == 0 else F.pad(mask, (0, extra_keys))


def _split_heads(mask: Tensor, num_heads: int) -> Tensor:
    return mask.unflatten(0, (mask.shape[0] // num_heads, num_heads))


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    if a.dtype == b.dtype == torch.bool:
        return a | b
    if a.is_floating_point() and b.is_floating_point():
        return a + b
    ignored, added = (a, b) if a.dtype == torch.bool else (b, a)
    return torch.where(ignored, -torch.inf, added)
