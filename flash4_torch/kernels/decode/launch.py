"""The host side of the decode kernel: grid, and compiling for any sizes."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...configs.decode import DecodeForm, part_columns
from ...configs.types import Features
from ..common import host
from ..common.smem_layouts import column_major_layout, row_major_layout
from .context import Tensors
from .kernel import decode_kernel
from .params import DecodeParams, example_params, make_divisors
from .plan import DecodePlan


@cute.jit
def decode(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    block_table: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    seqused_k: cute.Tensor | None,
    causal: cute.Tensor | None,
    sinks: cute.Tensor | None,
    k_scale: cute.Tensor | None,
    v_scale: cute.Tensor | None,
    out: cute.Tensor,
    lse: cute.Tensor,
    partial_out: cute.Tensor | None,
    partial_lse: cute.Tensor | None,
    counters: cute.Tensor | None,
    params: DecodeParams,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch out = softmax(scores) V and lse of each query token over the keys that the cache has of it.

    q (T, Hq, D) and out (T, Hq, Dv) are packed; sequence b has tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1]
    - 1; if these are more than params.max_seqlen_q, it gets no results, and another launch may serve it.
    Without cu_seqlens_q it has params.max_seqlen_q tokens from b * params.max_seqlen_q on. Its last token is
    aligned to its last key. k (pages, page_size, Hk, D) and v (pages, page_size, Hk, Dv): key j of sequence b
    is row j % page_size of page block_table[b, j // page_size]; without a table it is row j of page b. Of q,
    k, v and out the last stride is 1, the others are multiples of 8 elements, and bases are aligned to 16
    bytes. block_table (B, blocks) has any strides, cu_seqlens_q (B + 1,), seqused_k (B,) and causal (B,) are
    contiguous; all are int32 and read on the device only: a CUDA graph may replay the launch with other
    numbers in them. Whatever they hold, nothing is read or written outside of the tensors.

    A sequence has seqused_k[b] keys, at most blocks * page_size, which is their number without seqused_k.
    Nothing of the cache or the table is read for keys that no token sees; page numbers are clamped to those
    that exist. Where causal[b] is 0, params.right is no bound for that sequence. A token that sees no key has
    out 0 and lse -inf. lse (Hq, T) float32, contiguous, natural logarithm. sinks (Hq,) are scores of one
    more key of every head, whose value is 0; lse counts it.

    An FP8 cache (plan.form.cache_dtype) has k and v of float8_e4m3fn, strides of whole multiples of 16
    elements, and k_scale and v_scale (B, Hk), float32, of any strides: k and v stand for their products with
    them. D and Dv are multiples of 16 then. NaN stays NaN. Rows of Q and weights become float16, a row of
    bfloat16 after a power of two has scaled its largest number to 2**14 or more.

    A tile has up to params.num_splits splits (fewer if they had less than LEAST_BLOCKS * KEYS keys). CTAs of
    a cluster have a split each, and merge them in shared memory. More splits than plan.form.cluster, which
    may be 1, are those of several clusters, if plan.form.parts says so: partial_out
    (clusters, T, Hq, Dv rounded up to 64) and partial_lse (clusters, plan.form.cluster, Hq, T), float32 and
    contiguous, have anything in them before and after; counters, int32, has a number for each rank in a
    cluster and each tile of each KV head of each sequence, plan.form.cluster * B * Hk * ceil(max_seqlen_q *
    Hq / Hk / plan.rows) or more of them, which are 0 before and after. Launches that may overlap need
    different ones. Without parts these are None.

    With plan.form.groups, splits have params.split_keys keys each, and `GROUP` of them are a group.
    params.num_splits is the number of clusters that deal the groups of a tile among them, and the first
    dimension of partial_out and partial_lse has groups; without parts there is one. If there are groups
    enough for the keys of every sequence, a row's bits depend on its q, its keys and values and their
    positions, and its sink alone: not on plan.rows, plan.form.cluster, page_size, the table, the number of
    clusters, and what else is in the launch.

    With plan.form.few_rows, params.max_seqlen_q * Hq / Hk is `FEW_ROWS` at most.

    No size is 0 but those of the cache and the table. B and the tiles of all KV heads are at most 65535.
    """
    tensors = Tensors(
        q,
        k,
        v,
        block_table,
        cu_seqlens_q,
        seqused_k,
        causal,
        sinks,
        k_scale,
        v_scale,
        out,
        lse,
        partial_out,
        partial_lse,
        counters,
    )
    layouts = (
        row_major_layout(plan.mma_dtype, plan.q_rows, plan.D, plan.rows // plan.q_rows),
        row_major_layout(plan.mma_dtype, plan.form.keys, plan.k_columns, plan.stages),
        column_major_layout(plan.mma_dtype, plan.v_columns, plan.form.keys, plan.stages),
        row_major_layout(plan.mma_dtype, plan.rows, plan.form.keys, 1),
    )
    Hk = k.shape[2]
    group = q.shape[1] // Hk
    tiles = cute.ceil_div(params.max_seqlen_q * group, plan.rows)
    cluster = plan.form.cluster
    splits = params.num_splits if cutlass.const_expr(plan.shares_keys or plan.form.groups) else 1
    ctas = (
        splits * cluster if cutlass.const_expr(plan.form.groups) else cute.ceil_div(splits, cluster) * cluster
    )
    B = q.shape[0] // params.max_seqlen_q
    if cutlass.const_expr(plan.form.ragged):
        B = cu_seqlens_q.shape[0] - 1
    divisors = make_divisors(group, tiles, k.shape[1], splits, params.split_keys)
    decode_kernel(tensors, layouts, params, divisors, plan).launch(
        grid=(ctas, Hk * tiles, B),
        block=(plan.launch_threads, 1, 1),
        cluster=(cluster, 1, 1) if cluster > 1 else None,
        stream=stream,
        min_blocks_per_mp=1,
    )


def compile_decode(features: Features, rows: int, form: DecodeForm) -> Any:
    """`decode` compiled for any sizes; call it with its arguments except `plan` and `stream`.

    Tensors that the form leaves out are None. `varlen` of the features is not read.
    """
    plan = DecodePlan(features, rows, form)
    T, Hq, B = (cute.sym_int() for _ in range(3))
    pages, page_size, Hk = host.any_sizes(3)
    q, out = (host.rows(plan.dtype, (T, Hq, D)) for D in (features.D, features.Dv))
    k, v = (host.rows(plan.cache_dtype, (pages, page_size, Hk, D)) for D in (features.D, features.Dv))
    table = host.strided(Int32, 2) if form.paged else None
    cu_seqlens_q = host.compact(Int32, host.any_sizes(1)) if form.ragged else None
    seqused_k = host.compact(Int32, (B,)) if form.lengths else None
    causal = host.compact(Int32, (B,)) if form.causal_flags else None
    sinks = host.compact(host.NUMERIC[features.sinks], (Hq,)) if features.sinks else None
    scales = [host.strided(Float32, 2) if plan.is_fp8 else None for _ in range(2)]
    lse = host.compact(Float32, (Hq, T))
    partial = (None, None, None)
    if form.parts:
        parts = cute.sym_int()
        partial = (
            host.compact(Float32, (parts, T, Hq, part_columns(features.Dv))),
            host.compact(Float32, (parts, form.cluster, Hq, T)),
            host.compact(Int32, host.any_sizes(1)),
        )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = (
        *(q, k, v, table, cu_seqlens_q, seqused_k, causal, sinks, *scales),
        *(out, lse, *partial),
    )
    return cute.compile(decode, *tensors, example_params(), plan, stream, options="--enable-tvm-ffi")
