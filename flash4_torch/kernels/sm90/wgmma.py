"""Warpgroup products and the shared-memory layouts that they read."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from .warps import ROWS

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


def held_mma(dtype: type, columns: int) -> cute.TiledMma:
    """64 x columns of A B^T, A in registers, B in shared memory and contiguous along the sum."""
    k = OperandMajorMode.K
    source = warpgroup.OperandSource.RMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, columns, DEPTH), source, k, k))


def transposed_mma(dtype: type, columns: int) -> cute.TiledMma:
    """64 x columns of A B, both in shared memory, both contiguous along their 64 rows and the columns."""
    mn = OperandMajorMode.MN
    source = warpgroup.OperandSource.SMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, columns, DEPTH), source, mn, mn))


def row_major_layout(
    dtype: type, rows: int, columns: int, stages: int, part: int | None = None
) -> cute.ComposedLayout:
    """(rows, columns, stages), swizzled as widely as the columns allow; columns are a multiple of 16.

    `part`: columns that are to be an operand of their own.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}[_chunk(part or columns)]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def column_major_layout(
    dtype: type, columns: int, rows: int, stages: int, part: int | None = None
) -> cute.ComposedLayout:
    """(columns, rows, stages), contiguous along the columns: the same memory as of `row_major_layout`."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {64: kinds.MN_SW128, 32: kinds.MN_SW64, 16: kinds.MN_SW32}[_chunk(part or columns)]
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


def held_fragment(dtype: type, depth: int) -> cute.Tensor:
    """Registers for a (64, depth) operand of `scores_of_held`."""
    return cute.make_rmem_tensor(held_mma(dtype, 8).partition_shape_A((ROWS, depth)), dtype)


@cute.jit
def hold(A: cute.Tensor, sA: cute.Tensor, thread: Int32) -> None:
    """Load it from shared memory."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), sA.element_type)
    copy = cute.make_tiled_copy_A(atom, held_mma(sA.element_type, 8)).get_slice(thread)
    cute.copy(atom, copy.partition_S(sA), copy.retile(A))


@cute.jit
def scores_of_held(S: cute.Tensor, A: cute.Tensor, sB: cute.Tensor) -> None:
    """Issue S = A B^T; sB is (columns, depth) in shared memory."""
    mma = held_mma(sB.element_type, cute.size(sB, mode=[0]))
    B = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
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


@cute.jit
def transposed(C: cute.Tensor, sA: cute.Tensor, sB: cute.Tensor, add: cutlass.Constexpr = False) -> None:
    """Issue C = A^T B, or C += A^T B where `add`.

    sA is (64, depth) and sB (columns, depth), contiguous along their first mode.
    """
    mma = transposed_mma(sA.element_type, cute.size(sB, mode=[0]))
    part = mma.get_slice(0)
    A = mma.make_fragment_A(part.partition_A(sA))
    B = mma.make_fragment_B(part.partition_B(sB))
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(A, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, add or step > 0)
        cute.gemm(mma, C, A[None, None, step], B[None, None, step], C)
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


@cute.jit
def widened(numbers: cute.Tensor) -> cute.Tensor:
    """16-bit registers as float32."""
    count = cute.size(numbers)
    wide = cute.make_rmem_tensor(count, Float32)
    pairs = cute.recast_tensor(numbers, cutlass.Uint32)
    for i in cutlass.range_constexpr(count // 2):
        if cutlass.const_expr(numbers.element_type is cutlass.BFloat16):
            wide[2 * i], wide[2 * i + 1] = (
                _float(pairs[i] << 16),
                _float(pairs[i] & cutlass.Uint32(0xFFFF0000)),
            )
        else:
            wide[2 * i], wide[2 * i + 1] = cute.arch.inline_ptx(
                "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0};"
                " cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
                write_only_types=[Float32, Float32],
                read_only_args=[pairs[i]],
            )
    return wide


def _float(bits: cutlass.Uint32) -> Float32:
    return Float32(llvm.bitcast(Float32.mlir_type, bits.ir_value()))
