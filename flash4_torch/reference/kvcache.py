"""The definitions of what is done around a KV cache, in plain torch: appending to it, and merging results.

They run on any device, and on a GPU without waiting for it. Sums, rotations and scales are computed in
float32 (float64 for float64), and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .scoring import working_dtype

FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max


class Append(NamedTuple):
    """Tensors of one append; T = n * S tokens, and as many sequences as seqused_k has lengths."""

    k: Tensor
    """(n, S, Hk, D); n is 1 if cu_seqlens divides the tokens among sequences."""
    v: Tensor
    """(n, S, Hk, Dv)"""
    k_cache: Tensor
    """(pages, page_size, Hk, D); without block_table or slot_mapping a page is a sequence."""
    v_cache: Tensor
    slot_mapping: Tensor | None = None
    """(T,); without it the following three say where keys go."""
    block_table: Tensor | None = None
    """(sequences, blocks)"""
    seqused_k: Tensor | None = None
    """(sequences,), at least one."""
    cu_seqlens: Tensor | None = None
    """(sequences + 1,)"""
    positions: Tensor | None = None
    """(T,)"""
    cos: Tensor | None = None
    """(positions, R / 2)"""
    sin: Tensor | None = None
    interleaved: bool = False
    k_scale: Tensor | None = None
    """(sequences, Hk), of slots (1, Hk)"""
    v_scale: Tensor | None = None
    q: Tensor | None = None
    """(n, S, Hq, D)"""
    q_out: Tensor | None = None


class Places(NamedTuple):
    """Each token's sequence, its place among the keys of that sequence, and its row in the cache."""

    sequence: Tensor
    key: Tensor
    """Any number if slots say where tokens go."""
    page: Tensor
    row: Tensor
    is_stored: Tensor
    """Whether there is such a row."""


def append(x: Append) -> None:
    """Writes k and v to their places in the caches, and rotated q to q_out.

    Tokens without a place are skipped, and positions are clamped to the rows of cos and sin.
    """
    places = places_of(x)
    k, v = x.k.flatten(0, 1), x.v.flatten(0, 1)
    if x.cos is not None and x.sin is not None:
        position = places.key if x.positions is None else x.positions
        position = position.clamp(0, x.cos.shape[0] - 1)
        cos, sin = x.cos[position], x.sin[position]
        k = rotated(k, cos, sin, x.interleaved)
        if x.q is not None and x.q_out is not None:
            q = rotated(x.q.flatten(0, 1), cos, sin, x.interleaved)
            x.q_out.copy_(q.unflatten(0, x.q.shape[:2]))
    for cache, rows, scale in ((x.k_cache, k, x.k_scale), (x.v_cache, v, x.v_scale)):
        if cache.numel() and rows.numel():
            own = None if scale is None else scale[places.sequence]
            _store(cache, stored(rows, cache.dtype, own), places)


