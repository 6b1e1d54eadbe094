"""What the steps of a server may ask for, so that kernels are there before the first one.

    problem = steps.attend(
        q, k_cache, v_cache, most_sequences=256, most_tokens=8192, most_keys=131072, block_table=table, ...
    )
    new = steps.append(k, v, k_cache, v_cache, slot_mapping=slots)

The tensors are examples: of what they hold nothing is read, and their numbers of tokens and sequences do not
count. Everything else is a step's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kvcache_problem import CacheProblem
from ..reference.kvcache import Append
from .attend import coarse_bound, problem_of


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    most_sequences: int,
    most_tokens: int,
    most_keys: int,
    **options: Any,
) -> CacheProblem:
    """A step's call of `attention_kvcache` with packed q (T, Hq, D), its sizes as large as they become.

    most_sequences: those of a step, padding included. most_tokens, most_keys: those of a sequence.
    """
    bounds: dict[str, Any] = {"max_seqlen_q": most_tokens, "max_seqlen_k": coarse_bound(most_keys)}
    problem = problem_of(q, k_cache, v_cache, **{**options, **bounds})
    return problem.of_sizes(problem.extent._replace(B=most_sequences))


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Append:
    """A step's call of `append_kvcache` with packed k (T, Hk, D) and slots."""
    return Append(
        k[None], v[None], k_cache, v_cache, slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale
    )
