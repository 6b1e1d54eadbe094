"""Attention over a KV cache, and what is done around it, for inference.

Nothing here has a gradient: a backward raises NoGradientError.
"""

from .append import append_kvcache
from .merge import merge_states

__all__ = ["append_kvcache", "merge_states"]
