"""Warpgroup MMAs (wgmma): operands, accumulators, issue and wait."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from .warps import ROWS

DEPTH = 16
"""Elements of 16 bits that one wgmma sums over: its K."""


def scores_mma(dtype: type, columns: int) -> cute.TiledMma:
    """64 x columns of A B^T. Both operands are in SMEM, contiguous along the summed dimension."""
    k = OperandMajorMode.K
    source = warpgroup.OperandSource.SMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, columns, DEPTH), source, k, k))


def output_mma(dtype: type, columns: int) -> cute.TiledMma:
    """64 x columns of A B. A is in registers, B in SMEM and contiguous along its columns."""
    source = warpgroup.OperandSource.RMEM
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (ROWS, columns, DEPTH), source, OperandMajorMode.K, OperandMajorMode.MN
    )
    return cute.make_tiled_mma(op)


def regs_mma(dtype: type, columns: int) -> cute.TiledMma:
    """64 x columns of A B^T. A is in registers, B in SMEM and contiguous along the summed dimension."""
    k = OperandMajorMode.K
    source = warpgroup.OperandSource.RMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, columns, DEPTH), source, k, k))


def transposed_mma(dtype: type, columns: int) -> cute.TiledMma:
    """64 x columns of A B. Both operands are in SMEM, A contiguous along its 64 rows, B along its columns."""
    mn = OperandMajorMode.MN
    source = warpgroup.OperandSource.SMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, columns, DEPTH), source, mn, mn))


@cute.jit
def scores(
    S: cute.Tensor,
    sQ: cute.Tensor,
    sK: cute.Tensor,
    A_more: cute.Tensor | None = None,
    sB_more: cute.Tensor | None = None,
) -> None:
    """Issue S = Q K^T; sQ is (64, D) and sK (keys, D) in shared memory.

    A_more, sB_more: an `operand_fragment` and (keys, depth) in shared memory, perhaps of another dtype, whose
    product is added.
    """
    mma = scores_mma(sQ.element_type, cute.size(sK, mode=[0]))
    part = mma.get_slice(0)
    A = mma.make_fragment_A(part.partition_A(sQ))
    B = mma.make_fragment_B(part.partition_B(sK))
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(A, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, step > 0)
        cute.gemm(mma, S, A[None, None, step], B[None, None, step], S)
    if cutlass.const_expr(A_more is not None):
        more = regs_mma(sB_more.element_type, cute.size(sB_more, mode=[0]))
        B_more = more.make_fragment_B(more.get_slice(0).partition_B(sB_more))
        more.set(warpgroup.Field.ACCUMULATE, True)
        for step in cutlass.range_constexpr(cute.size(A_more, mode=[2])):
            cute.gemm(more, S, A_more[None, None, step], B_more[None, None, step], S)
    warpgroup.commit_group()


def operand_fragment(dtype: type, depth: int) -> cute.Tensor:
    """Registers for a (64, depth) operand of `scores_from_regs`."""
    return cute.make_rmem_tensor(regs_mma(dtype, 8).partition_shape_A((ROWS, depth)), dtype)


@cute.jit
def load_operand(A: cute.Tensor, sA: cute.Tensor, thread: Int32) -> None:
    """Load a `operand_fragment` from shared memory."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), sA.element_type)
    copy = cute.make_tiled_copy_A(atom, regs_mma(sA.element_type, 8)).get_slice(thread)
    cute.copy(atom, copy.partition_S(sA), copy.retile(A))


@cute.jit
def scores_from_regs(S: cute.Tensor, A: cute.Tensor, sB: cute.Tensor) -> None:
    """Issue S = A B^T; sB is (columns, depth) in shared memory."""
    mma = regs_mma(sB.element_type, cute.size(sB, mode=[0]))
    B = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(A, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, step > 0)
        cute.gemm(mma, S, A[None, None, step], B[None, None, step], S)
    warpgroup.commit_group()


@cute.jit
def accumulate(O: cute.Tensor, P: cute.Tensor, sV: cute.Tensor, add) -> None:
    """Issue O = P V, or O += P V if `add`; P is in registers, sV (Dv, keys) in shared memory."""
    mma = output_mma(sV.element_type, cute.size(sV, mode=[0]))
    B = mma.make_fragment_B(mma.get_slice(0).partition_B(sV))
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(P, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, add if step == 0 else True)
        cute.gemm(mma, O, P[None, None, step], B[None, None, step], O)
    warpgroup.commit_group()


@cute.jit
def transposed(C: cute.Tensor, sA: cute.Tensor, sB: cute.Tensor, add: cutlass.Constexpr = False) -> None:
    """Issue C = A^T B, or C += A^T B if `add`.

    sA is a (64, depth) view of A^T, sB a (columns, depth) view of B^T, contiguous along their first mode.
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
    """Wait until at most `pending` of the committed wgmma groups are in flight."""
    warpgroup.wait_group(pending)


@cute.jit
def wait_after(sums: cute.Tensor) -> None:
    """Wait until no wgmma is in flight, but not before `sums`, none of them negative, have been computed.

    Left alone, ptxas moves the wait up, ahead of the exponentials that should overlap the wgmma. It does not
    move the wait over another synchronisation: here a `bar.warp.sync`, whose mask (all lanes) depends on the
    sums (ptxas.md, P5).
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


def p_fragment(dtype: type, columns: int) -> cute.Tensor:
    """Registers for P as an A operand, in the register order of the scores' accumulator."""
    mma = output_mma(dtype, 8)
    return cute.make_rmem_tensor(mma.partition_shape_A((ROWS, columns)), dtype)


def rows_of(accumulator: cute.Tensor) -> cute.Tensor:
    """The accumulator as (2, C): the thread's two rows, eight apart, and its columns in ascending order."""
    columns = cute.size(accumulator) // 2
    layout = cute.make_layout((2, (2, columns // 2)), stride=(2, (1, 4)))
    return cute.make_tensor(accumulator.iterator, layout)
