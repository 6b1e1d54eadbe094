"""Masks of nn.MultiheadAttention, drawn."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def masks(
    draw: st.DrawFn, H: int, sizes: tuple[int, int, int], dtype: torch.dtype, batched: bool = True
) -> dict[str, Any]:
    """Masks of one kind, bool or floating, of which some leave rows nothing. sizes: N, Sq and Sk."""
    N, Sq, Sk = sizes
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    share, is_bool = draw(st.sampled_from([0.2, 0.6])), draw(st.booleans())

    def mask(*shape: int) -> Tensor:
        hidden = torch.rand(shape, generator=generator) < share
        added = torch.randn(shape, generator=generator).masked_fill(hidden, -torch.inf)
        return hidden if is_bool else added.to(dtype)

    found = {"key_padding_mask": mask(*((N, Sk) if batched else (Sk,)))} if draw(st.booleans()) else {}
    kind = draw(st.sampled_from(["", "rows", "heads", "causal"]))
    if kind:
        found["attn_mask"] = mask(*((N * H, Sq, Sk) if kind == "heads" else (Sq, Sk)))
    return found | ({"is_causal": True} if kind == "causal" else {})
