"""What the backend serves, asked before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...backends import kvcache as backends
from ...kvcache_problem import CacheExtent, CacheProblem, CacheSpec
from ...masks import Band

FLOAT8_NAMES = ("fp8", "fp8_e4m3")
"""vLLM's names for caches of float8_e4m3fn."""
BLOCK_STEP = 16
HEAD_STEP, MAX_HEAD = 8, 256

_GATHERED = "gathered"
"""The backend that serves any call, by torch: no replacement for a kernel where a GPU serves users."""
_NAMED_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def why_not(configuration: Mapping[str, Any]) -> list[str]:
    """Sentences why a configuration of vLLM's `AttentionSelectorConfig` cannot be served; some say more.

    configuration: its fields, and device_capability, which is None on a CPU.
    """
    if configuration.get("use_mla") or configuration.get("use_sparse"):
        return []
    dtype, cache_dtype = configuration["dtype"], configuration.get("kv_cache_dtype") or "auto"
    stored = _NAMED_DTYPES.get(cache_dtype, dtype)
    if stored != dtype:
        return [f"the cache is {stored} and the model {dtype}: it must have the model's dtype or be fp8_e4m3"]
    if configuration.get("use_batch_invariant") and configuration.get("attn_type") == "encoder_only":
        return ["encoder-only attention is not batch invariant"]
    if (capability := configuration.get("device_capability")) is None:
        return []
    problem = _example(
        configuration["head_size"],
        dtype,
        torch.float8_e4m3fn if cache_dtype in FLOAT8_NAMES else dtype,
        configuration.get("block_size") or BLOCK_STEP,
        bool(configuration.get("use_batch_invariant")),
        (capability.major, capability.minor),
    )
    reasons = backends.reasons(problem)
    del reasons[_GATHERED]
    if not all(reasons.values()):
        return []
    return [f"{name}: {sentence}" for name, sentences in reasons.items() for sentence in sentences]


def _example(
    head_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    batch_invariant: bool,
    capability: tuple[int, int],
) -> CacheProblem:
    """A call of one token, as a layer would make it on a GPU."""
    spec = CacheSpec(
        device="cuda",
        dtype=dtype,
        cache_dtype=cache_dtype,
        D=head_size,
        Dv=head_size,
        group=1,
        paged=True,
        ragged=True,
        lengths=True,
        causal_flags=False,
        softcap=False,
        sinks="",
        batch_invariant=batch_invariant,
        aligned=True,
        capability=capability,
    )
    extent = CacheExtent(B=1, T=1, max_seqlen_q=1, max_seqlen_k=block_size, Hq=1, Hk=1, page_size=block_size)
    return CacheProblem(spec, extent, 1.0, Band(None, None), 0.0, 0)
