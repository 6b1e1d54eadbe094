"""The fallback: keys and values are gathered from the cache by torch, and any backend attends to them.

On a CPU sequences come one after another. Elsewhere the host does not know their lengths, so all are gathered
up to the bound `max_seqlen_k`, with a mask, in memory for all of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kvcache_problem import CacheInputs, CacheProblem
from ...masks import Band
from ...problem import Extent, Inputs, Problem, Spec, allows_tf32, dtype_key, mask_key
from ...reference.scoring import working_dtype
from .. import dispatch
from ..base import Results
from .base import CacheLaunch


class Gathered:
    name = "gathered"

    def why_not(self, problem: CacheProblem) -> list[str]:
        if problem.spec.batch_invariant and problem.spec.device != "cpu":
            return ["batch_invariant is True, and torch's kernels may choose their sums by the batch"]
        return []

    def attend(self, inputs: CacheInputs, problem: CacheProblem, out: Tensor | None) -> tuple[Tensor, Tensor]:
        q, extent = inputs.q, problem.extent
        if out is None:
            out = q.new_empty(extent.T, extent.Hq, problem.spec.Dv)
        lse = q.new_empty(extent.Hq, extent.T, dtype=working_dtype(q.dtype))
        if extent.B and extent.T and extent.max_seqlen_q:
            (_by_sequence if problem.spec.device == "cpu" else _all_at_once)(inputs, problem, out, lse)
        return out, lse

    def prepare(self, inputs: CacheInputs, problem: CacheProblem, out: Tensor | None) -> CacheLaunch:
        extent = problem.extent

        def launch(inputs: CacheInputs, out: Tensor | None) -> tuple[Tensor, Tensor]:
            return self.attend(inputs, problem.of_sizes(extent._replace(T=len(inputs.q))), out)

        return launch


def _by_sequence(inputs: CacheInputs, problem: CacheProblem, out: Tensor, lse: Tensor) -> None:
    B, T, Sq = problem.extent.B, problem.extent.T, problem.extent.max_seqlen_q
    starts = range(0, T + 1, Sq) if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.tolist()
    room = _room(inputs)
    lengths = [room] * B if inputs.seqused_k is None else inputs.seqused_k.tolist()
    causal = [True] * B if inputs.causal is None else inputs.causal.tolist()
    if _is_one_batch(inputs, problem, lengths):
        k, v = (x[:B, : lengths[0]] for x in (inputs.k_cache, inputs.v_cache))
        q = inputs.q.view(B, Sq, *inputs.q.shape[1:])
        results = _attend(q, k, v, problem.band, inputs, problem)
        out.copy_(results.out.flatten(0, 1))
        lse.copy_(results.lse.transpose(0, 1).flatten(1, 2))
        return
    for b in range(B):
        tokens = slice(starts[b], min(starts[b + 1], starts[b] + Sq))
        if tokens.stop <= tokens.start:
            continue
        band = problem.band if causal[b] else problem.band._replace(right=None)
        k, v = _keys(inputs, b, min(max(lengths[b], 0), room))
        q = inputs.q[None, tokens]
        if problem.spec.batch_invariant:
            _one_by_one(q, k, v, band, inputs, problem, out[tokens], lse[:, tokens])
        else:
            results = _attend(q, k, v, band, inputs, problem)
            out[tokens], lse[:, tokens] = results.out[0], results.lse[0]


def _is_one_batch(inputs: CacheInputs, problem: CacheProblem, lengths: list[int]) -> bool:
    """Whether the tensors are a batch of sequences of one length as they are."""
    one_form = inputs.block_table is None and inputs.cu_seqlens_q is None and inputs.causal is None
    plain = not problem.spec.batch_invariant and inputs.k_cache.dtype == inputs.q.dtype
    return one_form and plain and len(inputs.q) > 0 and len(set(lengths)) == 1 and lengths[0] >= 0


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    inputs: CacheInputs,
    problem: CacheProblem,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend with one token at a time to the keys that it sees: no sum depends on other tokens."""
    Sq, Sk = q.shape[1], k.shape[1]
    for i in range(Sq):
        seen = band.keys(range(i, i + 1), Sq, Sk)
        keys = slice(seen.start, max(seen.stop, seen.start))
        results = _attend(q[:, i : i + 1], k[:, keys], v[:, keys], Band(None, None), inputs, problem)
        out[i], lse[:, i] = results.out[0, 0], results.lse[0, :, 0]


