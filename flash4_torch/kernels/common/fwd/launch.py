"""Host code that forward kernels share: TMA maps, counting work items, and compiling for any sizes.

`plan` is what a kernel is compiled for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import attn_mask, dropout, host, mods
from ..attn_mask import MaskArgs
from ..kvcache import NUMBERS_STEP
from ..launch_params import LaunchParams, example_params
from ..mods import ModArgs
from ..smem_layouts import chunk_of
from .plan import ForwardPlan

MOST_KEYS = 1 << 30
"""Keys of a sequence in pages, at most: sums of two positions fit in 32 bits."""


class PageArgs(NamedTuple):
    """A launch's argument that says which keys of a cache each sequence has."""

    block_table: cute.Tensor
    """(B, blocks) int32 of any strides: key j of sequence b is in page block_table[b, j // page_size]."""
    seqused_k: cute.Tensor
    """(B,) int32, contiguous"""
    min_seqlen_q: Int32
    """Sequences with fewer queries are left to another launch."""


class HeadStride(NamedTuple):
    """Elements from one head of a cache to the next: whole chunks of columns, and what is left of them."""

    chunks: Int32
    columns: Int32


class Pages(NamedTuple):
    """The same as the kernel takes it."""

    block_table: cute.Tensor
    seqused_k: cute.Tensor
    min_seqlen_q: Int32
    page_size: Int32
    room: Int32
    """Keys that a row of the table has room for; the device would have to keep the product."""
    k_head: HeadStride
    """Boxes with whole rows need it and `v_head`."""
    v_head: HeadStride


class Maps(NamedTuple):
    """TMA atoms, None where there is no TMA, and the tensors that they copy from or to.

    mQ and mO ((group, S), D, Hk, B), mK (S, D, Hk, B), mV (Dv, S, Hk, B); with pages, S of K and V is
    the number of a page's keys, and B the number of pages, or they are as `pages.whole_row_map` has them.
    """

    load_q: Any
    mQ: Any
    load_k: Any
    mK: Any
    load_v: Any
    mV: Any
    store_o: Any
    mO: Any


def in_kernel(
    sequences_k: cute.Tensor | PageArgs | None, k: cute.Tensor, v: cute.Tensor, plan: ForwardPlan
) -> cute.Tensor | Pages | None:
    """cu_seqlens_k or pages, as a kernel takes them."""
    if not isinstance(sequences_k, PageArgs):
        return sequences_k
    page_size = k.shape[1]
    room = Int64(page_size) * Int64(sequences_k.block_table.shape[1])
    heads = (_head_stride(cache, chunk_of(columns)) for cache, columns in ((k, plan.D), (v, plan.Dv)))
    return Pages(*sequences_k, page_size, Int32(cutlass.min(room, Int64(MOST_KEYS))), *heads)


def _head_stride(cache: cute.Tensor, chunk: int) -> HeadStride:
    stride = Int64(cache.stride[2])
    return HeadStride(Int32(stride // chunk), Int32(stride % chunk))


class Outputs(NamedTuple):
    """The output of a launch."""

    out: cute.Tensor
    by_kv_head: cute.Tensor | None
    """What TMA stores to: see `Maps`. None where splits have results of their own."""


def outputs_of(out: cute.Tensor, k: cute.Tensor, params: LaunchParams, plan: ForwardPlan) -> Outputs:
    """The output, positions first; `k` as well."""
    if plan.features.splits:
        return Outputs(out, None)
    out = host.in_order(params.out_heads_first, out)
    return Outputs(out, host.by_kv_head(out, k))


class Rows(NamedTuple):
    """Tensors of a launch, positions first; those of a stack as one of its entries."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    outputs: Outputs
    lse: cute.Tensor


def rows_of(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    mask: MaskArgs | ModArgs | None,
    params: LaunchParams,
    plan: ForwardPlan,
) -> Rows:
    """The tensors as the kernel sees them."""
    q, k, v = host.in_order(params.heads_first, q, k, v)
    if not plan.features.is_stacked:
        return Rows(q, k, v, outputs_of(out, k, params, plan), lse)
    entries, out = mask.bounds.entries, host.in_order(params.out_heads_first, out)
    q, k, v, out = host.stacked(entries, q, k, v, out)
    return Rows(q, k, v, Outputs(out, host.by_kv_head(out, k)), host.stacked_rows(entries, lse))


def count_tiles(
    q: cute.Tensor,
    out: cute.Tensor,
    maps: Maps,
    cu_seqlens_q: cute.Tensor | None,
    params: LaunchParams,
    plan: ForwardPlan,
) -> Int32:
    """Tiles of a launch, or splits of them."""
    (group, _), _, Hk, _ = maps.mQ.shape
    sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    blocks, head_blocks = cute.ceil_div(params.max_seqlen, plan.queries), cute.ceil_div(group, plan.pack_gqa)
    tiles = blocks * head_blocks * Hk * sequences
    return tiles * out.shape[0] if plan.features.splits else tiles


def compile_for_any(forward: Any, plan: ForwardPlan, forward_in_splits: Any) -> Any:
    """`forward`, or `forward_in_splits` of it where keys are split, compiled for any sizes and strides.

    Call it with the arguments except `forward`, `plan` and `stream`.
    """
    features = plan.features
    modes = 2 if features.is_packed else 3
    of_cache, out_dtype = 3 if plan.paged else modes, plan.dtype if features.splits else plan.out_dtype
    q, k, v, out = (
        host.rows(dtype, (*host.any_sizes(n), D))
        for dtype, n, D in (
            (plan.dtype, modes, features.D),
            (plan.dtype, of_cache, features.D),
            (plan.dtype, of_cache, features.Dv),
            (out_dtype, modes, features.Dv),
        )
    )
    lse = host.compact(Float32, host.any_sizes(modes))
    lse_low = host.compact(Float32, host.any_sizes(modes)) if features.large_scores else None
    tile_counter = host.compact(Int32, (1,))
    cu_seqlens = host.compact(Int32, host.any_sizes(1)) if features.varlen else None
    sequences_k = cu_seqlens
    if plan.paged:
        sequences_k = PageArgs(host.strided(Int32, 2), host.compact(Int32, host.any_sizes(1)), Int32(0))
    rng_state = dropout.example_state(features)
    mask = attn_mask.example_args(plan.mask) if features.mask else None
    if any(features.mods):
        mask = mods.example_args(plan)
    sinks = host.compact(host.NUMERIC[features.sinks], host.any_sizes(1)) if features.sinks else None
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = (q, k, v, out, lse, lse_low, tile_counter, cu_seqlens, sequences_k, mask, rng_state, sinks)
    if features.splits:
        parts = host.compact(Float32, (cute.sym_int(), cute.sym_int(divisibility=NUMBERS_STEP)))
        tensors = (*tensors, example_params(), parts, forward)
        return cute.compile(forward_in_splits, *tensors, plan, stream, options="--enable-tvm-ffi")
    return cute.compile(forward, *tensors, example_params(), plan, stream, options="--enable-tvm-ffi")
