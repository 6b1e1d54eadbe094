"""FlashAttention-4 as PyTorch operators that simply work.

    import flash4_torch
    out = flash4_torch.attention(q, k, v, causal=True)        # (B, S, H, D)
    flash4_torch.replace_attention(model)                     # swaps every nn.MultiheadAttention

Importing needs neither a GPU nor a kernel compiler.
"""

from . import errors
from .api import attention, attention_varlen, scaled_dot_product_attention, support
from .nn import MultiheadAttention, replace_attention

__version__ = "0.1.0.dev0"

__all__ = [
    "MultiheadAttention",
    "attention",
    "attention_varlen",
    "errors",
    "replace_attention",
    "scaled_dot_product_attention",
    "support",
]
