"""Attention for serving: over KV caches, paged or dense, and what is done around it.

    out = attention_kvcache(q, k_cache, v_cache, block_table=table, seqused_k=lengths, causal=True)

Lengths and tables stay on the device: no call waits for them, and a CUDA graph may be replayed after they
have changed. There are no gradients.
"""

from .append import append_kvcache
from .attend import attention_kvcache
from .merge import merge_states

__all__ = ["append_kvcache", "attention_kvcache", "merge_states"]
