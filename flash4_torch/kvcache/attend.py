"""`attention_kvcache`: checks of the arguments, defaults, and one operator call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from ..fast_path import kvcache as fast_path
from ..kvcache_problem import CacheInputs, CacheOptions, CacheProblem
from ..ops import check as common
from ..ops import kvcache as ops
from ..ops.autograd import refuse_tangents
from ..ops.keywords import hides_unknown, no_argument
from ..ops.kvcache_append import note_change, without_gradient
from . import check

if TYPE_CHECKING:
    from typing_extensions import Unpack

Window = tuple[int | None, int | None]

_LARGE = 1 << 62
"""Bounds from here on are left for `check` to judge, as negative ones are."""


class _Options(TypedDict, total=False):
    """Keywords that do not affect the return type."""

    seqused_k: Tensor | None
    block_table: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | Tensor | None
    max_seqlen_k: int | Tensor | None
    causal: bool | Tensor
    window: Window
    scale: float | None
    softcap: float
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    num_splits: int | None
    batch_invariant: bool
    out: Tensor | None


@overload
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def attention_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
@hides_unknown
def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    causal: bool | Tensor = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """Attention of new tokens over the keys and values that a cache holds, for any mix of sequences.

    The new tokens' own keys are in the cache already (`append_kvcache`); the last token of a sequence is
    aligned with its last key. Prefill, chunks of it, decoding and speculation are the same call.

    Args:
        q: (T, Hq, D), the tokens of all sequences packed, or (B, Sq, Hq, D); bfloat16, float16, float32 or
            float64.
        k_cache: (pages, page_size, Hk, D) with block_table, else (B or more, S, Hk, D), in q's dtype or
            float8_e4m3fn; any strides, a view of a cache that interleaves K and V too. Hk divides Hq.
        v_cache: the same with Dv columns.
        seqused_k: (B,), int32, keys of each sequence, those of the new tokens included. Default, only
            without block_table: S. Too large a length is clamped on a GPU, and a RangeError on a CPU.
        block_table: (B, blocks), int32: key j of sequence b is row j % page_size of page
            block_table[b, j // page_size]. Entries past a sequence's end are not read; page numbers that do
            not exist are clamped on a GPU, and a RangeError on a CPU.
        cu_seqlens_q: (B + 1,), int32, for packed q: sequence b has tokens cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] - 1, none if both are equal. Rows of `out` after the last one are not written.
        max_seqlen_q: most tokens of a sequence of packed q, or a bound: an int, or a 0-dim tensor (the host
            then waits for its value). Default: T.
        max_seqlen_k: most keys of a sequence, or a bound, by which the work is divided (on a GPU it is
            rounded up, so that it need not change in every step). Default: what there is room for.
        causal: token i sees keys up to i + Sk - Sq. A tensor (B,), bool or int32, says so for each sequence;
            sequences that are not causal then see the window's left side alone.
        window: (left, right) as in `attention`.
        scale: factor on q k^T. Default: 1 / sqrt(D).
        softcap: c > 0 replaces a score x by c * tanh(x / c). Default: 0, off.
        sinks: (Hq,), floating: one more score of every token, of a key whose value is 0.
        k_scale: (), (Hk,) or (B, Hk), float32: what keys of a float8 cache are multiplied by. Default: 1.
        v_scale: the same for values.
        num_splits: parts into which a sequence's keys are divided among CTAs. Default: chosen from
            max_seqlen_q and max_seqlen_k.
        batch_invariant: a token's bits depend on its q, on the keys and values it sees, their positions, its
            sink and the options alone; not on other sequences, the tokens beside it, page_size or bounds.
            Decoding one by one then equals prefill bit for bit. num_splits is ignored.
        out: what the result is written to, like q but with Dv columns.
        return_lse: also return lse, the log-sum-exp of each token's scores.

    Returns:
        out (T, Hq, Dv) or (B, Sq, Hq, Dv), in q's dtype; with `return_lse` (out, lse). lse (Hq, T) or (B, Hq,
        Sq) is the natural log, float32 (float64 for float64); it counts the sinks. A token that sees no key
        has out 0 and lse -inf.

    Raises:
        ArgumentError: an argument is outside its limits; the message names it, its value and the limit.
        KeywordError: there is no such argument; the message says what to use instead.
        BackendError: no backend can serve the call.
        NoGradientError: a gradient of the result was requested, or an argument has a tangent.

    No host waits for a length, so a CUDA graph may be replayed with others. A GPU without kernels of ours,
    a CPU, and what the kernels do not serve (float32, float64; D and Dv that are no multiples of 8, of a
    float8 cache 16, or above 256) get their keys gathered by torch.
    """
    if unknown:
        raise no_argument(attention_kvcache, unknown)
    tensors = (q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, sinks, k_scale, v_scale, out)
    refuse_tangents("attention_kvcache", tensors)
    signature = None
    flags: tuple[Any, ...] = ()
    if type(max_seqlen_k) is int and getattr(q, "is_cuda", False) and not torch.compiler.is_compiling():
        max_seqlen_k = coarse_bound(max_seqlen_k)
    if type(window) is tuple:
        flags = (causal, *window, scale, softcap, num_splits, batch_invariant)
        signature, call = fast_path.lookup(tensors, (max_seqlen_q, max_seqlen_k), flags)
        if call is not None and (return_lse is False or return_lse is True):
            results = call(tensors, return_lse)
            note_change(out)
            return results
    inputs, options = _checked(
        q,
        k_cache,
        v_cache,
        seqused_k=seqused_k,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
    )
    common.flag("return_lse", return_lse)
    into = None if out is None else check.out(out, q, v_cache).view(*inputs.q.shape[:2], v_cache.shape[-1])
    result, lse = ops.attention_kvcache(inputs, options, into)
    note_change(out)
    fast_path.record(signature, flags, inputs, options)
    if q.dim() == 4:
        result = result.view(*q.shape[:3], v_cache.shape[-1])
        lse = lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
    if out is not None:
        result, lse = (without_gradient("attention_kvcache", x, tensors[:9]) for x in (out, lse))
    return (result, lse) if return_lse else result


def problem_of(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> CacheProblem:
    """What a call of `attention_kvcache` with these arguments is, which is not made: nothing reads a tensor.
    There is no `out`.

    Raises:
        ArgumentError: as the call would.
    """
    return ops.describe(*_checked(q, k_cache, v_cache, **options))


def _checked(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    causal: bool | Tensor = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
) -> tuple[CacheInputs, CacheOptions]:
    """The operator's arguments, with packed q. Raises ArgumentError."""
    check.tensors(q, k_cache, v_cache)
    check.caches(q, k_cache, v_cache)
    Hk = k_cache.shape[2]
    B = check.sequences(q, k_cache, block_table, cu_seqlens_q, seqused_k)
    room = k_cache.shape[1] if block_table is None else k_cache.shape[1] * block_table.shape[1]
    causal_flags = check.causal_flags(causal, B, q)
    band = common.band(True if isinstance(causal, Tensor) else causal, window)
    options = CacheOptions(
        max_seqlen_q=check.max_seqlen_q(max_seqlen_q, q),
        max_seqlen_k=common.max_seqlen("max_seqlen_k", max_seqlen_k, room),
        scale=common.scale(scale, q.shape[-1]),
        window_left=band.left,
        window_right=band.right,
        softcap=common.softcap(softcap),
        num_splits=check.num_splits(num_splits),
        batch_invariant=common.flag("batch_invariant", batch_invariant),
    )
    inputs = CacheInputs(
        q if q.dim() == 3 else q.flatten(0, 1),
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q,
        seqused_k,
        causal_flags,
        common.sinks(sinks, q),
        check.cache_scale("k_scale", k_scale, k_cache, B, Hk),
        check.cache_scale("v_scale", v_scale, v_cache, B, Hk),
    )
    return inputs, options


def coarse_bound(length: int) -> int:
    """A bound that a growing sequence keeps for many tokens, at most an eighth above its length.

    Work is divided by the bound, and whatever follows from it is decided anew where it changes: with lengths
    themselves in every step of decoding, which takes the host a millisecond or two. Only a GPU's lengths are
    not compared with it.
    """
    if not 0 < length < _LARGE:
        return length
    step = 1 << max(length.bit_length() - 4, 6)
    return -(-length // step) * step
