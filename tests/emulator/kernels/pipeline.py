"""Asynchronous copies and the barriers that order them: TMA, bulk copies, cp.async; ldmatrix and stmatrix.

The DSL itself elects a lane for each TMA instruction, so a whole warp issues it, commits it and waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom
from cutlass.memory import SmemAllocator
from torch import Tensor

from . import Case, poison

STAGES = 2
CONSUMERS = 128
WARP = 32
STORED = 1  # a named barrier


class Ring(NamedTuple):
    """The static choices of `ring`.

    A tile of any rank has 64 rows (all modes but the second together) and up to 64 columns. A turned load or
    store transposes each tile.
    """

    dtype: Any
    tiler: tuple[int, ...]
    kind: Any
    load_turned: bool = False
    store_turned: bool = False
    ctas: int = 2


@cute.jit
def ring(x: cute.Tensor, y: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """y = 2 x + 1, tile by tile; x counts as 0 beyond its end."""
    single = smem_layout(plan.kind, plan.dtype, plan.tiler)
    staged = smem_layout(plan.kind, plan.dtype, (*plan.tiler, STAGES))
    load, mX = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, single, plan.tiler)
    store, mY = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, single, plan.tiler)
    ring_kernel(load, mX, store, mY, staged, single, plan).launch(
        grid=(plan.ctas, 1, 1), block=(CONSUMERS + WARP, 1, 1)
    )


def smem_layout(kind: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Layout of a tile in shared memory: swizzled as `kind` says, or plain rows for None.

    Further modes follow.
    """
    if kind is None:
        return cute.make_ordered_layout(shape, order=(1, 0, *range(2, len(shape))))
    return cute.tile_to_shape(make_smem_layout_atom(kind, dtype), shape, order=tuple(range(len(shape))))


@cute.kernel
def ring_kernel(load, mX, store, mY, staged, single, plan: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = len(plan.tiler)

    memory = SmemAllocator()
    full = memory.allocate_array(cutlass.Int64, STAGES)
    empty = memory.allocate_array(cutlass.Int64, STAGES)
    sX = allocate(memory, plan.dtype, staged)
    sY = allocate(memory, plan.dtype, single)

    if warp_index == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, CONSUMERS // WARP)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    tX, gX = partition(load, sX, mX, plan.tiler)
    tY, gY = partition(store, sY, mY, plan.tiler)
    tiles = cute.size(gX, mode=[1])

    if warp_index == CONSUMERS // WARP:
        produce(load, gX, tX, full, empty, cta, tiles, ctas, cute.size_in_bytes(plan.dtype, single))
    else:
        count = Int32(0)
        for tile in cutlass.range(cta, tiles, ctas):
            stage, phase = count % STAGES, count // STAGES % 2
            cute.arch.mbarrier_wait(full + stage, phase)
            values = load_matrices(as_matrix(sX[(*[None] * rank, stage)]), plan.load_turned, thread)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage)
            for i in cutlass.range_constexpr(cute.size(values)):
                values[i] = (values[i].to(Float32) * 2.0 + 1.0).to(plan.dtype)
            store_matrices(values, as_matrix(sY), plan.store_turned, thread)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=STORED, number_of_threads=CONSUMERS)
            if warp_index == 0:
                cute.copy(store, tY, gY[None, tile])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=STORED, number_of_threads=CONSUMERS)
            count += 1


@cute.jit
def produce(load, gX, tX, full, empty, first, tiles, step, size: cutlass.Constexpr) -> None:
    """Fill stage after stage, each once it is empty.

    A fresh barrier counts as having completed the phase before its first.
    """
    count = Int32(0)
    for tile in cutlass.range(first, tiles, step):
        stage, phase = count % STAGES, count // STAGES % 2
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
        cute.copy(load, gX[None, tile], tX[None, stage], tma_bar_ptr=full + stage)
        count += 1


def allocate(memory: SmemAllocator, dtype: Any, layout: Any) -> cute.Tensor:
    """A tensor that TMA may fill: 1024 bytes hold a whole repeat of the widest swizzle."""
    if isinstance(layout, cute.ComposedLayout):
        return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    return memory.allocate_tensor(dtype, layout, byte_alignment=1024)


def partition(atom: Any, smem: cute.Tensor, gmem: cute.Tensor, tiler: tuple[int, ...]) -> tuple[Any, Any]:
    """(copy, stage) in shared memory and (copy, tile) in global memory, tiles numbered first mode first."""
    rank = len(tiler)
    tiles = cute.zipped_divide(gmem, tiler)
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, rank), tiles)


