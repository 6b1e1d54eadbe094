"""`flash_attn_with_kvcache`, and what `flash_attn_varlen_func` needs for caches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError, RangeError, ShapeError
from ..kvcache import append_kvcache, attention_kvcache
from ..kvcache.packed import packed_as_pages
from ..ops.keywords import hides_unknown
from . import arguments
from .arguments import NO_WINDOW, Window, refuse

_NAMES = {
    "seqused_k": "cache_seqlens",
    "cu_seqlens": "cu_seqlens_k_new",
    "positions": "rotary_seqlens",
    "cos": "rotary_cos",
    "sin": "rotary_sin",
    "interleaved": "rotary_interleaved",
    "return_lse": "return_softmax_lse",
}
"""What arguments of `append_kvcache` and `attention_kvcache` are called here."""


@hides_unknown
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    **others: Any,
) -> Any:
    """Appends k and v to a KV cache, in place, and attends to all that it then holds.

    No host waits for a length, so a CUDA graph may be replayed with other lengths and tables.

    Args:
        q: (B, Sq, Hq, D), or with cu_seqlens_q packed, (Tq, Hq, D); bfloat16, float16, float32 or float64.
        k_cache: pages (pages, page_size, Hk, D) with block_table, else one entry for each sequence,
            (B, S, Hk, D); in q's dtype or float8_e4m3fn, any strides.
        v_cache: the same with Dv columns.
        k: new keys, (B, Snew, Hk, D), or with cu_seqlens_k_new packed, (Tnew, Hk, D): token i of sequence b
            becomes key cache_seqlens[b] + i. Default: nothing is appended.
        v: their values, with Dv columns.
        rotary_cos: (positions, R / 2), in k's dtype or float32: rotates the first R columns of k before it is
            stored, and of q. Token i of a sequence has position cache_seqlens[b] + i; if neither causal nor a
            window is given, all of q's tokens have cache_seqlens[b]. Requires k.
        rotary_sin: the same.
        cache_seqlens: the number of keys before k is appended, (B,), int32, or one int for all; with
            neither k nor this, all that there is room for. Keys of negative places are not stored on a GPU.
        cache_batch_idx: (B,), int32: the entry of a cache without block_table that a sequence has.
            Default: its own. An entry that two sequences share may not be appended to.
        cache_leftpad: must be None.
        block_table: (B, blocks), int32: key j of sequence b is row j % page_size of page
            block_table[b, j // page_size].
        softmax_scale, causal, window_size, softcap: as in `flash_attn_func`, the last token of q aligned
            with the last key.
        rotary_interleaved: columns 2 i and 2 i + 1 are a pair; False: i and R / 2 + i.
        alibi_slopes: must be None.
        num_splits: parts into which a sequence's keys are divided; 0 leaves it to us.
        return_softmax_lse: also return lse.
        page_table: flash-attn 3's name of block_table.
        cu_seqlens_q: (B + 1,), int32, where sequences begin and end in packed q.
        cu_seqlens_k_new: (B + 1,), the same for packed k.
        max_seqlen_q: length of the longest sequence of packed queries, or an upper bound; default Tq.
        rotary_seqlens: (B,), int32, positions of the first tokens in place of cache_seqlens.
        k_descale: float32, (), (Hk,) or (B, Hk): what keys of a float8 cache are multiplied by; new ones are
            divided by it.
        v_descale: the same for values.
        learnable_sink, sinks, s_aux: three names for (Hq,), one more score of every row, of a key whose
            value is 0; lse counts it.
        out: what the result is written to.

    Returns:
        out, like q but with Dv columns, or (out, lse), lse (B, Hq, Sq) or (Hq, Tq). A row that sees no key
        has out 0 and lse -inf.

    Raises:
        ArgumentError: an argument is outside its limits, or is one that cannot be served. If it is found
            after the append, the caches hold the new rows already.
        KeywordError: no version of flash-attn has such an argument.
        NoGradientError: a gradient of the result was requested.
    """
    refuse(flash_attn_with_kvcache, {"cache_leftpad": cache_leftpad, **others})
    if alibi_slopes is not None:
        limit = "it must be None: a KV cache takes no bias"
        raise ArgumentError("alibi_slopes", arguments.shown(alibi_slopes), limit)
    table_name, table = _one_of(block_table=block_table, page_table=page_table)
    sink_name, sink = _one_of(learnable_sink=learnable_sink, sinks=sinks, s_aux=s_aux)
    if cache_batch_idx is not None:
        table_name, table = "cache_batch_idx", _as_table(cache_batch_idx, table)
    window = arguments.window(window_size)
    has_new = k is not None or v is not None
    try:
        cache = _Cache(k_cache, v_cache, table, _lengths(cache_seqlens, k_cache, table, has_new))
        lengths = cache.lengths
        if has_new:
            new = _New(q, k, v, cu_seqlens_q, cu_seqlens_k_new)
            rotary = _Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
            q = _append(new, cache, rotary, causal or window != (None, None), k_descale, v_descale)
            lengths = new.lengths_after(lengths)
        elif rotary_cos is not None or rotary_sin is not None:
            raise ArgumentError("rotary_cos, rotary_sin", "given", "without k there is nothing new to rotate")
        return attention_kvcache(
            q,
            k_cache,
            v_cache,
            seqused_k=lengths,
            block_table=table,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=None if cu_seqlens_q is None else max_seqlen_q,
            causal=causal,
            window=window,
            scale=softmax_scale,
            softcap=softcap,
            sinks=sink,
            k_scale=k_descale,
            v_scale=v_descale,
            num_splits=num_splits or None,
            out=out,
            return_lse=return_softmax_lse,
        )
    except ArgumentError as error:
        raise arguments.renamed(error, _NAMES | {"sinks": sink_name, "block_table": table_name}) from error


def attend_to_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    *,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    page_table: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func` over keys whose lengths seqused_k says, or whose places a block table says.

    k is (pages, page_size, Hk, D) with a table, else (B, S, Hk, D) or packed (Tk, Hk, D).
    Returns out and lse.
    """
    name, table = _one_of(block_table=block_table, page_table=page_table)
    try:
        lengths = seqused_k
        if table is None and k.dim() == 3:
            if cu_seqlens_k is None:
                raise ArgumentError("cu_seqlens_k", None, "packed k, (Tk, Hk, D), needs it")
            k, v, table, lengths = packed_as_pages(k, v, cu_seqlens_k, max_seqlen_k, seqused_k)
        elif lengths is None and cu_seqlens_k is not None:
            lengths = cu_seqlens_k.diff().to(torch.int32)
        results: tuple[Tensor, Tensor] = attention_kvcache(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q.to(torch.int32),
            seqused_k=lengths,
            block_table=table,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            return_lse=True,
            **options,
        )
        return results
    except ArgumentError as error:
        raise arguments.renamed(error, {"sinks": "learnable_sink", "block_table": name}) from error


class _Cache(NamedTuple):
    """A cache, and where in it the sequences are."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    lengths: Tensor | None
    """(B,), keys of each sequence before the append; None if all entries are full."""


class _New(NamedTuple):
    """New tokens: (B, S, H, D), or packed (T, H, D) with cumulative lengths."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None

    def lengths_after(self, before: Tensor | None) -> Tensor:
        assert self.k is not None and before is not None, "checked by the append"
        return before + (self.k.shape[1] if self.cu_seqlens_k is None else self.cu_seqlens_k.diff())

    def are_the_same_tokens(self) -> bool:
        """Whether each query certainly belongs to the key beside it."""
        if self.cu_seqlens_q is not None or self.cu_seqlens_k is not None:
            return self.cu_seqlens_q is self.cu_seqlens_k
        return self.k is not None and self.q.shape[:2] == self.k.shape[:2]


class _Rotary(NamedTuple):
    """A rotation of keys and queries by their positions."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    starts: Tensor | None
    """(B,), positions of the first new tokens; None: after the keys before."""


def _append(
    new: _New,
    cache: _Cache,
    rotary: _Rotary,
    is_local: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """Appends, and returns the rotated queries; without is_local all have the position of the first."""
    k, v = new.k, new.v
    if k is None or v is None:
        missing, other = ("k", "v") if k is None else ("v", "k")
        raise ArgumentError(missing, None, f"it must be given beside {other}")
    turns = rotary.cos is not None or rotary.sin is not None
    positions = rotary.starts
    if turns and positions is not None:
        positions = _positions(k, new.cu_seqlens_k, positions, advance=True)
    at_once = turns and new.are_the_same_tokens() and (is_local or (k.dim() == 4 and k.shape[1] == 1))
    rotated = append_kvcache(
        k,
        v,
        cache.k,
        cache.v,
        block_table=cache.table,
        seqused_k=cache.lengths,
        cu_seqlens=new.cu_seqlens_k,
        q=new.q if at_once else None,
        positions=positions,
        cos=rotary.cos,
        sin=rotary.sin,
        interleaved=rotary.interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if rotated is not None:
        return rotated
    return _rotated(new, cache, rotary, is_local) if turns else new.q


def _rotated(new: _New, cache: _Cache, rotary: _Rotary, is_local: bool) -> Tensor:
    """Queries with positions of their own, rotated by an append that stores nothing."""
    q, starts = new.q, cache.lengths if rotary.starts is None else rotary.starts
    assert starts is not None, "checked by the append"
    positions = _positions(q, new.cu_seqlens_q, starts, advance=is_local)
    nowhere = positions.new_full(positions.shape, -1)
    k, Dv = q[..., : cache.k.shape[2], :], cache.v.shape[3]
    v = q.new_zeros(()).expand(*k.shape[:-1], Dv)
    rotated = append_kvcache(
        k,
        v,
        cache.k,
        cache.v,
        slot_mapping=nowhere,
        q=q,
        positions=positions,
        cos=rotary.cos,
        sin=rotary.sin,
        interleaved=rotary.interleaved,
    )
    assert rotated is not None
    return rotated


def _positions(x: Tensor, cu_seqlens: Tensor | None, starts: Tensor, *, advance: bool) -> Tensor:
    """The positions of tokens, (T,), that begin at `starts` (B,) and advance or do not."""
    if cu_seqlens is None:
        index = torch.arange(x.shape[1], device=x.device) * int(advance)
        return (starts[:, None] + index).flatten()
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).clamp(max=len(starts) - 1)
    return starts[sequence] + (token - cu_seqlens[sequence]) * int(advance)


def _as_table(cache_batch_idx: Tensor, table: Tensor | None) -> Tensor:
    """The block table (B, 1) of sequences that each have one page: an entry of a dense cache."""
    if table is not None:
        limit = "with a block_table it must be None: the table says where keys are"
        raise ArgumentError("cache_batch_idx", arguments.shown(cache_batch_idx), limit)
    if not isinstance(cache_batch_idx, Tensor):
        raise ArgumentError("cache_batch_idx", arguments.shown(cache_batch_idx), "it must be a tensor")
    if cache_batch_idx.dtype not in (torch.int32, torch.int64):
        raise DtypeError("cache_batch_idx", cache_batch_idx.dtype, "it must be int32")
    if cache_batch_idx.dim() != 1:
        raise ShapeError("cache_batch_idx", tuple(cache_batch_idx.shape), "it must be (B,)")
    return cache_batch_idx.to(torch.int32)[:, None]


def _lengths(
    cache_seqlens: int | Tensor | None, k_cache: Tensor, table: Tensor | None, has_new: bool
) -> Tensor | None:
    """The keys of each sequence before the append, as `_Cache` has them."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is None and has_new:
        raise ArgumentError("cache_seqlens", None, "with k it must say how many keys there are before")
    if cache_seqlens is None and table is None:
        return None
    room = k_cache.shape[1] if table is None else k_cache.shape[1] * table.shape[1]
    number = room if cache_seqlens is None else cache_seqlens
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise ArgumentError("cache_seqlens", arguments.shown(number), "it must be a tensor, an int or None")
    if not 0 <= number <= room:
        raise RangeError("cache_seqlens", number, f"there is room for 0 to {room} keys")
    B = k_cache.shape[0] if table is None else table.shape[0]
    return torch.full((B,), number, dtype=torch.int32, device=k_cache.device)


def _one_of(**values: Tensor | None) -> tuple[str, Tensor | None]:
    """The name and the value of the argument that is given, of several names for one thing."""
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise ArgumentError(second, arguments.shown(given[second]), f"it must be None beside {first}")
    return next(iter(given.items()), (next(iter(values)), None))
