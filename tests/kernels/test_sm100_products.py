"""Hand-issued tcgen05.mma in the emulator."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from flash4_torch.emulator.device import as_device
from flash4_torch.kernels.common.rounding import round_to
from flash4_torch.kernels.common.smem_layouts import row_major_layout
from flash4_torch.kernels.sm100 import tmem, umma
from flash4_torch.kernels.sm100.umma import Matrix, MmaOp
from flash4_torch.testing import emulate

SUMS, OPERAND = 0, 256
"""TMEM columns."""


@cute.jit
def multiply(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, plan: cutlass.Constexpr) -> None:
    multiply_kernel(a, b, c, plan).launch(grid=(1, 1, 1), block=(128, 1, 1))


@cute.kernel
def multiply_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """c = a b^T by one MmaOp; an operand stored along rows is passed transposed, as it is stored."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    done, holder = memory.allocate_array(Int64), memory.allocate_array(Int32)
    sB = stage(memory, b, plan.b)
    if cutlass.const_expr(plan.a is not None):
        sA = stage(memory, a, plan.a)
    if warp == 0:
        tmem.allocate(holder)
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    if cutlass.const_expr(plan.a is None):
        for column in cutlass.range_constexpr(0, cute.size(a, mode=[1]), 16):
            values = cute.make_rmem_tensor(16, Float32)
            for i in cutlass.range_constexpr(16):
                values[i] = a[thread, column + i].to(Float32)
            rounded = cute.make_rmem_tensor(16, a.element_type)
            round_to(values, rounded)
            at = tmem.own_lanes(Int32(OPERAND), warp) + column // 2
            tmem.store(at, cute.recast_tensor(rounded, Int32))
        tmem.wait_stores()
        tmem.fence_before()
        cute.arch.sync_threads()
        tmem.fence_after()
    if warp == 0:
        with cute.arch.elect_one():
            start = Int32(OPERAND)
            if cutlass.const_expr(plan.a is not None):
                start = umma.word(plan.a, sA.iterator)
            word, half = umma.word(plan.b, sB.iterator), plan.steps // 2
            umma.issue(plan, Int32(SUMS), start, word, False, last=half)
            umma.issue(plan, Int32(SUMS), start, word, True, first=half)
            umma.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    tmem.fence_after()
    for column in cutlass.range_constexpr(0, plan.N, 16):
        values = cute.make_rmem_tensor(16, Float32)
        tmem.load(tmem.own_lanes(Int32(SUMS), warp) + column, values)
        tmem.wait_loads()
        for i in cutlass.range_constexpr(16):
            c[thread, column + i] = values[i]
    tmem.fence_before()
    cute.arch.sync_threads()
    tmem.fence_after()
    if warp == 0:
        tmem.free()


def stage(memory: SmemAllocator, x: cute.Tensor, matrix: Matrix) -> cute.Tensor:
    layout = row_major_layout(x.element_type, matrix.rows, matrix.columns, 1)
    s = memory.allocate_tensor(x.element_type, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    fill(x, s, matrix)
    return s


@cute.jit
def fill(x: cute.Tensor, s: cute.Tensor, matrix: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(thread, matrix.rows * matrix.columns, 128, unroll=1):
        row, column = i // matrix.columns, i % matrix.columns
        s[row, column, 0] = x[row, column]


@pytest.mark.parametrize(("depth", "columns"), [*product((32, 96, 128), (64, 96)), (128, 16), (80, 80)])
@pytest.mark.parametrize("kind", ["scores", "output", "both along rows"])
def test_products(kind: str, depth: int, columns: int) -> None:
    dtype = ("bfloat16", "float16")[depth % 64 == 0]
    a = None if kind == "output" else Matrix(128, depth)
    b = Matrix(columns, depth) if kind == "scores" else Matrix(depth, columns, along_rows=True)
    if kind == "both along rows":
        a = Matrix(depth, 128, along_rows=True)
    plan = MmaOp(dtype, 128, columns, a, b)
    x, y = (torch.randint(-8, 9, (n, depth)) / 4 for n in (128, columns))
    expected = x @ y.T
    stored = [t.T if matrix is not None and matrix.along_rows else t for t, matrix in ((x, a), (y, b))]
    operands = [t.contiguous().to(getattr(torch, dtype)) for t in stored]
    result = torch.full((128, columns), torch.nan)
    run(plan, *operands, result)
    assert torch.equal(result, expected)


def run(plan: MmaOp, *tensors: Tensor) -> None:
    with emulate.device("sm_100a", schedule="late"):
        arguments = [from_dlpack(as_device(x), assumed_align=16) for x in tensors]
        cute.compile(multiply, *arguments, plan)(*arguments)
