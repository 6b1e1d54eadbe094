"""flash-attn's functions; the package's docstring says what differs from them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..api import attention, attention_varlen
from ..ops.keywords import hides_unknown
from . import arguments
from .arguments import NO_WINDOW, Options, Window, alibi, no_alibi, no_descale, refuse, unpacked
from .kvcache import attend_to_packed


@hides_unknown
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    **others: Any,
) -> Any:
    """Attention, softmax(softmax_scale * q k^T) v.

    Args:
        q: (B, Sq, Hq, D).
        k: (B, Sk, Hk, D); Hk divides Hq.
        v: (B, Sk, Hk, Dv).
        dropout_p: probability of dropping a weight.
        softmax_scale: default 1 / sqrt(D).
        causal: row i sees keys up to i + Sk - Sq.
        window_size: (left, right), row i sees keys from i + Sk - Sq - left to i + Sk - Sq + right; -1 or None
            is no bound.
        softcap: c > 0 replaces a score x by c * tanh(x / c).
        alibi_slopes: (Hq,) or (B, Hq), without gradient: adds -slope * |i + Sk - Sq - j| to row i's score of
            key j, as a mask (B or 1, Hq, 1, Sk) if causal or right is 0, else (B or 1, Hq, Sq, Sk).
        deterministic: bitwise repeatable gradients; False leaves that to torch's switch.
        return_attn_probs: also return lse and an empty tensor, without dropout.
        return_lse: also return lse.
        learnable_sink: (Hq,), one more score of every row, of a key whose value is 0; lse counts it.

    Returns:
        out (B, Sq, Hq, Dv), or (out, lse), or (out, lse, empty). lse (B, Hq, Sq) is the log-sum-exp of each
        row's scores.

    Raises:
        ArgumentError: an argument is outside its limits, or is one that cannot be served.
        KeywordError: no version of flash-attn has such an argument.
    """
    refuse(flash_attn_func, others)
    options = Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
    )
    ours = options.ours()
    sinks = arguments.learnable_sink(learnable_sink, q)
    bias = alibi(alibi_slopes, q, k, ours, sinks)
    out, lse = attention(q, k, v, attn_mask=bias.attn_mask, sinks=sinks, **ours)
    return options.results(out, bias.lse(lse))


@hides_unknown
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """`flash_attn_func` of k and v in one tensor, kv (B, Sk, 2, Hk, D)."""
    refuse(flash_attn_kvpacked_func, others)
    k, v = unpacked("kv", kv, "(B, S, 2, H, D)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        return_lse=return_lse,
    )


@hides_unknown
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """`flash_attn_func` of q, k and v in one tensor, qkv (B, S, 3, H, D)."""
    refuse(flash_attn_qkvpacked_func, others)
    q, k, v = unpacked("qkv", qkv, "(B, S, 3, H, D)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        return_lse=return_lse,
    )


@hides_unknown
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **others: Any,
) -> Any:
    """Attention over B packed sequences of different lengths, each by itself.

    Args:
        q: (Tq, Hq, D).
        k: (Tk, Hk, D).
        v: (Tk, Hk, Dv).
        cu_seqlens_q: (B + 1,), int32 or int64, where sequences begin and end in q.
        cu_seqlens_k: (B + 1,), the same for k and v.
        max_seqlen_q: length of the longest sequence of queries, or an upper bound; default Tq.
        max_seqlen_k: the same for keys; default Tk.
        alibi_slopes: must be None.
        block_table: (B, blocks), int32, for inference: k and v are pages, (pages, page_size, Hk, D), and key
            j of sequence b is row j % page_size of page block_table[b, j // page_size].
        dropout_p, ..., learnable_sink: as in `flash_attn_func`, within each sequence.
        seqused_k: (B,), int32, for inference: how many keys each sequence has, the first ones of those that
            cu_seqlens_k gives it, or of its pages. Without a table k may also be (B, S, Hk, D) then;
            cu_seqlens_k is None if k is not packed. Default: as many as cu_seqlens_k says.
        page_table: flash-attn 3's name of block_table.
        k_descale: float32, (), (Hk,) or (B, Hk), for pages or entries in float8_e4m3fn: what keys are
            multiplied by.
        v_descale: the same for values.

    Returns:
        out (Tq, Hq, Dv), or (out, lse), or (out, lse, empty). lse is (Hq, Tq).

    Raises:
        ArgumentError, KeywordError: as in `flash_attn_func`.
        NoGradientError: a gradient was requested with block_table or seqused_k.
    """
    refuse(flash_attn_varlen_func, others)
    no_alibi(alibi_slopes)
    options = Options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
    )
    sinks = arguments.learnable_sink(learnable_sink, q)
    if not (block_table is None and page_table is None and seqused_k is None):
        out, lse = attend_to_packed(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_k=seqused_k,
            block_table=block_table,
            page_table=page_table,
            k_scale=k_descale,
            v_scale=v_descale,
            sinks=sinks,
            num_splits=others.get("num_splits") or None,
            **options.ours_without_dropout(),
        )
        return options.results(out, lse)
    no_descale(k_descale=k_descale, v_descale=v_descale)
    out, lse = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,  # type: ignore[arg-type]  # None is an error there.
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        sinks=sinks,
        **options.ours(),
    )
    return options.results(out, lse)


@hides_unknown
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """`flash_attn_varlen_func` of k and v in one tensor, kv (Tk, 2, Hk, D)."""
    refuse(flash_attn_varlen_kvpacked_func, others)
    k, v = unpacked("kv", kv, "(T, 2, H, D)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        return_lse=return_lse,
    )


@hides_unknown
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one tensor, qkv (T, 3, H, D), with the same lengths."""
    refuse(flash_attn_varlen_qkvpacked_func, others)
    q, k, v = unpacked("qkv", qkv, "(T, 3, H, D)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        return_lse=return_lse,
    )
