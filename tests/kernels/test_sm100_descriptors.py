"""Descriptors of tcgen05.mma: ours next to those that CuTe makes from the same layouts."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator
from cutlass.utils.blackwell_helpers import make_trivial_tiled_mma

from flash4_torch.emulator.device import as_device
from flash4_torch.kernels.common.host import NUMERIC
from flash4_torch.kernels.common.smem_layouts import column_major_layout, row_major_layout
from flash4_torch.kernels.sm100 import umma
from flash4_torch.kernels.sm100.umma import Matrix, MmaOp
from flash4_torch.testing import emulate
from kernel_runs import launches


@cute.jit
def describe(found: cute.Tensor, product: cutlass.Constexpr) -> None:
    describe_kernel(found, product).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.kernel
def describe_kernel(found: cute.Tensor, product: cutlass.Constexpr) -> None:
    """found (2, 2, steps) = for A and B, by each instruction, our descriptor and CuTe's."""
    memory = SmemAllocator()
    dtype, matrices = NUMERIC[product.dtype], (product.a, product.b)
    modes = [OperandMajorMode.MN if matrix.along_rows else OperandMajorMode.K for matrix in matrices]
    group = tcgen05.CtaGroup.ONE if product.cluster_size == 1 else tcgen05.CtaGroup.TWO
    mma = make_trivial_tiled_mma(dtype, dtype, *modes, Float32, group, (product.M, product.N))
    share = mma.get_slice(0)
    staged = [allocate(memory, dtype, matrix) for matrix in matrices]
    A = mma.make_fragment_A(share.partition_A(staged[0]))
    B = mma.make_fragment_B(share.partition_B(staged[1]))
    for which, (matrix, s, fragment) in enumerate(zip(matrices, staged, (A, B), strict=True)):
        low = umma.word(matrix, s.iterator)
        for k in cutlass.range_constexpr(product.steps):
            word = Int64(low + matrix.step(k)) & 0xFFFFFFFF
            found[which, 0, k] = word | Int64(matrix.high) << 32
            found[which, 1, k] = tcgen05.smem_descriptor_to_int(fragment[None, 0, k].iterator)
    if cute.arch.block_idx()[0] > 0:  # never true: only its PTX is wanted
        sums = cute.make_tensor(
            cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16),
            mma.make_fragment_C(mma.partition_shape_C((product.M, product.N))).layout,
        )
        cute.gemm(mma, sums, A[None, None, 0], B[None, None, 0], sums)


def allocate(memory: SmemAllocator, dtype: type, matrix: Matrix) -> cute.Tensor:
    """The matrix as CuTe wants an operand: its second mode is the one summed over."""
    if matrix.along_rows:
        layout = column_major_layout(dtype, matrix.columns, matrix.rows, 1)
    else:
        layout = row_major_layout(dtype, matrix.rows, matrix.columns, 1)
    s = memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    return s[None, None, 0]


def square(M: int, N: int, depth: int, dtype: str = "bfloat16") -> MmaOp:
    """The MMA of S and dP: both operands lie along the head dimension."""
    return MmaOp(dtype, M, N, Matrix(M, depth), Matrix(N, depth))


def turned(M: int, N: int, depth: int, dtype: str = "bfloat16") -> MmaOp:
    """The MMA of dQ: both operands lie along rows."""
    return MmaOp(dtype, M, N, Matrix(depth, M, True), Matrix(depth, N, True))


PRODUCTS = {
    "S, D 128": square(128, 128, 128),
    "S, D 64": square(128, 128, 64, "float16"),
    "S, D 96": square(128, 128, 96),
    "S, D 80": square(128, 128, 80),
    "S, D 256 of a pair": square(64, 64, 256),
    "dQ, D 128": turned(128, 128, 128),
    "dQ, D 64": turned(128, 64, 128),
    "dQ, D 96": turned(128, 96, 128, "float16"),
    "dQ, D 80": turned(128, 80, 128),
    "dQ, D 256 of a pair": turned(64, 128, 128),
    "dV, wide": MmaOp("bfloat16", 64, 128, Matrix(64, 128), Matrix(128, 128, True)),
    "S of a pair": square(256, 128, 128)._replace(cluster_size=2),
    "dQ of a pair": turned(128, 128, 256)._replace(cluster_size=2),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_descriptors_are_cutes(name: str) -> None:
    """All descriptors equal CuTe's for one CTA, and the instruction's for two.

    For two, CuTe is given both halves of the operands, which have another layout.
    """
    product = PRODUCTS[name]
    found = torch.zeros(2, 2, product.steps, dtype=torch.int64)
    with launches() as asked, emulate.device("sm_100a"):
        argument = from_dlpack(as_device(found))
        cute.compile(describe, argument, product)(argument)
    (kind,) = set(re.findall(r"tcgen05\.mma\.\S+ \[%\w+\], %\w+, %\w+, (%\w+),", asked[-1].kernel.ptx))
    (descriptor,) = re.findall(rf"mov\.b32\s+{kind}, (\d+);", asked[-1].kernel.ptx)
    assert int(descriptor) == product.descriptor
    if product.cluster_size == 1:
        for matrix, (ours, cutes) in zip((product.a, product.b), found, strict=True):
            assert torch.equal(ours & used(matrix), cutes & used(matrix))


def used(matrix: Matrix) -> int:
    """Bits that matter: a single chunk along rows has no stride to a next one."""
    return ~(0x3FFF << 16) if matrix.along_rows and matrix.columns == matrix.chunk else -1
