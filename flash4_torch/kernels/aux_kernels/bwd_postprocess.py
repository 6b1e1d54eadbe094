"""The backward's sums of dQ: scaled, rounded and stored where dQ belongs.

A CTA has a block of rows of one head. In Hopper's order a thread has what a thread of the main kernel added
up: of every 8 columns two of each of two rows, side by side or, `by_register`, each by itself. Four
neighbouring lanes have all columns of these rows; they exchange words until each has 8 neighbouring columns,
16 bytes. In TMEM's order those are two loads; eight lanes have neighbouring rows, and four such groups
neighbouring columns.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common import dependent_launch, host, warp_tf32
from ..common.attn_mask import vector_at
from ..common.bwd.query_blocks import QueryBlock, heads_and_blocks, own_block
from ..common.bwd.row_blocks import CHUNK, VECTOR, PostprocessPlan
from ..common.warps import WARP

LANES = 4
"""Neighbouring lanes that hold whole rows together."""
GROUP = 8
"""Neighbouring rows whose vectors of four floats a load takes together, 128 bytes."""
DEPTH = 8
"""Loads of a lane in flight."""
_ROUND = {"bfloat16": "cvt.rn.bf16x2.f32", "float16": "cvt.rn.f16x2.f32"}


@cute.jit
def postprocess(
    dq_acc: cute.Tensor,
    dq: cute.Tensor,
    cu_seqlens_q: cute.Tensor | None,
    scale: Float32,
    heads_first: Int32,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch dq = dq_acc * scale.

    dq_acc float32 (B, Hq, n, m * columns), packed and segments (Hq, n, m * columns): n blocks of m rows a
    head, as `row_blocks` lays them out. dq (B, Sq, Hq, D) or (T, Hq, D), last stride 1, the others multiples
    of 8 elements, base on 16 bytes; if `heads_first` is not 0, a dense one is (B, Hq, Sq, D). No size is 0.
    If the plan says `stacked`, dq_acc's B is smaller, and batch entries of dq follow one another in its.
    """
    dq = host.in_order(heads_first, dq)
    if cutlass.const_expr(plan.stacked):
        dq = host.stacked(dq.shape[0] // dq_acc.shape[0], dq)
    B, Hq, count = heads_and_blocks(dq, cu_seqlens_q, plan.blocks)
    postprocess_kernel(dq_acc, dq, cu_seqlens_q, scale, plan).launch(
        grid=(B * Hq * count, 1, 1),
        block=(plan.blocks.threads * plan.blocks.bands, 1, 1),
        stream=stream,
        use_pdl=dependent_launch.is_possible(),
    )


@cute.kernel
def postprocess_kernel(
    dq_acc: cute.Tensor,
    dq: cute.Tensor,
    cu_seqlens_q: cute.Tensor | None,
    scale: Float32,
    plan: cutlass.Constexpr,
) -> None:
    dependent_launch.wait_for_previous_kernel()
    blocks = plan.blocks
    own = own_block(dq, cu_seqlens_q, blocks)
    thread, _, _ = cute.arch.thread_idx()
    source = dq_acc.iterator + own.number * blocks.floats
    if cutlass.const_expr(plan.dtype == "float32"):
        _rows_of_tf32(source, dq, own, thread, scale, plan)
    elif cutlass.const_expr(blocks.tmem_order):
        _rows_of_lanes(source, dq, own, thread, scale, plan)
    else:
        _rows_of_fragments(source, dq, own, thread, scale, plan)


@cute.jit
def _rows_of_lanes(
    source: cute.Pointer,
    dq: cute.Tensor,
    own: QueryBlock,
    thread: Int32,
    scale: Float32,
    plan: cutlass.Constexpr,
) -> None:
    """TMEM's order: a warp has 16 rows, eight at a time, of four chunks at a time."""
    blocks = plan.blocks
    row, chunk = thread // 32 * (2 * GROUP) + thread % GROUP, thread % 32 // GROUP
    for first in cutlass.range_constexpr(0, blocks.chunks, LANES):
        for half in cutlass.range_constexpr(2):
            words = cute.make_rmem_tensor(LANES, Uint32)
            c = cutlass.min(first + chunk, blocks.chunks - 1)
            for i in cutlass.range_constexpr(2):
                sums = cute.make_rmem_tensor(VECTOR, Float32)
                at = blocks.lane_vector(row + half * GROUP, 2 * c + i)
                cute.autovec_copy(vector_at(source + at, VECTOR), sums)
                for j in cutlass.range_constexpr(2):
                    words[2 * i + j] = _rounded(sums[2 * j], sums[2 * j + 1], scale, plan)
            _store(dq, own, row + half * GROUP, first + chunk, words, plan)


@cute.jit
def _rows_of_fragments(
    source: cute.Pointer,
    dq: cute.Tensor,
    own: QueryBlock,
    thread: Int32,
    scale: Float32,
    plan: cutlass.Constexpr,
) -> None:
    blocks = plan.blocks
    # Four words to exchange: 4 chunks of one row at a time, or 2 chunks of both rows together.
    together = LANES if blocks.chunks % LANES == 0 else LANES // 2
    step = max(DEPTH // together, 1) * together
    for first in cutlass.range_constexpr(0, blocks.chunks, step):
        chunks = range(first, min(first + step, blocks.chunks))
        words = {c: _load(source, c, thread, scale, plan) for c in chunks}
        for c in cutlass.range_constexpr(first, chunks.stop, together):
            upper, lower = ([words[c + i][half] for i in range(together)] for half in range(2))
            if cutlass.const_expr(together == LANES):
                _store(dq, own, _row(thread), c + thread % LANES, _exchange(upper, thread), plan)
                _store(dq, own, _row(thread) + 8, c + thread % LANES, _exchange(lower, thread), plan)
            else:
                row = _row(thread) + 8 * (thread % LANES // 2)
                _store(dq, own, row, c + thread % 2, _exchange(upper + lower, thread), plan)


@cute.jit
def _rows_of_tf32(
    source: cute.Pointer,
    dq: cute.Tensor,
    own: QueryBlock,
    thread: Int32,
    scale: Float32,
    plan: cutlass.Constexpr,
) -> None:
    """Float32 numbers, `by_register`, in the order of columns that `warp_tf32.accumulate` has."""
    blocks, each = plan.blocks, warp_tf32.ROWS * warp_tf32.CHUNK // WARP
    band, own_thread = thread // blocks.threads, thread % blocks.threads
    for chunk in cutlass.range_constexpr(-(-plan.D // warp_tf32.CHUNK)):
        sums = cute.make_rmem_tensor(each, Float32)
        for i in cutlass.range_constexpr(each):
            place = blocks.register(band, chunk * (warp_tf32.CHUNK // CHUNK), i, own_thread)
            sums[i] = vector_at(source + place, 1)[0] * scale
        first = chunk * warp_tf32.CHUNK
        for half in cutlass.range_constexpr(2):
            row = _row(thread) + 8 * half
            if own.has(row):
                at = (own.first + row, own.head) if plan.is_packed else (own.batch, own.first + row, own.head)
                target = dq[(*at, None)]
                warp_tf32.store_row(sums, half, target, plan.D, thread % WARP, Int32(first))


def _row(thread: Int32) -> Int32:
    """The thread's upper row in the block."""
    return thread // 32 * 16 + thread % 32 // LANES


def _load(source: cute.Pointer, chunk: int, thread: Int32, scale: Float32, plan: PostprocessPlan) -> tuple:
    """Two columns of the upper row and of the lower one, scaled and rounded, a word each."""
    sums = cute.make_rmem_tensor(VECTOR, Float32)
    band, own = thread // plan.blocks.threads, thread % plan.blocks.threads
    if plan.blocks.by_register:
        for i in range(VECTOR):
            sums[i] = vector_at(source + plan.blocks.register(band, chunk, i, own), 1)[0]
    else:
        at = plan.blocks.vector(band, chunk, own)
        cute.autovec_copy(vector_at(source + at, VECTOR), sums)
    return tuple(_rounded(sums[2 * half], sums[2 * half + 1], scale, plan) for half in range(2))


def _rounded(first: Float32, second: Float32, scale: Float32, plan: PostprocessPlan) -> Uint32:
    """Two numbers, scaled and rounded, in a word."""
    return cute.arch.inline_ptx(
        f"{_ROUND[plan.dtype]} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[second * scale, first * scale],
    )


def _exchange(words: list, thread: Int32) -> cute.Tensor:
    """Transpose the words of four lanes, four words each: lane l gets the l-th word of each."""
    for distance in (1, 2):
        odd = (thread & distance) != 0
        for i in range(LANES):
            if not i & distance:
                mine, other = words[i], words[i + distance]
                sent = cute.arch.shuffle_sync_bfly(cutlass.select_(odd, mine, other), distance)
                words[i] = cutlass.select_(odd, sent, mine)
                words[i + distance] = cutlass.select_(odd, other, sent)
    gathered = cute.make_rmem_tensor(LANES, Uint32)
    for i in range(LANES):
        gathered[i] = words[i]
    return gathered


@cute.jit
def _store(
    dq: cute.Tensor,
    own: QueryBlock,
    row: Int32,
    chunk: Int32,
    words: cute.Tensor,
    plan: cutlass.Constexpr,
) -> None:
    column = chunk * CHUNK
    if own.has(row) & (column < plan.D):
        at = (own.first + row, own.head) if plan.is_packed else (own.batch, own.first + row, own.head)
        start = dq[(*at, None)].iterator + column
        cute.autovec_copy(words, vector_at(start, LANES, Uint32))


def compile_postprocess(plan: PostprocessPlan) -> Any:
    """`postprocess` compiled for any sizes; call it with its arguments except `plan` and `stream`."""
    modes, dims = (3 if plan.varlen else 4), (2 if plan.is_packed else 3)
    dq_acc = host.rows(Float32, host.any_sizes(modes))
    dq = host.rows(host.NUMERIC[plan.dtype], (*host.any_sizes(dims), plan.D))
    cu_seqlens = host.compact(Int32, host.any_sizes(1)) if plan.varlen else None
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        postprocess, dq_acc, dq, cu_seqlens, Float32(1.0), Int32(0), plan, stream, options="--enable-tvm-ffi"
    )
