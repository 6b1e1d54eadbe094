"""GEMMs of mma.sync: the warps of a CTA multiply what cp.async and ldmatrix bring them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator
from torch import Tensor

from . import Case, poison

WARPS = 4
THREADS = 32 * WARPS
VECTOR = 8  # elements that a thread copies at once
STAGES = 2
DTYPES = {torch.float16: Float16, torch.bfloat16: BFloat16}


@dataclass(frozen=True)
class Plan:
    """What is fixed when a kernel is compiled.

    m, n, k: sizes of the GEMM, in whole tiles and steps.
    tiler: rows and columns of a CTA's tile of C, and the step of the inner dimension.
    mma_k: K of one mma.sync, 8 or 16.
    sums: the accumulators' type.
    b_turned: B is (k, n), and ldmatrix transposes it.
    """

    m: int = 128
    n: int = 64
    k: int = 96
    tiler: tuple[int, int, int] = (64, 32, 32)
    mma_k: int = 16
    sums: Any = Float32
    b_turned: bool = False

    @property
    def b_tile(self) -> tuple[int, int]:
        """The tile of B as it lies in memory, rows first."""
        _, columns, step = self.tiler
        return (step, columns) if self.b_turned else (columns, step)


@cute.jit
def gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """c = a b^T, or a b if B is turned; a is (m, k), b (n, k) or (k, n), c (m, n); rows are contiguous."""
    op = warp.MmaF16BF16Op(a.element_type, plan.sums, (16, 8, plan.mma_k))
    mma = cute.make_tiled_mma(op, (2, WARPS // 2, 1), permutation_mnk=(32, 32, 16))
    gemm_kernel(mma, a, b, c, plan).launch(
        grid=(plan.m // plan.tiler[0], plan.n // plan.tiler[1], 1), block=(THREADS, 1, 1)
    )


@cute.kernel
def gemm_kernel(
    mma: cute.TiledMma, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, plan: cutlass.Constexpr
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    row, column, _ = cute.arch.block_idx()
    memory = SmemAllocator()
    sA = allocate(memory, a.element_type, plan.tiler[::2])
    sB = allocate(memory, b.element_type, plan.b_tile)
    gA = cute.local_tile(a, plan.tiler[::2], (row, None))
    gB = cute.local_tile(b, plan.b_tile, (None, column) if plan.b_turned else (column, None))
    gC = mma.get_slice(thread).partition_C(cute.local_tile(c, plan.tiler[:2], (row, column)))
    sums = mma.make_fragment_C(gC)
    sums.fill(0.0)

    steps = plan.k // plan.tiler[2]
    fetch(gA, sA, gB, sB, 0, thread)
    cute.arch.cp_async_commit_group()
    for step in cutlass.range(steps, unroll=1):
        if step + 1 < steps:
            fetch(gA, sA, gB, sB, step + 1, thread)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_threads()
        stage = step % STAGES
        multiply(mma, sums, sA[None, None, stage], sB[None, None, stage], thread, plan)
        cute.arch.sync_threads()
    gC.store(sums.load().to(c.element_type))


@cute.jit
def fetch(gA, sA, gB, sB, step: Int32, thread: Int32) -> None:
    """Starts to copy both operands of a step."""
    copy_tile(gA[None, None, step], sA[None, None, step % STAGES], thread)
    copy_tile(gB[None, None, step], sB[None, None, step % STAGES], thread)


@cute.jit
def copy_tile(source: cute.Tensor, target: cute.Tensor, thread: Int32) -> None:
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), source.element_type, num_bits_per_copy=128)
    across = source.shape[1] // VECTOR
    threads = cute.make_ordered_layout((THREADS // across, across), order=(1, 0))
    part = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR))).get_slice(thread)
    cute.copy(atom, part.partition_S(source), part.partition_D(target))


@cute.jit
def multiply(mma, sums, sA, sB, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Adds the product of one stage."""
    part = mma.get_slice(thread)
    columns = cute.make_tensor(sB.iterator, cute.select(sB.layout, [1, 0])) if plan.b_turned else sB
    left, right = mma.make_fragment_A(part.partition_A(sA)), mma.make_fragment_B(part.partition_B(columns))
    matrices = warp.LdMatrix8x8x16bOp(False, 4)
    load = cute.make_tiled_copy_A(cute.make_copy_atom(matrices, sA.element_type), mma).get_slice(thread)
    cute.copy(load, load.partition_S(sA), load.retile(left))
    matrices = warp.LdMatrix8x8x16bOp(plan.b_turned, 4)
    load = cute.make_tiled_copy_B(cute.make_copy_atom(matrices, sB.element_type), mma).get_slice(thread)
    cute.copy(load, load.partition_S(columns), load.retile(right))
    cute.gemm(mma, sums, left, right, sums)


def allocate(memory: SmemAllocator, dtype: Any, tile: tuple[int, int]) -> cute.Tensor:
    """Stages of a tile, row by row; 16 free bytes after each row spare ldmatrix bank conflicts."""
    rows, width = tile
    pitch = width + VECTOR
    layout = cute.make_layout((rows, width, STAGES), stride=(pitch, 1, rows * pitch))
    return memory.allocate_tensor(dtype, layout, byte_alignment=16)


def case(name: str, dtype: torch.dtype, **plan: Any) -> Case:
    """One GEMM whose products and sums are exact in any order."""
    chosen = Plan(**plan)
    kind = torch.float16 if chosen.sums is Float16 else torch.float32

    def make() -> tuple[Tensor, ...]:
        shapes = (chosen.m, chosen.k), (chosen.k, chosen.n) if chosen.b_turned else (chosen.n, chosen.k)
        a, b = ((torch.randint(-4, 5, shape) / 4).to(dtype) for shape in shapes)
        return a, b, poison(chosen.m, chosen.n, dtype=kind)

    def reference(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor]:
        return (a.double() @ (b.double() if chosen.b_turned else b.double().T),)

    return Case(f"warp_gemm_{name}", gemm, make, reference, constants={"plan": chosen})


CASES = (
    case("bf16", torch.bfloat16),
    case("f16_turned", torch.float16, b_turned=True, tiler=(64, 64, 32), k=64),
    case("k8_f16_sums", torch.float16, mma_k=8, sums=Float16, m=64),
)
