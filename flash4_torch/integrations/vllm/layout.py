"""The layout of vLLM's KV cache: what of it versions of vLLM decide, and what a backend does.

One layer's cache is (blocks, Hk, block_size, D + Dv) to look at: a head's row holds a key and its value. In
memory blocks are outermost, and then come heads (HND) or rows (NHD), perhaps with other layers in between;
strides say so, and our kernels take any. Up to 0.26 vLLM asks the backend for this shape and order; a later
one, as 0.33, has the same shape built in and decides the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn

ORDERS = {"NHD": (0, 2, 1, 3), "HND": (0, 1, 2, 3)}
"""Dimensions of a layer's cache, outermost first."""
ORDERS_OF_LAYERS = {"NHD": (1, 0, 3, 2, 4), "HND": (1, 2, 0, 3, 4)}
"""The same for a tensor that holds all layers, (layers, blocks, Hk, block_size, D + Dv)."""


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """The shape of one layer's cache."""
    return num_blocks, num_kv_heads, block_size, 2 * head_size


def keys_and_values(kv_cache: Tensor, head_size: int, float8: bool) -> tuple[Tensor, Tensor]:
    """Views (blocks, block_size, Hk, D) and (blocks, block_size, Hk, Dv) of one layer's cache.

    float8: the cache holds float8_e4m3fn, whatever vLLM calls its bytes.
    """
    if float8 and kv_cache.dtype != FLOAT8:
        kv_cache = kv_cache.view(FLOAT8)
    k_cache, v_cache = kv_cache.transpose(1, 2).tensor_split((head_size,), dim=-1)
    return k_cache, v_cache
