"""Warpgroup products and the shared-memory layouts that they read."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

ROWS = 64
"""Rows of one wgmma, and of a warpgroup."""
DEPTH = 16
"""What one wgmma sums over, in 16-bit numbers."""


def scores_mma(dtype: type, columns: int) -> cute.TiledMma:
    """64 x columns of A B^T, both in shared memory, both contiguous along the sum."""
    k = OperandMajorMode.K
    source = warpgroup.OperandSource.SMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, columns, DEPTH), source, k, k))


def output_mma(dtype: type, columns: int) -> cute.TiledMma:
    """64 x columns of A B, A in registers, B in shared memory and contiguous along its columns."""
    source = warpgroup.OperandSource.RMEM
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (ROWS, columns, DEPTH), source, OperandMajorMode.K, OperandMajorMode.MN
    )
    return cute.make_tiled_mma(op)


def row_major_layout(dtype: type, rows: int, columns: int, stages: int) -> cute.ComposedLayout:
    """(rows, columns, stages), swizzled as widely as the columns allow; columns are a multiple of 16."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}[_chunk(columns)]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def column_major_layout(dtype: type, columns: int, rows: int, stages: int) -> cute.ComposedLayout:
    """(columns, rows, stages), contiguous along the columns."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {64: kinds.MN_SW128, 32: kinds.MN_SW64, 16: kinds.MN_SW32}[_chunk(columns)]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    # All rows of one chunk of columns lie together: one box of the copy engine.
    return cute.tile_to_shape(atom, (columns, rows, stages), order=(1, 0, 2))


def _chunk(columns: int) -> int:
    return next(chunk for chunk in (64, 32, 16) if columns % chunk == 0)


@cute.jit
def scores(S: cute.Tensor, sQ: cute.Tensor, sK: cute.Tensor) -> None:
    """Issue S = Q K^T; sQ is (64, D) and sK (keys, D) in shared memory."""
    mma = scores_mma(sQ.element_type, cute.size(sK, mode=[0]))
    part = mma.get_slice(0)
    A = mma.make_fragment_A(part.partition_A(sQ))
    B = mma.make_fragment_B(part.partition_B(sK))
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(A, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, step > 0)
        cute.gemm(mma, S, A[None, None, step], B[None, None, step], S)
    warpgroup.commit_group()


@cute.jit
def accumulate(O: cute.Tensor, P: cute.Tensor, sV: cute.Tensor, add) -> None:
    """Issue O = P V, or O += P V where `add`; P is in registers, sV (Dv, keys) in shared memory."""
    mma = output_mma(sV.element_type, cute.size(sV, mode=[0]))
    B = mma.make_fragment_B(mma.get_slice(0).partition_B(sV))
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(P, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, add if step == 0 else True)
        cute.gemm(mma, O, P[None, None, step], B[None, None, step], O)
    warpgroup.commit_group()


def wait(pending: int) -> None:
    """Until at most `pending` of the committed products are under way."""
    warpgroup.wait_group(pending)


@cute.jit
def wait_after(sums: cute.Tensor) -> None:
    """Until no product is under way, but not before `sums`, none of which is negative, have been computed.

    Left alone, ptxas moves the wait up, before the exponentials that are to hide the product. It does not
    move it over another synchronisation, and that of the warp takes its mask, all lanes, from the sums.
    """
    lowest = sums[0]
    for i in cutlass.range_constexpr(1, cute.size(sums)):
        lowest = cute.arch.fmin(lowest, sums[i])
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 lanes; setp.lt.f32 p, {$r0}, 0f00000000;"
        " selp.b32 lanes, 1, 0xffffffff, p; bar.warp.sync lanes; }",
        read_only_args=[lowest],
    )
    warpgroup.wait_group(0)


def scores_accumulator(dtype: type, columns: int) -> cute.Tensor:
    mma = scores_mma(dtype, columns)
    return cute.make_rmem_tensor(mma.partition_shape_C((ROWS, columns)), Float32)


def output_accumulator(dtype: type, columns: int) -> cute.Tensor:
    mma = output_mma(dtype, columns)
    return cute.make_rmem_tensor(mma.partition_shape_C((ROWS, columns)), Float32)


def weights_fragment(dtype: type, columns: int) -> cute.Tensor:
    """Registers for P as an operand; their order is that of the accumulator of scores."""
    mma = output_mma(dtype, 8)
    return cute.make_rmem_tensor(mma.partition_shape_A((ROWS, columns)), dtype)


def rows_of(accumulator: cute.Tensor) -> cute.Tensor:
    """The accumulator as (2, C): the thread's two rows, eight apart, and its columns in ascending order."""
    columns = cute.size(accumulator) // 2
    layout = cute.make_layout((2, (2, columns // 2)), stride=(2, (1, 4)))
    return cute.make_tensor(accumulator.iterator, layout)


@cute.jit
def round_to(values: cute.Tensor, target: cute.Tensor) -> None:
    """Round float32 registers to the 16-bit registers of `target`, pair by pair."""
    kind = "bf16x2" if target.element_type is cutlass.BFloat16 else "f16x2"
    pairs = cute.recast_tensor(target, cutlass.Uint32)
    for i in cutlass.range_constexpr(cute.size(pairs)):
        pairs[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[cutlass.Uint32],
            read_only_args=[values[2 * i + 1], values[2 * i]],
        )
