"""Attention as a module, `MultiheadAttention`, and `replace_attention`, which puts it into a whole model."""

from .multihead import MultiheadAttention
from .swap import replace_attention

__all__ = ["MultiheadAttention", "replace_attention"]
