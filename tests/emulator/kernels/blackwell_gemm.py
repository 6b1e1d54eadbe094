"""C = A B^T by tcgen05: A in shared memory or TMEM, one CTA or two, many accumulators, two ways to store.

Warps 0 to 3 are store warps, warp 4 issues the MMAs, warp 5 is the load warp. A cluster, of one or two CTAs,
computes many tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils.blackwell_helpers import make_smem_layout_a, make_smem_layout_b, make_smem_layout_epi
from torch import Tensor

from . import Case, poison

WARP = 32
STORERS = 4
MULTIPLIER = 4
LOADER = 5
THREADS = 6 * WARP
STAGES = 3
STORED = 1  # a named barrier
LANE = 1 << 16  # from one TMEM lane to the next, counted in 32-bit values
WIDTH = 32  # columns that a thread holds at a time
STEP = 64  # of the inner dimension, in a stage


@dataclass(frozen=True)
class Plan:
    """What is fixed when a kernel is compiled.

    m, n, k: sizes of the GEMM, in whole tiles and steps.
    rows, columns: sizes of a tile of C; the CTAs of a cluster share its rows.
    ctas: CTAs in a cluster.
    clusters: number of clusters that share the tiles.
    accumulators: how many tiles may be in TMEM at once.
    a_in_tmem: the store warps first put 2 A there; each cluster then owns one row of tiles.
    by_tma: C goes through shared memory; otherwise straight from registers.
    """

    m: int = 256
    n: int = 256
    k: int = 320
    rows: int = 128
    columns: int = 128
    ctas: int = 1
    clusters: int = 1
    accumulators: int = 1
    a_in_tmem: bool = False
    by_tma: bool = False

    @property
    def tiler(self) -> tuple[int, int, int]:
        return self.rows, self.columns, STEP

    @property
    def tiles_m(self) -> int:
        return self.m // self.rows

    @property
    def tiles(self) -> int:
        return self.tiles_m * (self.n // self.columns)

    @property
    def steps(self) -> int:
        return self.k // STEP

    @property
    def group(self) -> tcgen05.CtaGroup:
        return tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE

    @property
    def own_rows(self) -> int:
        """Rows of a tile in one CTA: one lane each, or for 64 rows two lanes each, with half the columns."""
        return self.rows // self.ctas

    @property
    def own_columns(self) -> int:
        """TMEM columns that one accumulator takes."""
        return self.columns * self.own_rows // 128

    @property
    def tmem_columns(self) -> int:
        """TMEM columns to allocate, for the accumulators and then 16-bit A if it is there: a power of two."""
        needed = self.accumulators * self.own_columns + (self.k // 2 if self.a_in_tmem else 0)
        return 1 << (needed - 1).bit_length()


@dataclass(frozen=True)
class Barriers:
    """One array of mbarriers per purpose, over stages or accumulators.

    Those of the first CTA serve the cluster, except that MMAs arrive at `empty` and `product` in each CTA.
    """

    full: cute.Pointer  # one arrival, by the first CTA's load warp, and the bytes of all loads
    empty: cute.Pointer  # one arrival, by the MMAs that read a stage
    product: cute.Pointer  # one arrival, by the MMAs that make up a tile of C
    drained: cute.Pointer  # every store warp of the cluster
    a_ready: cute.Pointer  # every store warp of the cluster, once


@cute.jit
def gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """c = a b^T, or 2 a b^T with a in TMEM; a is (m, k), b is (n, k), c is (m, n)."""
    assert not plan.a_in_tmem or plan.clusters == plan.tiles_m
    source = tcgen05.OperandSource.TMEM if plan.a_in_tmem else tcgen05.OperandSource.SMEM
    majors = LayoutEnum.from_tensor(a).mma_major_mode(), LayoutEnum.from_tensor(b).mma_major_mode()
    shape = (plan.rows, plan.columns, 16)
    mma = cute.make_tiled_mma(
        tcgen05.MmaF16BF16Op(a.element_type, Float32, shape, plan.group, source, *majors)
    )
    cluster = (plan.ctas, 1, 1, 1)

    load = cpasync.CopyBulkTensorTileG2SOp(plan.group)
    layout_b = make_smem_layout_b(mma, plan.tiler, b.element_type, STAGES)
    load_b, mB = cute.nvgpu.make_tiled_tma_atom_B(load, b, one_stage(layout_b), plan.tiler, mma, cluster)
    layout_a, load_a, mA = None, None, None
    if cutlass.const_expr(not plan.a_in_tmem):
        layout_a = make_smem_layout_a(mma, plan.tiler, a.element_type, STAGES)
        load_a, mA = cute.nvgpu.make_tiled_tma_atom_A(load, a, one_stage(layout_a), plan.tiler, mma, cluster)
    layout_c, store_c, mC = None, None, None
    if cutlass.const_expr(plan.by_tma):
        part = (plan.own_rows, WIDTH)
        layout_c = make_smem_layout_epi(c.element_type, LayoutEnum.ROW_MAJOR, part, 2)
        store = cpasync.CopyBulkTensorTileS2GOp()
        store_c, mC = cpasync.make_tiled_tma_atom(store, c, cute.select(layout_c, mode=[0, 1]), part)

    gemm_kernel(mma, load_a, mA, load_b, mB, store_c, mC, a, c, layout_a, layout_b, layout_c, plan).launch(
        grid=(plan.ctas * plan.clusters, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(plan.ctas, 1, 1),
        min_blocks_per_mp=1,
    )


def one_stage(layout: cute.ComposedLayout) -> cute.ComposedLayout:
    return cute.select(layout, mode=[0, 1, 2])


@cute.kernel
def gemm_kernel(
    mma: cute.TiledMma,
    load_a: cute.CopyAtom | None,
    mA: cute.Tensor | None,
    load_b: cute.CopyAtom,
    mB: cute.Tensor,
    store_c: cute.CopyAtom | None,
    mC: cute.Tensor | None,
    a: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout | None,
    layout_b: cute.ComposedLayout,
    layout_c: cute.ComposedLayout | None,
    plan: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank, cluster = block % plan.ctas, block // plan.ctas
    two = plan.ctas == 2

    memory = SmemAllocator()
    barriers = Barriers(
        full=memory.allocate_array(Int64, STAGES),
        empty=memory.allocate_array(Int64, STAGES),
        product=memory.allocate_array(Int64, plan.accumulators),
        drained=memory.allocate_array(Int64, plan.accumulators),
        a_ready=memory.allocate_array(Int64, 1),
    )
    address = memory.allocate_array(Int32, 1)
    sA = allocate(memory, a.element_type, layout_a)
    sB = allocate(memory, a.element_type, layout_b)
    sC = allocate(memory, c.element_type, layout_c)

    if warp == 0:
        initialise(barriers, plan)
    if warp == MULTIPLIER:
        cute.arch.alloc_tmem(plan.tmem_columns, address, is_two_cta=two)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=two)
    synchronise(plan)
    tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
    tmem_a = tmem + plan.accumulators * plan.own_columns

    if warp == LOADER:
        load_tiles(mma, load_a, mA, sA, load_b, mB, sB, barriers, cluster, rank, plan)
    if warp == MULTIPLIER and rank == 0:
        tA = cute.recast_ptr(tmem_a, dtype=a.element_type)
        multiply_tiles(mma, tA, sA, sB, tmem, barriers, cluster, plan)
    if warp < STORERS:
        if cutlass.const_expr(plan.a_in_tmem):
            fill(a, block * plan.own_rows + thread, tmem_a, thread, plan)
            arrive_at_first(barriers.a_ready, plan)
        store_tiles(c, store_c, mC, sC, tmem, barriers, cluster, rank, thread, plan)

    fence_before()
    synchronise(plan)
    fence_after()
    if warp == MULTIPLIER:
        cute.arch.dealloc_tmem(tmem, plan.tmem_columns, is_two_cta=two)


@cute.jit
def initialise(barriers: Barriers, plan: cutlass.Constexpr) -> None:
    with cute.arch.elect_one():
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(barriers.full + stage, 1)
            cute.arch.mbarrier_init(barriers.empty + stage, 1)
        for slot in cutlass.range_constexpr(plan.accumulators):
            cute.arch.mbarrier_init(barriers.product + slot, 1)
            cute.arch.mbarrier_init(barriers.drained + slot, STORERS * plan.ctas)
        cute.arch.mbarrier_init(barriers.a_ready, STORERS * plan.ctas)
    cute.arch.mbarrier_init_fence()


@cute.jit
def load_tiles(mma, load_a, mA, sA, load_b, mB, sB, barriers, cluster, rank, plan: cutlass.Constexpr) -> None:
    """One warp of every CTA loads its share of A and B, stage after stage."""
    share = mma.get_slice(rank)
    tB, gB = partition(load_b, sB, share.partition_B(cute.local_tile(mB, plan.tiler[1:], (None, None))))
    size = stage_bytes(sB)
    tA, gA = None, None
    if cutlass.const_expr(not plan.a_in_tmem):
        tA, gA = partition(load_a, sA, share.partition_A(cute.local_tile(mA, plan.tiler[::2], (None, None))))
        size += stage_bytes(sA)
    count = Int32(0)
    for tile in cutlass.range(cluster, plan.tiles, plan.clusters, unroll=1):
        for step in cutlass.range(plan.steps, unroll=1):
            stage = count % STAGES
            full = barriers.full + stage
            cute.arch.mbarrier_wait(barriers.empty + stage, count // STAGES % 2 ^ 1)
            if rank == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, size * plan.ctas)
            if cutlass.const_expr(not plan.a_in_tmem):
                cute.copy(load_a, gA[None, tile % plan.tiles_m, step], tA[None, stage], tma_bar_ptr=full)
            cute.copy(load_b, gB[None, tile // plan.tiles_m, step], tB[None, stage], tma_bar_ptr=full)
            count += 1
    for _ in cutlass.range(STAGES, unroll=1):  # no MMA may arrive at the barrier of a CTA that is gone
        cute.arch.mbarrier_wait(barriers.empty + count % STAGES, count // STAGES % 2 ^ 1)
        count += 1


@cute.jit
def multiply_tiles(mma, tA, sA, sB, tmem, barriers, cluster, plan: cutlass.Constexpr) -> None:
    """One warp of the first CTA issues the MMAs of the whole cluster."""
    rB = mma.make_fragment_B(sB)
    if cutlass.const_expr(plan.a_in_tmem):
        shape = mma.partition_shape_A((plan.rows, plan.k))
        rA = cute.make_tensor(tA, mma.make_fragment_A(shape).layout)
        cute.arch.mbarrier_wait(barriers.a_ready, 0)
        fence_after()
    else:
        rA = mma.make_fragment_A(sA)
    shape = mma.partition_shape_C(plan.tiler[:2])
    tC = cute.make_tensor(tmem, mma.make_fragment_C(cute.append(shape, plan.accumulators)).layout)
    count, done = Int32(0), Int32(0)
    for _ in cutlass.range(cluster, plan.tiles, plan.clusters, unroll=1):
        slot = done % plan.accumulators
        accumulator = tC[None, None, None, slot]
        cute.arch.mbarrier_wait(barriers.drained + slot, done // plan.accumulators % 2 ^ 1)
        fence_after()
        for step in cutlass.range(plan.steps, unroll=1):
            stage = count % STAGES
            cute.arch.mbarrier_wait(barriers.full + stage, count // STAGES % 2)
            fence_after()
            blocks = STEP // 16
            for block in cutlass.range_constexpr(blocks):
                left = (
                    rA[None, None, step * blocks + block] if plan.a_in_tmem else rA[None, None, block, stage]
                )
                mma.set(tcgen05.Field.ACCUMULATE, step > 0 if block == 0 else True)
                cute.gemm(mma, accumulator, left, rB[None, None, block, stage], accumulator)
            commit(barriers.empty + stage, plan)
            count += 1
        commit(barriers.product + slot, plan)
        done += 1


@cute.jit
def store_tiles(c, store_c, mC, sC, tmem, barriers, cluster, rank, thread, plan: cutlass.Constexpr) -> None:
    """Four warps of every CTA read its rows of each finished tile from TMEM and store them."""
    done = Int32(0)
    for tile in cutlass.range(cluster, plan.tiles, plan.clusters, unroll=1):
        slot = done % plan.accumulators
        cute.arch.mbarrier_wait(barriers.product + slot, done // plan.accumulators % 2)
        fence_after()
        row = tile % plan.tiles_m * plan.ctas + rank  # in units of own_rows
        column = tile // plan.tiles_m * (plan.columns // WIDTH)  # in units of WIDTH
        for part in cutlass.range(plan.own_columns // WIDTH, unroll=1):
            values = read(tmem + slot * plan.own_columns + part * WIDTH, thread)
            if cutlass.const_expr(plan.by_tma):
                store_part(values, store_c, mC, sC, (row, column + part), part % 2, thread, plan)
            else:
                at_row = row * plan.own_rows + thread % plan.own_rows
                at_column = column + thread // plan.own_rows * (plan.own_columns // WIDTH) + part
                cute.autovec_copy(values, cute.local_tile(c, (1, WIDTH), (at_row, at_column))[0, None])
        arrive_at_first(barriers.drained + slot, plan)
        done += 1
    if cutlass.const_expr(plan.by_tma):
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def store_part(values, store_c, mC, sC, corner, buffer, thread, plan: cutlass.Constexpr) -> None:
    """Round 32 columns and store them, once the store before the last has read its buffer."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        cute.arch.cp_async_bulk_wait_group(1, read=True)
    cute.arch.barrier(barrier_id=STORED, number_of_threads=STORERS * WARP)
    rounded = cute.make_rmem_tensor(values.shape, sC.element_type)
    rounded.store(values.load().to(sC.element_type))
    cute.autovec_copy(rounded, sC[thread, None, buffer])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=STORED, number_of_threads=STORERS * WARP)
    if warp == 0:
        tiles = cute.local_tile(mC, (plan.own_rows, WIDTH), (None, None))
        tC, gC = cpasync.tma_partition(
            store_c, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        with cute.arch.elect_one():  # the DSL elects a lane for loads, not for stores
            cute.copy(store_c, tC[None, buffer], gC[None, corner[0], corner[1]])
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def read(tmem: cute.Pointer, thread: Int32) -> cute.Tensor:
    """A thread's 32 columns of its lane."""
    columns = lanes(tmem)
    copy = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(WIDTH)), Float32), columns
    ).get_slice(thread)
    target = copy.partition_D(cute.make_identity_tensor((128, WIDTH)))
    values = cute.make_rmem_tensor(target.shape, Float32)
    cute.copy(copy, copy.partition_S(columns), values)
    cute.arch.fence_view_async_tmem_load()
    return cute.make_tensor(values.iterator, cute.make_layout(WIDTH))