def reordered(tensor: cute.Tensor, modes: list[int]) -> cute.Tensor:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))


def as_matrix(tile: cute.Tensor) -> cute.Tensor:
    """The tile as (64, columns), with rows in address order."""
    rank = cute.rank(tile)
    return cute.group_modes(reordered(tile, [0, *range(2, rank), 1]), 0, rank - 1) if rank > 2 else tile


def fragments(dtype: Any) -> cute.TiledMma:
    """Four warps over 64 rows: the MMAs whose fragments ldmatrix and stmatrix move."""
    return cute.make_tiled_mma(
        warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)), (4, 1, 1), permutation_mnk=(64, 16, 16)
    )


def load_matrices(tile: cute.Tensor, turned: bool, thread: Int32) -> cute.Tensor:
    """A thread's values of a (64, columns) tile, or of its transpose, in the order of an A operand."""
    source = reordered(tile, [1, 0]) if turned else tile
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(turned, 4), tile.element_type)
    mma = fragments(tile.element_type)
    copy = cute.make_tiled_copy_A(atom, mma).get_slice(thread)
    values = mma.make_fragment_A(mma.get_slice(thread).partition_A(source))
    cute.copy(atom, copy.partition_S(source), copy.retile(values))
    return values


def store_matrices(values: cute.Tensor, tile: cute.Tensor, turned: bool, thread: Int32) -> None:
    """Write what `load_matrices` returned: for 16 rows an accumulator has the order of an A operand."""
    target = reordered(tile, [1, 0]) if turned else tile
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(turned, 4), tile.element_type)
    mma = fragments(tile.element_type)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    result = cute.make_rmem_tensor(mma.get_slice(thread).partition_C(target).shape, tile.element_type)
    for i in range(cute.size(values)):
        result[i] = values[i]
    cute.copy(atom, copy.retile(result), copy.partition_D(target))


