"""FlashAttention-4 as PyTorch operators that simply work.

    import flash4_torch
    out = flash4_torch.attention(q, k, v, causal=True)        # (B, S, H, D)
    flash4_torch.replace_attention(model)                     # swaps every nn.MultiheadAttention

Importing needs neither a GPU nor a kernel compiler.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .api import attention, attention_varlen, scaled_dot_product_attention, support
from .flex.attention import flex_attention, flex_support
from .flex.block_mask import create_block_mask
from .kvcache import append_kvcache, attention_kvcache, merge_states
from .nn import MultiheadAttention, replace_attention

if TYPE_CHECKING:
    from . import distributed, flash_attn, integrations, testing
    from .ahead import warmup

__version__ = "0.1.0.dev0"

__all__ = [
    "MultiheadAttention",
    "append_kvcache",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "create_block_mask",
    "distributed",
    "errors",
    "flash_attn",
    "flex_attention",
    "flex_support",
    "integrations",
    "merge_states",
    "replace_attention",
    "scaled_dot_product_attention",
    "support",
    "testing",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """Imports a lazy name on first access."""
    if name == "warmup":
        return importlib.import_module(".ahead", __name__).warmup
    if name in ("distributed", "flash_attn", "integrations", "reference", "testing"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, imported yet or not, and nothing else."""
    return [*__all__, "__version__"]