def _keys(inputs: CacheInputs, b: int, length: int) -> tuple[Tensor, Tensor]:
    """The first keys and values of a sequence, (1, length, Hk, D) and (1, length, Hk, Dv)."""
    if inputs.block_table is None:
        k, v = inputs.k_cache[b, :length], inputs.v_cache[b, :length]
    else:
        pages, page_size = inputs.k_cache.shape[:2]
        table = inputs.block_table[b, : -(-length // page_size)].clamp(0, pages - 1)
        k, v = (x[table].flatten(0, 1)[:length] for x in (inputs.k_cache, inputs.v_cache))
    entry = slice(b, b + 1)
    dtype = working_dtype(inputs.q.dtype)
    return _scaled(k[None], inputs.k_scale, entry, dtype), _scaled(v[None], inputs.v_scale, entry, dtype)


def _scaled(x: Tensor, scale: Tensor | None, entries: slice, dtype: torch.dtype) -> Tensor:
    """What a cache (B, S, Hk, D) stands for; numbers of 8 bits in the dtype."""
    if x.dtype.itemsize > 1:
        return x
    x = x.to(dtype)
    return x if scale is None else x * scale[entries, None, :, None]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    inputs: CacheInputs,
    problem: CacheProblem,
    mask: Tensor | None = None,
) -> Results:
    """Attention of dense tensors, by the backend that serves it."""
    spec = problem.spec
    if q.dtype != k.dtype:
        q = q.to(k.dtype)
    extent = Extent(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    dense = Spec(
        device=spec.device,
        dtype=q.dtype,
        D=spec.D,
        Dv=spec.Dv,
        group=spec.group,
        varlen=False,
        left=band.left is not None,
        right=band.right is not None,
        softcap=spec.softcap,
        mask=mask_key(mask),
        dropout=False,
        deterministic=False,
        sinks=dtype_key(inputs.sinks),
        capability=spec.capability,
        tf32=allows_tf32(q.dtype),
    )
    of_dense = Problem(dense, extent, problem.scale, band, problem.softcap, 0.0)
    return dispatch.choose(of_dense).forward(Inputs(q, k, v, mask, inputs.sinks), of_dense)


def _all_at_once(inputs: CacheInputs, problem: CacheProblem, out: Tensor, lse: Tensor) -> None:
    """Write the rows of all tokens; nothing waits for a length."""
    B, T, Sq, room = *problem.extent[:3], _room(inputs)
    Sk = min(problem.extent.max_seqlen_k, room)
    device = inputs.q.device
    token, key = torch.arange(Sq, device=device), torch.arange(Sk, device=device)
    if inputs.cu_seqlens_q is None:
        start, count = torch.arange(B, device=device) * Sq, torch.full((B,), Sq, device=device)
    else:
        start, count = inputs.cu_seqlens_q[:-1].long(), inputs.cu_seqlens_q.diff().long()
    if inputs.seqused_k is None:
        length = torch.full((B,), room, device=device)
    else:
        length = inputs.seqused_k.long().clamp(0, Sk)
    q = inputs.q[(start[:, None] + token).clamp(max=T - 1)]
    exists, every = key < length[:, None], slice(None)
    # What nobody has written may be NaN, which neither a mask nor a weight of 0 takes away.
    k, v = (
        _scaled(_padded(x, inputs.block_table, B, key), scale, every, lse.dtype).masked_fill(
            ~exists[..., None, None], 0.0
        )
        for x, scale in ((inputs.k_cache, inputs.k_scale), (inputs.v_cache, inputs.v_scale))
    )
    mask = exists[:, None, None, :] & _visible(problem, inputs.causal, token, key, length - count)
    results = _attend(q, k, v, Band(None, None), inputs, problem, mask)
    packed = torch.arange(T, device=device)
    entry = torch.searchsorted(start + count, packed, right=True).clamp(max=B - 1)
    row = packed - start[entry]
    is_token = (row < count[entry]) & (row < Sq)
    row = row.clamp(max=Sq - 1)
    out.copy_(torch.where(is_token[:, None, None], results.out[entry, row].to(out.dtype), out))
    lse.copy_(torch.where(is_token, results.lse.transpose(0, 1)[:, entry, row], lse))


def _padded(cache: Tensor, table: Tensor | None, B: int, key: Tensor) -> Tensor:
    """Keys of all sequences up to the bound, (B, Sk, Hk, D); those that do not exist may be anything."""
    if table is None:
        return cache[:B, : len(key)]
    pages, page_size = cache.shape[:2]
    return cache[table[:, key // page_size].clamp(0, pages - 1), key % page_size]


def _visible(
    problem: CacheProblem, causal: Tensor | None, token: Tensor, key: Tensor, offset: Tensor
) -> Tensor:
    """The band as a mask that broadcasts to (B, 1, Sq, Sk); token i is `offset` keys behind key i."""
    left, right = problem.band
    distance = key - (token[:, None] + offset[:, None, None, None])
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        within = distance <= right
        visible = visible & (within if causal is None else within | (causal == 0)[:, None, None, None])
    return visible


def _room(inputs: CacheInputs) -> int:
    """The most keys that a sequence can have."""
    page_size = inputs.k_cache.shape[1]
    return page_size if inputs.block_table is None else page_size * inputs.block_table.shape[1]