@cute.jit
def fill(a: cute.Tensor, row: Int32, tmem: cute.Pointer, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Double a row of A and put it in the thread's lane, two 16-bit values a column."""
    for part in cutlass.range(plan.k // (2 * WIDTH), unroll=1):
        values = cute.make_rmem_tensor((2 * WIDTH,), a.element_type)
        cute.autovec_copy(cute.local_tile(a, (1, 2 * WIDTH), (row, part))[0, None], values)
        values.store((values.load().to(Float32) * 2.0).to(a.element_type))
        columns = lanes(tmem + part * WIDTH)
        copy = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(WIDTH)), Float32), columns
        ).get_slice(thread)
        source = copy.partition_S(cute.make_identity_tensor((128, WIDTH)))
        packed = cute.make_tensor(
            cute.recast_ptr(values.iterator, dtype=Float32), cute.make_layout(source.shape)
        )
        cute.copy(copy, packed, copy.partition_D(columns))
    cute.arch.fence_view_async_tmem_store()


def lanes(tmem: cute.Pointer) -> cute.Tensor:
    return cute.make_tensor(tmem, cute.make_layout((128, WIDTH), stride=(LANE, 1)))


def allocate(memory: SmemAllocator, dtype: type, layout: cute.ComposedLayout | None) -> cute.Tensor | None:
    if layout is None:
        return None
    return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def partition(atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """(copy, stage) in shared memory and (copy, tile, step) in global memory."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
    )


def stage_bytes(smem: cute.Tensor) -> int:
    return cute.size_in_bytes(smem.element_type, cute.select(smem.layout, mode=[0, 1, 2]))


def commit(barrier: cute.Pointer, plan: Plan) -> None:
    """Let the MMAs issued so far arrive, when they are done, in every CTA of the cluster."""
    with cute.arch.elect_one():
        if plan.ctas == 2:
            tcgen05.commit(barrier, 0b11, plan.group)
        else:
            tcgen05.commit(barrier)


def arrive_at_first(barrier: cute.Pointer, plan: Plan) -> None:
    """One arrival per warp, in the first CTA of the cluster, ordered after the warp's accesses to TMEM."""
    fence_before()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, 0 if plan.ctas == 2 else None)


