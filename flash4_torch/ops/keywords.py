"""Errors for keywords that our functions do not have but similar functions of other libraries do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..errors import KeywordError, nearest

_SAME = (
    ("scale", "softmax_scale", "sm_scale", "scaling"),
    ("causal", "is_causal"),
    ("window", "window_size", "sliding_window"),
    ("softcap", "soft_cap", "logits_soft_cap"),
    ("attn_mask", "mask", "attention_mask", "attn_bias", "bias"),
    ("dropout_p", "dropout", "dropout_rate"),
    ("return_lse", "return_softmax_lse"),
    ("cu_seqlens_q", "cu_seq_lens_q"),
    ("cu_seqlens_k", "cu_seq_lens_k"),
    ("max_seqlen_q", "max_length_q"),
    ("max_seqlen_k", "max_length_k"),
    ("block_table", "page_table", "block_tables", "page_tables"),
    ("seqused_k", "cache_seqlens", "seq_lens", "kv_lens", "context_lens"),
    ("slot_mapping", "out_cache_loc", "slots"),
    ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k_new", "query_start_loc"),
    ("cos", "rotary_cos"),
    ("sin", "rotary_sin"),
    ("interleaved", "rotary_interleaved"),
    ("k_scale", "k_descale"),
    ("v_scale", "v_descale"),
)
"""Synonyms, ours first: names in flash-attn, PyTorch, Hugging Face, xformers, FlashInfer, vLLM and SGLang."""

_BUT = {"window_size": ", where -1 is a bound and None is no bound"}
"""What else differs about a synonym."""

_OTHERWISE = {
    "alibi_slopes": "give what it adds to the scores as attn_mask",
    "attn_mask": "use causal and window, or in attention_varlen mask_mod or block_mask",
    "block_mask": "attention and flex_attention take one",
    "enable_gqa": "query heads may always be a multiple of KV heads",
    "return_attn_probs": "weights are not stored; return_lse=True gives the log-sum-exp of each row's scores",
    "mask_mod": "attention takes one",
    "score_mod": "attention and flex_attention take one",
}

Function = TypeVar("Function", bound=Callable[..., Any])


def hides_unknown(function: Function) -> Function:
    """Removes from a function's signature the `**unknown` that catches keywords it does not have.

    The function stays the same object: a wrapper would add time to each call.
    """
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def no_argument(function: Callable[..., Any], unknown: Iterable[str]) -> KeywordError:
    """The error for the first of these keywords, which `function` does not have."""
    keyword = next(iter(unknown))
    takes = list(inspect.signature(function).parameters)
    return KeywordError(function.__name__, keyword, _hint(keyword, takes))


def _hint(keyword: str, takes: list[str]) -> str:
    for names in _SAME:
        ours = [name for name in names if name in takes]
        if keyword in names and ours:
            return f"it is called {ours[0]!r} here{_BUT.get(keyword, '')}"
    if keyword in _OTHERWISE:
        return _OTHERWISE[keyword]
    near = nearest(keyword, takes)
    return f"did you mean {near!r}?" if near else f"it takes {', '.join(takes)}"
