"""A kernel that walks the visible blocks of keys as an attention kernel does, with given scores."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash4_torch.kernels.common.attn_mask import (
    MaskArgs,
    apply,
    block_at,
    example_args,
    make_mask,
    rows_of,
    visible_blocks,
    words_of,
)
from flash4_torch.kernels.common.fragment import Fragment, mma_fragment
from flash4_torch.kernels.common.mask_tables import MaskPlan

TILE_ROWS = 64
THREADS = 128


def compile_visit(plan: MaskPlan, by_pairs: bool) -> Any:
    """A kernel to be called as ((mask, tables), scores, out, first, last).

    scores and out are (B, H, Sq, Sk) in float32, padded to whole tiles.

    The scores of the visible blocks among `first <= n < last` are written to `out` with the mask applied.
    by_pairs: fragments as wgmma has them; otherwise a thread has a row.
    """
    shape = tuple(cute.sym_int() for _ in range(4))
    scores, out = (
        cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=(3, 2, 1, 0)) for _ in range(2)
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = (example_args(plan), scores, out, Int32(0), Int32(0), plan, by_pairs, stream)
    return cute.compile(visit, *arguments, options="--enable-tvm-ffi")


@cute.jit
def visit(
    args: MaskArgs,
    scores: cute.Tensor,
    out: cute.Tensor,
    first: Int32,
    last: Int32,
    plan: cutlass.Constexpr,
    by_pairs: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    B, H, Sq, _ = out.shape
    grid = (Sq // plan.rows, H // plan.heads, B)
    visit_kernel(args, scores, out, first, last, plan, by_pairs).launch(
        grid=grid, block=(THREADS, 1, 1), stream=stream
    )


@cute.kernel
def visit_kernel(
    args: MaskArgs,
    scores: cute.Tensor,
    out: cute.Tensor,
    first: Int32,
    last: Int32,
    plan: cutlass.Constexpr,
    by_pairs: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, head_block, batch = cute.arch.block_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    mask = make_mask(args, plan)

    if cutlass.const_expr(by_pairs):
        in_tile, pair = tuple(16 * warp + lane // 4 + 8 * r for r in range(2)), lane % 4
    else:
        in_tile, pair = (thread % TILE_ROWS,), None
    heads = tuple(head_block * plan.heads + r // plan.rows for r in in_tile)
    rows = tuple(block * plan.rows + r % plan.rows for r in in_tile)

    blocks = visible_blocks(mask, batch, heads[0], block, first, last)
    own = rows_of(mask, batch, heads, rows, pair)
    for i in cutlass.range(blocks.count, unroll=1):
        n, mixed = block_at(blocks, i)
        words = words_of(own, n)
        registers = cute.make_rmem_tensor(plan.keys // 2 if by_pairs else plan.keys, Float32)
        if cutlass.const_expr(by_pairs):
            fragment = mma_fragment(registers, rows, n * plan.keys, lane)
        else:
            values = cute.make_tensor(registers.iterator, cute.make_layout((1, plan.keys)))
            fragment = Fragment(values, rows, n * plan.keys, tuple(range(plan.keys)))
        _copy(scores, batch, heads, fragment, into=False)
        if mixed:
            apply(mask, own, words, n, fragment)
        if by_pairs or thread < TILE_ROWS:
            _copy(out, batch, heads, fragment, into=True)


def _copy(
    tensor: cute.Tensor, batch: Int32, heads: tuple[Int32, ...], fragment: Fragment, into: bool
) -> None:
    values = fragment.values
    for r, row in enumerate(fragment.rows):
        for c, offset in enumerate(fragment.offsets):
            place = batch, heads[r], row, fragment.key + offset
            if into:
                tensor[place] = values[r, c]
            else:
                values[r, c] = tensor[place]