def synchronise(plan: Plan) -> None:
    """Synchronise all threads of the cluster."""
    if plan.ctas == 2:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def fence_before() -> None:
    """The fence between work on TMEM and the synchronisation that signals it."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after() -> None:
    """The fence between that synchronisation and the work on TMEM that follows it."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def case(
    name: str,
    dtype: torch.dtype = torch.float16,
    a_turned: bool = False,
    b_turned: bool = False,
    **plan: object,
) -> Case:
    """One GEMM; a turned operand is contiguous along M or N.

    All products of elements and their sums are exact in fp32 in any order.
    """
    chosen = Plan(**plan)

    def operand(rows: int, turned: bool) -> Tensor:
        values = torch.randint(-16, 17, (chosen.k, rows) if turned else (rows, chosen.k)) / 8
        return values.to(dtype).T if turned else values.to(dtype)

    def make() -> tuple[Tensor, ...]:
        c = poison(chosen.m, chosen.n, dtype=dtype if chosen.by_tma else torch.float32)
        return operand(chosen.m, a_turned), operand(chosen.n, b_turned), c

    def reference(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor]:
        return (a.double() @ b.double().T * (2 if chosen.a_in_tmem else 1),)

    return Case(
        f"blackwell_gemm_{name}", gemm, make, reference, archs=("sm_100a",), constants={"plan": chosen}
    )


CASES = (
    case("one_cta"),
    case("bf16", torch.bfloat16, columns=64, k=128),
    case("a_along_m", a_turned=True, columns=256),
    case("b_along_n", b_turned=True),
    case("both_turned", torch.bfloat16, a_turned=True, b_turned=True, columns=64),
    case("persistent", m=384, accumulators=2, clusters=2, k=64),
    case("stored_by_tma", m=384, accumulators=2, clusters=2, by_tma=True),
    case("a_in_tmem", n=384, k=256, clusters=2, a_in_tmem=True, accumulators=2),
    case("two_ctas", rows=256, ctas=2),
    case("two_ctas_wide", torch.bfloat16, m=512, rows=256, columns=256, ctas=2, by_tma=True, clusters=2),
    case("two_ctas_turned", rows=256, ctas=2, a_turned=True, b_turned=True, accumulators=2),
    case("two_ctas_m128", ctas=2, columns=128, accumulators=2),
    case("two_ctas_m128_turned", torch.bfloat16, ctas=2, columns=256, b_turned=True),
    case("two_ctas_a_in_tmem", n=384, k=256, rows=256, ctas=2, a_in_tmem=True),
)
