"""The operators of attention over a KV cache: schema, implementation, fake.

q (T, Hq, D) is packed: sequence b has tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1; without cu_seqlens_q
(B + 1,), max_seqlen_q tokens from b * max_seqlen_q on. k_cache (pages, page_size, Hk, D) and v_cache (pages,
page_size, Hk, Dv) have key j of sequence b in row j % page_size of page block_table[b, j // page_size];
without block_table (B, blocks) a page is a sequence. seqused_k (B,) says how many keys there are; without it
a sequence fills its page. causal_flags (B,) lifts window_right where it is 0. k_scale and v_scale (B, Hk),
float32, are what a float8 cache is multiplied by. Integers are int32, on q's device; a GPU's are not read
by the host.

out is (T, Hq, Dv) and lse (Hq, T), float32 (float64 for float64); rows of no sequence may be anything.
There are no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import kvcache as backends
from ..errors import RangeError
from ..kvcache_problem import CacheExtent, CacheInputs, CacheOptions, CacheProblem, CacheSpec
from ..masks import Band
from ..problem import capability_of, dtype_key
from ..reference.scoring import working_dtype
from .check import cu_seqlens_values
from .schema import LIBRARY, define, save_nothing, without_gradients

_ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? block_table, Tensor? cu_seqlens_q, Tensor? seqused_k, "
    "Tensor? causal_flags, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, SymInt? window_left, SymInt? window_right, "
    "float softcap, SymInt num_splits, bool batch_invariant"
)
SCHEMAS = {
    "attention_kvcache": f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    "attention_kvcache_out": f"({_ARGUMENTS}, Tensor(a!) out) -> Tensor lse",
}
_TENSORS = len(CacheInputs._fields)
_ALIGNMENT = 16
"""Bytes."""


def attention_kvcache(
    inputs: CacheInputs, options: CacheOptions, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Call the operator that returns out, or the one that writes into `out`, whose result has no history."""
    if out is None:
        result: tuple[Tensor, Tensor] = torch.ops.flash4.attention_kvcache(*inputs, *options)
        return result
    with torch.no_grad():
        lse: Tensor = torch.ops.flash4.attention_kvcache_out(*inputs, *options, out)
    return out, lse


def describe(inputs: CacheInputs, options: CacheOptions) -> CacheProblem:
    """The problem of a call."""
    q, k_cache, v_cache = inputs[:3]
    (T, Hq, D), (_, page_size, Hk, _) = q.shape, k_cache.shape
    paged, device = inputs.block_table is not None, q.device
    spec = CacheSpec(
        device=device.type,
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
        D=D,
        Dv=v_cache.shape[-1],
        group=Hq // Hk,
        paged=paged,
        ragged=inputs.cu_seqlens_q is not None,
        lengths=inputs.seqused_k is not None,
        causal_flags=inputs.causal is not None,
        softcap=options.softcap != 0.0,
        sinks=dtype_key(inputs.sinks),
        batch_invariant=options.batch_invariant,
        aligned=_is_aligned(k_cache) and _is_aligned(v_cache),
        capability=capability_of(device),
    )
    Sq, cu_seqlens_q = options.max_seqlen_q, inputs.cu_seqlens_q
    extent = CacheExtent(
        B=T // max(Sq, 1) if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        T=T,
        max_seqlen_q=Sq,
        max_seqlen_k=options.max_seqlen_k,
        Hq=Hq,
        Hk=Hk,
        page_size=page_size,
    )
    band = Band(options.window_left, options.window_right)
    return CacheProblem(spec, extent, options.scale, band, options.softcap, options.num_splits)


def _is_aligned(cache: Tensor) -> bool:
    """Whether rows are contiguous and begin at multiples of 16 bytes; strides of one entry do not count."""
    step = _ALIGNMENT // cache.element_size()
    strides = [stride for size, stride in zip(cache.shape, cache.stride(), strict=True) if size > 1]
    in_steps = all(stride > 0 and stride % step == 0 for stride in strides[:-1])
    return in_steps and cache.stride(-1) == 1 and cache.data_ptr() % _ALIGNMENT == 0


def scale_of_heads(scale: Tensor | None, cache: Tensor, B: int, Hk: int) -> Tensor:
    """The scale (), (Hk,) or (B, Hk) of a float8 cache as a view (B, Hk)."""
    return (torch.ones((), dtype=torch.float32, device=cache.device) if scale is None else scale).expand(
        B, Hk
    )


def check_values(inputs: CacheInputs, options: CacheOptions) -> None:
    """Requires lengths and page numbers that fit, on a CPU; a GPU's kernels clamp theirs."""
    cu_seqlens_q, seqused_k, table = inputs.cu_seqlens_q, inputs.seqused_k, inputs.block_table
    if inputs.q.device.type != "cpu":
        return
    if cu_seqlens_q is not None:
        cu_seqlens_values("cu_seqlens_q", cu_seqlens_q, inputs.q.shape[0], options.max_seqlen_q, padded=True)
    if seqused_k is None:
        return
    pages, page_size = inputs.k_cache.shape[:2]
    room, lengths = page_size if table is None else page_size * table.shape[1], seqused_k.tolist()
    if not all(0 <= length <= min(room, options.max_seqlen_k) for length in lengths):
        limit = f"there is room for 0 to {room} keys, and max_seqlen_k is {options.max_seqlen_k}"
        raise RangeError("seqused_k", lengths, limit)
    if table is not None:
        used = torch.arange(table.shape[1]) * page_size < seqused_k[:, None]
        if bool((used & ((table < 0) | (table >= pages))).any()):
            raise RangeError("block_table", table.tolist(), f"page numbers must be from 0 to {pages - 1}")


def _attend(inputs: CacheInputs, options: CacheOptions, out: Tensor | None) -> tuple[Tensor, Tensor]:
    check_values(inputs, options)
    problem = describe(inputs, options)
    return backends.choose(problem).attend(inputs, problem, out)


def _attention_kvcache(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _attend(CacheInputs(*arguments[:_TENSORS]), CacheOptions(*arguments[_TENSORS:]), None)


def _attention_kvcache_out(*arguments: Any) -> Tensor:
    *others, out = arguments
    return _attend(CacheInputs(*others[:_TENSORS]), CacheOptions(*others[_TENSORS:]), out)[1]


def _fake_attention_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v_cache.shape[-1]), _fake_attention_kvcache_out(q)


def _fake_attention_kvcache_out(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], dtype=working_dtype(q.dtype))


for _name, _kernel, _fake in (
    ("attention_kvcache", _attention_kvcache, _fake_attention_kvcache),
    ("attention_kvcache_out", _attention_kvcache_out, _fake_attention_kvcache_out),
):
    define(_name, SCHEMAS[_name])
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash4::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "flash4::attention_kvcache",
    without_gradients("attention_kvcache"),
    setup_context=save_nothing,
    lib=LIBRARY,
)