def places_of(x: Append) -> Places:
    n, S = x.k.shape[:2]
    pages, page_size = x.k_cache.shape[:2]
    if x.slot_mapping is not None:
        slot = x.slot_mapping.long()
        nothing = torch.zeros_like(slot)
        if page_size == 0:
            return Places(nothing, nothing, nothing, nothing, slot < 0)
        is_stored = (slot >= 0) & (slot < pages * page_size)
        return Places(nothing, nothing, slot // page_size, slot % page_size, is_stored)
    if x.seqused_k is None:
        raise AssertionError("without slots there are lengths")
    sequence, index, is_stored = _tokens(n * S, S, x.cu_seqlens, x.k.device)
    key = x.seqused_k.long()[sequence] + index
    page, row, room = sequence, key, page_size
    if x.block_table is not None:
        blocks = x.block_table.shape[1]
        room = blocks * page_size
        if room:
            block = key.div(page_size, rounding_mode="floor").clamp(0, blocks - 1)
            page, row = x.block_table.long()[sequence, block], key % page_size
    is_stored = is_stored & (key >= 0) & (key < room) & (page >= 0) & (page < pages)
    return Places(sequence, key, page, row, is_stored)


def _tokens(
    count: int, each: int, cu_seqlens: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's sequence, its index in it, and whether it belongs to one."""
    number = torch.arange(count, device=device)
    if cu_seqlens is None:
        sequence = number // max(each, 1)
        return sequence, number - sequence * each, torch.ones_like(number, dtype=torch.bool)
    ends = cu_seqlens.long().contiguous()
    sequence = (torch.searchsorted(ends, number, right=True) - 1).clamp(0, len(ends) - 2)
    index = number - ends[sequence]
    return sequence, index, (index >= 0) & (number < ends[sequence + 1])


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first R columns of x (T, H, D), rotated by cos and sin (T, R / 2), in the dtype of sums.

    interleaved: columns 2i and 2i + 1 are a pair; otherwise i and R / 2 + i.
    """
    x = x.to(working_dtype(x.dtype))
    R = 2 * cos.shape[-1]
    cos, sin = (angle.to(x.dtype)[:, None] for angle in (cos, sin))
    a, b = (x[..., :R:2], x[..., 1:R:2]) if interleaved else x[..., :R].chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([pairs, x[..., R:]], -1)


def stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """x (T, H, D) as a cache of this dtype holds it: an 8-bit one divided by scale (T, H), saturating."""
    if dtype != FLOAT8:
        return x.to(dtype)
    x = x.to(working_dtype(x.dtype))
    if scale is not None:
        x = x / scale[..., None]
    return x.clamp(-_LARGEST, _LARGEST).to(dtype)


def _store(cache: Tensor, numbers: Tensor, places: Places) -> None:
    """Writes each token's numbers (T, H, D) to its row of the cache, if it has one."""
    if cache.dtype == FLOAT8:
        cache, numbers = cache.view(torch.uint8), numbers.view(torch.uint8)
    store = _store_some if cache.device.type == "cpu" else _store_without_waiting
    store(cache, numbers, places)


def _store_some(cache: Tensor, numbers: Tensor, places: Places) -> None:
    """Picks the tokens that have a row; of a GPU the host would have to wait for their number."""
    if places.is_stored.all():
        cache[places.page, places.row] = numbers
    else:
        cache[places.page[places.is_stored], places.row[places.is_stored]] = numbers[places.is_stored]


def _store_without_waiting(cache: Tensor, numbers: Tensor, places: Places) -> None:
    """Lets tokens without a row write what some token with a row writes; if there is none, what was there."""
    some = places.is_stored.any()
    token = torch.arange(len(numbers), device=cache.device)
    token = torch.where(places.is_stored, token, places.is_stored.to(torch.uint8).argmax())
    page, row = (torch.where(some, x[token], 0) for x in (places.page, places.row))
    cache[page, row] = torch.where(some, numbers[token], cache[0, 0])


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Partial results, merged: (out (B, Sq, Hq, Dv), lse (B, Hq, Sq)).

    outs: tensors (N, B, Sq, Hq, Dv), each with parts of its own; lses, one for each: (N, B, Hq, Sq).
    """
    parts, lse = (x[0] if len(x) == 1 else torch.cat(tuple(x)) for x in (outs, lses))
    if not len(parts):
        return parts.new_zeros(parts.shape[1:]), lse.new_full(lse.shape[1:], -torch.inf)
    work = working_dtype(parts.dtype)
    lse = lse.to(work)
    highest = lse.amax(0)
    highest = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(lse - highest)
    total = weights.sum(0)
    merged = highest + torch.log(total)
    weights, has_keys = weights.transpose(-1, -2)[..., None], (lse != -torch.inf).transpose(-1, -2)[..., None]
    out = torch.zeros(parts.shape[1:], dtype=work, device=parts.device)
    for n in range(len(parts)):
        out += torch.where(has_keys[n], parts[n].to(work), 0.0) * weights[n]
    total = total.transpose(-1, -2)[..., None]
    return (out / torch.where(total == 0.0, 1.0, total)).to(parts.dtype), merged