@cute.jit
def tensor_reduce(x: cute.Tensor, y: cute.Tensor, dtype: cutlass.Constexpr, tiler: cutlass.Constexpr) -> None:
    """y (M, N) += the sum of all slices of x (slices * M, N), each by CTAs of its own; M in whole tiles."""
    layout = smem_layout(SmemLayoutAtomKind.K_SW128, dtype, tiler)
    load, mX = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, tiler)
    add, mY = cpasync.make_tiled_tma_atom(cpasync.CopyReduceBulkTensorTileS2GOp(), y, layout, tiler)
    rows, columns = cute.ceil_div(y.shape, tiler)
    tensor_reduce_kernel(load, mX, add, mY, layout, dtype, tiler).launch(
        grid=(rows, columns, x.shape[0] // y.shape[0]), block=(WARP, 1, 1)
    )


@cute.kernel
def tensor_reduce_kernel(
    load, mX, add, mY, layout, dtype: cutlass.Constexpr, tiler: cutlass.Constexpr
) -> None:
    row, column, piece = cute.arch.block_idx()
    rows, _, _ = cute.arch.grid_dim()
    memory = SmemAllocator()
    arrived = memory.allocate_array(cutlass.Int64)
    tile = allocate(memory, dtype, layout)
    with cute.arch.elect_one():
        cute.arch.mbarrier_init(arrived, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()

    tX, gX = partition(load, tile, mX, tiler)
    tY, gY = partition(add, tile, mY, tiler)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, cute.size_in_bytes(dtype, layout))
    cute.copy(load, gX[None, (piece * rows + row, column)], tX, tma_bar_ptr=arrived)
    cute.arch.mbarrier_wait(arrived, 0)
    cute.copy(add, tY, gY[None, (row, column)])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def bulk(x: cute.Tensor, total: cute.Tensor, y: cute.Tensor, chunk: cutlass.Constexpr) -> None:
    """y = 3 x, and total (chunk) += the sum of all chunks of y; x, y and total hold float32."""
    bulk_kernel(x, total, y, chunk).launch(grid=(cute.size(x) // chunk, 1, 1), block=(CONSUMERS, 1, 1))


@cute.kernel
def bulk_kernel(x: cute.Tensor, total: cute.Tensor, y: cute.Tensor, chunk: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    memory = SmemAllocator()
    arrived = memory.allocate_array(cutlass.Int64)
    buffer = memory.allocate_tensor(Float32, cute.make_layout(chunk), byte_alignment=16)
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    if thread == 0:
        load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, chunk * 4)
        cute.copy(
            load, as_one_copy(cute.local_tile(x, (chunk,), (cta,))), as_one_copy(buffer), mbar_ptr=arrived
        )
    cute.arch.mbarrier_wait(arrived, 0)

    for i in cutlass.range(thread, chunk, CONSUMERS):
        buffer[i] = buffer[i] * 3.0
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()

    if thread == 0:
        store = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Float32)
        cute.copy(store, as_one_copy(buffer), as_one_copy(cute.local_tile(y, (chunk,), (cta,))))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[total.iterator, buffer.iterator, Int32(chunk * 4)],
        )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


def as_one_copy(tensor: cute.Tensor) -> cute.Tensor:
    return cute.group_modes(tensor, 0, cute.rank(tensor))


@cute.jit
def grouped_copies(x: cute.Tensor, y: cute.Tensor, depth: cutlass.Constexpr) -> None:
    """y = x (rows * 512) float32 with each row reversed, `depth - 1` groups of cp.async ahead."""
    grouped_copies_kernel(x, y, depth).launch(grid=(1, 1, 1), block=(CONSUMERS, 1, 1))


@cute.kernel
def grouped_copies_kernel(x: cute.Tensor, y: cute.Tensor, depth: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    load = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
    buffer = SmemAllocator().allocate_tensor(
        Float32, cute.make_layout((4, CONSUMERS, depth)), byte_alignment=16
    )
    pieces = cute.zipped_divide(x, (4,))
    rows = cute.size(x) // (4 * CONSUMERS)

    for row in cutlass.range_constexpr(depth - 1):
        cute.copy(load, pieces[None, row * CONSUMERS + thread], buffer[None, thread, row])
        cute.arch.cp_async_commit_group()
    for row in cutlass.range(rows):
        cute.arch.cp_async_wait_group(depth - 2)
        cute.arch.sync_threads()
        # All threads have read row - 1, whose stage this load reuses.
        if row + depth - 1 < rows:
            ahead = row + depth - 1
            cute.copy(load, pieces[None, ahead * CONSUMERS + thread], buffer[None, thread, ahead % depth])
        cute.arch.cp_async_commit_group()
        for i in cutlass.range_constexpr(4):
            y[row * 4 * CONSUMERS + thread * 4 + i] = buffer[3 - i, CONSUMERS - 1 - thread, row % depth]


@cute.jit
def signalled_copies(x: cute.Tensor, y: cute.Tensor) -> None:
    """y = 1 - x, (rows * 128): a warp copies rows by cp.async, whose arrival signals the other four warps."""
    signalled_copies_kernel(x, y).launch(grid=(1, 1, 1), block=(CONSUMERS + WARP, 1, 1))


@cute.kernel
def signalled_copies_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    memory = SmemAllocator()
    full = memory.allocate_array(cutlass.Int64, STAGES)
    empty = memory.allocate_array(cutlass.Int64, STAGES)
    buffer = memory.allocate_tensor(Float32, cute.make_layout((4, WARP, STAGES)), byte_alignment=16)
    flat = cute.make_tensor(buffer.iterator, cute.make_layout((4 * WARP, STAGES)))
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, WARP)
            cute.arch.mbarrier_init(empty + stage, CONSUMERS)
    cute.arch.sync_threads()

    pieces = cute.zipped_divide(x, (4,))
    rows = cute.size(x) // CONSUMERS
    if thread >= CONSUMERS:
        lane = thread - CONSUMERS
        load = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
        for row in cutlass.range(rows):
            stage, phase = row % STAGES, row // STAGES % 2
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            cute.copy(load, pieces[None, row * WARP + lane], buffer[None, lane, stage])
            cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
    else:
        for row in cutlass.range(rows):
            stage, phase = row % STAGES, row // STAGES % 2
            cute.arch.mbarrier_wait(full + stage, phase)
            value = flat[thread, stage]
            cute.arch.mbarrier_arrive(empty + stage)
            y[row * CONSUMERS + thread] = 1.0 - value


def make_ring(shape: tuple[int, ...], tiler: tuple[int, ...], dtype: torch.dtype, *, whole: bool) -> Any:
    """x of `shape`; y of that shape or, if `whole`, of all tiles, which shows what lies beyond x.

    The second mode is contiguous in both.
    """

    def make() -> tuple[Tensor, ...]:
        y = [-(-n // t) * t for n, t in zip(shape, tiler, strict=True)] if whole else shape
        return second_contiguous(torch.randn(shape).to(dtype)), second_contiguous(poison(*y, dtype=dtype))

    return make


def second_contiguous(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def expect_ring(tiler: tuple[int, ...], turned: bool) -> Any:
    def expected(x: Tensor, y: Tensor) -> tuple[Tensor]:
        padding = [(0, -n % t) for n, t in zip(x.shape, tiler, strict=True)]
        z = torch.nn.functional.pad(
            x.float() * 2 + 1, [n for pair in reversed(padding) for n in pair], value=1.0
        )
        if turned:
            z = z.unflatten(1, (-1, tiler[1])).unflatten(0, (-1, tiler[0])).transpose(1, 3).reshape(z.shape)
        return (z[tuple(slice(n) for n in y.shape)],)

    return expected


def ring_case(name: str, shape: tuple[int, ...], plan: Ring, *, whole: bool = False) -> Case:
    return Case(
        name=f"ring_{name}",
        host=ring,
        make=make_ring(shape, plan.tiler, TORCH[plan.dtype], whole=whole),
        reference=expect_ring(plan.tiler, plan.load_turned != plan.store_turned),
        constants={"plan": plan},
    )


TORCH = {Float16: torch.float16, BFloat16: torch.bfloat16, Float32: torch.float32}


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Integers so small that sums are exact in any order."""
    return torch.randint(-8, 9, shape).to(dtype)


def reduce_case(name: str, dtype: Any, M: int, N: int, slices: int, tiler: tuple[int, int]) -> Case:
    return Case(
        name=f"tensor_reduce_{name}",
        host=tensor_reduce,
        make=lambda: tuple(integers(rows, N, dtype=TORCH[dtype]) for rows in (slices * M, M)),
        reference=lambda x, y: (y + x.view(slices, M, N).sum(0),),
        constants={"dtype": dtype, "tiler": tiler},
    )


def bulk_case(chunks: int, chunk: int) -> Case:
    return Case(
        name="bulk",
        host=bulk,
        make=lambda: (integers(chunks * chunk), integers(chunk), poison(chunks * chunk)),
        reference=lambda x, total, y: (total + 3 * x.view(chunks, chunk).sum(0), 3 * x),
        constants={"chunk": chunk},
    )


KIND = SmemLayoutAtomKind
CASES = (
    ring_case("sw128", (320, 128), Ring(Float16, (64, 64), KIND.K_SW128)),
    ring_case("sw64", (192, 96), Ring(BFloat16, (64, 32), KIND.K_SW64)),
    ring_case("sw32", (192, 48), Ring(Float16, (64, 16), KIND.K_SW32)),
    ring_case("interleaved", (192, 32), Ring(Float16, (64, 16), KIND.K_INTER)),
    ring_case("plain", (192, 128), Ring(Float16, (64, 64), None)),
    ring_case("odd_filled", (150, 88), Ring(Float16, (64, 64), KIND.K_SW128), whole=True),
    ring_case("odd_clipped", (150, 88), Ring(Float16, (64, 64), KIND.K_SW128, ctas=1)),
    ring_case("3d", (20, 72, 11), Ring(Float16, (8, 64, 8), KIND.K_SW128), whole=True),
    ring_case("4d", (9, 64, 5, 3), Ring(Float16, (8, 32, 4, 2), KIND.K_SW64)),
    ring_case("load_turned", (128, 192), Ring(Float16, (64, 64), KIND.K_SW128, load_turned=True)),
    ring_case("store_turned", (128, 192), Ring(Float16, (64, 64), KIND.K_SW128, store_turned=True)),
    reduce_case("f32", Float32, 48, 80, 3, (16, 32)),
    reduce_case("bf16", BFloat16, 48, 72, 4, (16, 64)),
    bulk_case(chunks=5, chunk=512),
    Case(
        "grouped_copies",
        grouped_copies,
        lambda: (torch.randn(7 * 4 * CONSUMERS), poison(7 * 4 * CONSUMERS)),
        lambda x, y: (x.view(7, -1).flip(1).flatten(),),
        constants={"depth": 3},
    ),
    Case(
        "signalled_copies",
        signalled_copies,
        lambda: (torch.randn(9 * CONSUMERS), poison(9 * CONSUMERS)),
        lambda x, y: (1 - x,),
    ),
)
