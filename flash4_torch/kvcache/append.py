"""`append_kvcache`: the checks of its arguments, and the call of the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError, ShapeError
from ..fast_path import append as fast_path
from ..ops import check, kvcache_append
from ..ops.autograd import refuse_tangents
from ..ops.keywords import hides_unknown, no_argument
from . import arguments
from .arguments import FLOAT8

if TYPE_CHECKING:
    from typing_extensions import Unpack

_INT32, _INDEX = (torch.int32,), (torch.int32, torch.int64)


class _Options(TypedDict, total=False):
    """Keywords that do not affect the return type."""

    slot_mapping: Tensor | None
    block_table: Tensor | None
    seqused_k: Tensor | None
    cu_seqlens: Tensor | None
    positions: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    k_scale: Tensor | None
    v_scale: Tensor | None


@overload
def append_kvcache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q: None = None,
    q_out: None = None,
    **options: Unpack[_Options],
) -> None: ...
@overload
def append_kvcache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q: Tensor,
    q_out: Tensor | None = None,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def append_kvcache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q: Tensor | None,
    q_out: Tensor | None = None,
    **options: Unpack[_Options],
) -> Tensor | None: ...
@hides_unknown
def append_kvcache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    slot_mapping: Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    q: Tensor | None = None,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_out: Tensor | None = None,
    **unknown: Any,
) -> Any:
    """Writes new keys and values into a KV cache, and rotates them and their queries on the way.

    Either slot_mapping says where each token goes, or seqused_k does, and then token i of sequence b becomes
    key seqused_k[b] + i. seqused_k itself stays as it is. The host does not read numbers on a GPU: a token
    whose slot, key or page does not exist is skipped there, and writes nothing; on the CPU it is an error.
    If two tokens have the same row, either of them is there afterwards.

    Args:
        k: new keys of T tokens, packed (T, Hk, D), or (B, S, Hk, D); bfloat16, float16, float32 or float64,
            any strides.
        v: their values, (T, Hk, Dv) or (B, S, Hk, Dv).
        k_cache: pages (pages, page_size, Hk, D), or with seqused_k and without block_table one entry for each
            sequence, (B, keys, Hk, D). Any strides, also a view of a cache of both. Of k's dtype, or
            float8_e4m3fn. It is written to.
        v_cache: the same for values, (..., Hk, Dv), of k_cache's dtype.
        slot_mapping: (T,) or (B, S), int32 or int64. Token t goes to row slot % page_size of page
            slot // page_size; a negative slot skips it.
        block_table: (B, blocks), int32. Key j of sequence b is row j % page_size of page
            block_table[b, j // page_size].
        seqused_k: (B,), int32, the number of keys that each sequence had before.
        cu_seqlens: (B + 1,), int32, with seqused_k and packed k: sequence b has tokens cu_seqlens[b] to
            cu_seqlens[b + 1] - 1. Tokens after the last sequence are skipped.
        q: the tokens' queries, (T, Hq, D) or (B, S, Hq, D), of k's dtype, to be rotated.
        positions: (T,) or (B, S), int32 or int64: rows of cos and sin. One that does not exist is clamped on
            a GPU, and a RangeError on a CPU. Default: the tokens' places among the keys of their sequences,
            which slot_mapping does not tell.
        cos: (positions, R / 2), of k's dtype or float32, any strides. The first R columns of keys and queries
            are rotated, R <= D. Default: none.
        sin: the same.
        interleaved: columns 2 i and 2 i + 1 are a pair (GPT-J). Default: columns i and R / 2 + i (NeoX).
        k_scale: float32, (), (Hk,), or with seqused_k (B, Hk), for a float8_e4m3fn cache: it holds
            k / k_scale, rounded, and what is beyond its range becomes its largest number. Default: 1.
        v_scale: the same for v.
        q_out: where rotated q goes, like q; it may be q itself. Default: a new tensor.

    Returns:
        Rotated q, or None without q. Tokens of no sequence are rotated by an unspecified angle.

    Raises:
        ArgumentError: an argument is outside its limits; the message names it, its value and the limit.
        KeywordError: there is no such argument; the message says what to use instead.
        NoGradientError: in a backward (the caches have no history), or if an argument has a tangent.
    """
    if unknown:
        raise no_argument(append_kvcache, unknown)
    tensors = fast_path.Tensors(
        k,
        v,
        k_cache,
        v_cache,
        q,
        cos,
        sin,
        k_scale,
        v_scale,
        q_out,
        slot_mapping,
        block_table,
        seqused_k,
        cu_seqlens,
        positions,
    )
    refuse_tangents("append_kvcache", tensors)
    place, call = fast_path.lookup(tensors, interleaved)
    if call is not None:
        return call(tensors)
    _check_rows(k, v, k_cache, v_cache)
    sequences = _check_places(k, k_cache, slot_mapping, block_table, seqused_k, cu_seqlens)
    _check_rotary(k, slot_mapping, q, positions, cos, sin, q_out)
    check.flag("interleaved", interleaved)
    k_scale = _scale("k_scale", k_scale, k_cache, sequences)
    v_scale = _scale("v_scale", v_scale, v_cache, sequences)
    in_place = q_out is q
    if q is not None and q_out is None:
        q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kvcache_append.append_kvcache(
        k,
        v,
        k_cache,
        v_cache,
        None if slot_mapping is None else slot_mapping.reshape(-1),
        block_table,
        seqused_k,
        cu_seqlens,
        None if in_place else q,
        None if positions is None else positions.reshape(-1),
        cos,
        sin,
        interleaved,
        k_scale,
        v_scale,
        q_out,
    )
    fast_path.record(place, tensors, interleaved)
    if q is None or q_out is None:
        return None
    return kvcache_append.without_gradient("append_kvcache", q_out, (q, k, v))


def _check_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    arguments.tensor("k", k)
    arguments.dtype("k", k, check.DTYPES)
    if k.dim() not in (3, 4):
        raise ShapeError("k", tuple(k.shape), "it must be (T, Hk, D), or (B, S, Hk, D)")
    arguments.tensor("v", v, device=k.device)
    if v.dtype != k.dtype:
        raise DtypeError("v", v.dtype, f"it must have k's dtype, {k.dtype}")
    if v.dim() != k.dim() or v.shape[:-1] != k.shape[:-1]:
        limit = f"all but its last dimension must be k's, {tuple(k.shape[:-1])}"
        raise ShapeError("v", tuple(v.shape), limit)
    if k.shape[-1] < 1 or v.shape[-1] < 1 or k.shape[-2] < 1:
        shapes = (tuple(k.shape), tuple(v.shape))
        raise ShapeError("k, v", shapes, "the heads and their dimensions must be at least 1")
    for name, cache, rows in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
        arguments.tensor(name, cache, device=k.device)
        if cache.dtype not in (k.dtype, FLOAT8):
            raise DtypeError(name, cache.dtype, f"it must have k's dtype, {k.dtype}, or be float8_e4m3fn")
        heads = tuple(rows.shape[-2:])
        if cache.dim() != 4 or tuple(cache.shape[2:]) != heads:
            limit = f"it must have four dimensions, and the last two must be {name[0]}'s, {heads}"
            raise ShapeError(name, tuple(cache.shape), limit)
    if v_cache.dtype != k_cache.dtype:
        raise DtypeError("v_cache", v_cache.dtype, f"it must have k_cache's dtype, {k_cache.dtype}")
    if v_cache.shape[:2] != k_cache.shape[:2]:
        limit = f"its first two dimensions must be k_cache's, {tuple(k_cache.shape[:2])}"
        raise ShapeError("v_cache", tuple(v_cache.shape), limit)


def _check_places(
    k: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor | None,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    cu_seqlens: Tensor | None,
) -> int | None:
    """Returns the number of sequences, or None if slots say where tokens go."""
    if (slot_mapping is None) == (seqused_k is None):
        value = "neither given" if seqused_k is None else "both given"
        raise ArgumentError("slot_mapping, seqused_k", value, "one of them must say where the tokens go")
    if slot_mapping is not None:
        for name, x in (("block_table", block_table), ("cu_seqlens", cu_seqlens)):
            if x is not None:
                raise ArgumentError(name, "given", "with slot_mapping there is nothing for it to say")
        _each_token("slot_mapping", slot_mapping, k)
        return None
    assert seqused_k is not None
    arguments.tensor("seqused_k", seqused_k, device=k.device)
    arguments.dtype("seqused_k", seqused_k, _INT32)
    if k.dim() == 4:
        if cu_seqlens is not None:
            raise ArgumentError("cu_seqlens", "given", "it divides packed tokens, and k is (B, S, Hk, D)")
        B = k.shape[0]
    else:
        if cu_seqlens is None:
            raise ArgumentError(
                "cu_seqlens", None, "it must divide the tokens of k (T, Hk, D) among sequences"
            )
        arguments.tensor("cu_seqlens", cu_seqlens, device=k.device)
        arguments.dtype("cu_seqlens", cu_seqlens, _INT32)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ShapeError("cu_seqlens", tuple(cu_seqlens.shape), "it must be (B + 1,)")
        B = cu_seqlens.shape[0] - 1
    arguments.shape("seqused_k", seqused_k, (B,), "(B,)")
    if block_table is not None:
        arguments.tensor("block_table", block_table, device=k.device)
        arguments.dtype("block_table", block_table, _INT32)
        if block_table.dim() != 2 or block_table.shape[0] != B:
            raise ShapeError("block_table", tuple(block_table.shape), f"it must be (B, blocks) with B = {B}")
    elif k_cache.shape[0] != B:
        limit = f"without block_table it must have an entry for each of the {B} sequences"
        raise ShapeError("k_cache", tuple(k_cache.shape), limit)
    return B


def _each_token(name: str, x: Tensor, k: Tensor) -> None:
    """Requires an index for each token."""
    arguments.tensor(name, x, device=k.device)
    arguments.dtype(name, x, _INDEX)
    leading = tuple(k.shape[:-2])
    T = k.shape[0] if k.dim() == 3 else k.shape[0] * k.shape[1]
    if not check.is_one_of(tuple(x.shape), (T,), leading):
        shapes = f"(T,) = ({T},)" + (f" or (B, S) = {leading}" if k.dim() == 4 else "")
        raise ShapeError(name, tuple(x.shape), f"it must be {shapes}")


def _check_rotary(
    k: Tensor,
    slot_mapping: Tensor | None,
    q: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_out: Tensor | None,
) -> None:
    if (cos is None) != (sin is None):
        missing, other = ("cos", "sin") if cos is None else ("sin", "cos")
        raise ArgumentError(missing, None, f"a rotation needs it beside {other}")
    if cos is None or sin is None:
        for name, x in (("q", q), ("positions", positions)):
            if x is not None:
                raise ArgumentError(name, "given", "without cos and sin nothing is rotated")
    else:
        D = k.shape[-1]
        for name, table in (("cos", cos), ("sin", sin)):
            arguments.tensor(name, table, device=k.device)
            arguments.dtype(name, table, tuple(dict.fromkeys((k.dtype, torch.float32))))
            if table.dim() != 2 or table.shape[0] < 1 or not 2 <= 2 * table.shape[1] <= D:
                limit = f"it must be (positions, R / 2), with R from 2 to D = {D}"
                raise ShapeError(name, tuple(table.shape), limit)
        if sin.dtype != cos.dtype:
            raise DtypeError("sin", sin.dtype, f"it must have cos's dtype, {cos.dtype}")
        arguments.shape("sin", sin, tuple(cos.shape), "cos's")
        if positions is not None:
            _each_token("positions", positions, k)
        elif slot_mapping is not None:
            raise ArgumentError("positions", None, "slot_mapping does not tell the positions of tokens")
    if q is None:
        if q_out is not None:
            raise ArgumentError("q_out", "given", "without q there is nothing to put there")
        return
    arguments.tensor("q", q, device=k.device)
    if q.dtype != k.dtype:
        raise DtypeError("q", q.dtype, f"it must have k's dtype, {k.dtype}")
    tokens, D = tuple(k.shape[:-2]), k.shape[-1]
    if q.dim() != k.dim() or tuple(q.shape[:-2]) != tokens or q.shape[-1] != D:
        limit = f"it must have k's tokens, {tokens}, and its last dimension, {D}"
        raise ShapeError("q", tuple(q.shape), limit)
    if q_out is not None and q_out is not q:
        arguments.tensor("q_out", q_out, device=k.device)
        if q_out.dtype != q.dtype:
            raise DtypeError("q_out", q_out.dtype, f"it must have q's dtype, {q.dtype}")
        arguments.shape("q_out", q_out, tuple(q.shape), "q's shape")


def _scale(name: str, scale: Tensor | None, cache: Tensor, sequences: int | None) -> Tensor | None:
    """The scale as (sequences, Hk), not copied."""
    if scale is None:
        return None
    arguments.tensor(name, scale, device=cache.device)
    arguments.dtype(name, scale, (torch.float32,))
    if cache.dtype != FLOAT8:
        raise ArgumentError(
            name, "given", f"only a float8_e4m3fn cache has a scale, and this is {cache.dtype}"
        )
    Hk = cache.shape[2]
    allowed: list[tuple[int, ...]] = [(), (Hk,)]
    if sequences is not None:
        allowed.append((sequences, Hk))
    if not check.is_one_of(tuple(scale.shape), *allowed):
        letters = "(), (Hk,)" if sequences is None else "(), (Hk,) or (B, Hk)"
        raise ShapeError(name, tuple(scale.shape), f"it must be {letters}: one of {allowed}")
    return scale.expand(1 if sequences is None else max(sequences, 1), Hk)
