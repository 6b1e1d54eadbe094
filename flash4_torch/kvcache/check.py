"""Checks of arguments about KV caches; each error names the argument, its value and the limit."""

from __future__ import annotations

import reprlib

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError, LayoutError, RangeError, ShapeError
from ..ops.check import DTYPES, is_one_of, max_seqlen
from ..ops.kvcache import scale_of_heads
from . import arguments
from .arguments import FLOAT8


def tensors(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        arguments.tensor(name, x)


def caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Requires caches that fit q (T, Hq, D) or (B, Sq, Hq, D), and each other."""
    if q.dim() not in (3, 4):
        raise ShapeError("q", tuple(q.shape), "it must be (T, Hq, D) or (B, Sq, Hq, D)")
    arguments.dtype("q", q, DTYPES)
    pair(k_cache, v_cache)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        arguments.tensor(name, cache, device=q.device, of="q's")
        if cache.dtype not in (q.dtype, FLOAT8):
            raise DtypeError(name, cache.dtype, f"it must have q's dtype, {q.dtype}, or be float8_e4m3fn")
    if q.shape[-1] != k_cache.shape[-1]:
        raise ShapeError("k_cache", tuple(k_cache.shape), f"its last dimension must be q's, {q.shape[-1]}")
    Hq, Hk = q.shape[-2], k_cache.shape[2]
    if Hk < 1 or Hq < 1 or Hq % Hk:
        hint = "(pages, page_size, Hk, D): transpose(1, 2) makes that of (pages, Hk, page_size, D)"
        limit = f"its {Hq} heads must be a positive multiple of the {Hk} of k_cache, {hint}"
        raise ShapeError("q", tuple(q.shape), limit)


def pair(k_cache: Tensor, v_cache: Tensor) -> None:
    """Requires caches (pages, page_size, Hk, D) and (pages, page_size, Hk, Dv) of one dtype."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or 0 in cache.shape[1:]:
            limit = "it must be (pages, page_size, Hk, D), or (B, S, Hk, D) without block_table, of no size 0"
            raise ShapeError(name, tuple(cache.shape), limit)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        limit = f"all but its last dimension must be k_cache's, {tuple(k_cache.shape[:3])}"
        raise ShapeError("v_cache", tuple(v_cache.shape), limit)
    if k_cache.dtype != v_cache.dtype:
        raise DtypeError("v_cache", v_cache.dtype, f"it must have k_cache's dtype, {k_cache.dtype}")


def sequences(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    seqused_k: Tensor | None,
) -> int:
    """The number of sequences, on which all arguments must agree."""
    if block_table is not None:
        integers("block_table", block_table, q)
        if block_table.dim() != 2:
            raise ShapeError("block_table", tuple(block_table.shape), "it must be (B, blocks)")
        if seqused_k is None:
            raise ArgumentError("seqused_k", None, "with block_table it must say how many keys there are")
    if q.dim() == 4:
        B, whose = q.shape[0], "q's batch size"
        if cu_seqlens_q is not None:
            raise ArgumentError("cu_seqlens_q", _shape(cu_seqlens_q), "it goes with packed q, (T, Hq, D)")
    else:
        if cu_seqlens_q is None:
            raise ArgumentError("cu_seqlens_q", None, "packed q, (T, Hq, D), needs it")
        integers("cu_seqlens_q", cu_seqlens_q, q)
        if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
            raise ShapeError("cu_seqlens_q", tuple(cu_seqlens_q.shape), "it must be (B + 1,)")
        B, whose = cu_seqlens_q.shape[0] - 1, "which cu_seqlens_q has one more of"
    if block_table is not None and block_table.shape[0] != B:
        limit = f"it must be (B, blocks), with B = {B}, {whose}"
        raise ShapeError("block_table", tuple(block_table.shape), limit)
    if block_table is None and k_cache.shape[0] < B:
        limit = f"without block_table it must have an entry for each of B = {B} sequences, {whose}"
        raise ShapeError("k_cache", tuple(k_cache.shape), limit)
    if seqused_k is not None:
        integers("seqused_k", seqused_k, q)
        if tuple(seqused_k.shape) != (B,):
            raise ShapeError("seqused_k", tuple(seqused_k.shape), f"it must be (B,), with B = {B}, {whose}")
    return B


def integers(name: str, x: Tensor, q: Tensor) -> None:
    """Requires int32 on q's device; nobody reads them here."""
    arguments.tensor(name, x, device=q.device, of="q's")
    arguments.dtype(name, x, (torch.int32,))


def max_seqlen_q(value: int | Tensor | None, q: Tensor) -> int:
    """The most tokens of a sequence: a bound if q is packed, else their number."""
    if q.dim() == 3:
        return max_seqlen("max_seqlen_q", value, q.shape[0])
    if value is not None and value != q.shape[1]:
        limit = f"q (B, Sq, Hq, D) has {q.shape[1]} tokens of each sequence"
        raise RangeError("max_seqlen_q", reprlib.repr(value), limit)
    return q.shape[1]


def causal_flags(causal: bool | Tensor, B: int, q: Tensor) -> Tensor | None:
    """The flags as int32, or None for a bool."""
    if not isinstance(causal, Tensor):
        return None
    arguments.tensor("causal", causal, device=q.device, of="q's")
    arguments.dtype("causal", causal, (torch.bool, torch.int32))
    arguments.shape("causal", causal, (B,), "a bool, or (B,)")
    return causal.to(torch.int32)


def cache_scale(name: str, value: Tensor | None, cache: Tensor, B: int, Hk: int) -> Tensor | None:
    """The scale as a view (B, Hk); None only if the cache has no 8-bit numbers."""
    if cache.dtype != FLOAT8:
        if value is not None:
            limit = f"it goes with a float8 cache, and this one is {cache.dtype}"
            raise ArgumentError(name, _shape(value), limit)
        return None
    if value is not None:
        arguments.tensor(name, value, device=cache.device, of="the cache's")
        arguments.dtype(name, value, (torch.float32,))
        if not is_one_of(tuple(value.shape), (), (1,), (Hk,), (B, Hk), (B, 1)):
            raise ShapeError(name, tuple(value.shape), f"it must be (), (Hk,) or (B, Hk), ({B}, {Hk})")
    return scale_of_heads(value, cache, B, Hk)


def num_splits(value: int | None) -> int:
    """The number, or 0 for the backend's choice."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ArgumentError("num_splits", reprlib.repr(value), "it must be an int or None")
    if not 1 <= value <= 1 << 30:
        raise RangeError("num_splits", value, "it must be from 1 to 2**30; None leaves it to us")
    return value


def out(target: Tensor, q: Tensor, v_cache: Tensor) -> Tensor:
    """The tensor to write to."""
    arguments.tensor("out", target, device=q.device, of="q's")
    arguments.dtype("out", target, (q.dtype,))
    arguments.shape("out", target, (*q.shape[:-1], v_cache.shape[-1]), "like q, with Dv columns")
    if any(size > 1 and not stride for size, stride in zip(target.shape, target.stride(), strict=True)):
        raise LayoutError("out", target.stride(), "elements must be apart, not an expanded tensor's")
    if q.dim() == 4 and not _is_viewable(target):
        limit = "its first two dimensions must be one: flatten(0, 1) must be a view"
        raise LayoutError("out", target.stride(), limit)
    return target


def _is_viewable(x: Tensor) -> bool:
    return 0 in x.shape[:2] or x.shape[0] == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _shape(x: object) -> object:
    return f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else reprlib.repr(x)
