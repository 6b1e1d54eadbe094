"""C = A B^T by wgmma: A in shared memory or registers, tiles claimed from a counter, two ways to store.

The first warp of warpgroup 0 loads; warpgroups 1 and 2 have 64 rows of every tile each.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils.hopper_helpers import make_smem_layout_a, make_smem_layout_b, make_smem_layout_epi
from torch import Tensor

from . import Case, poison

WARP = 32
GROUP = 128  # threads of a warpgroup
CONSUMERS = 2  # warpgroups
THREADS = (1 + CONSUMERS) * GROUP
LOADER_REGISTERS = 40
CONSUMER_REGISTERS = 232
ROWS = 128  # of a tile of C
OWN_ROWS = ROWS // CONSUMERS
STEP = 64  # of the inner dimension, in a stage
STAGES = 3
TICKETS = 2  # tiles that may be claimed ahead
STORED = 1  # a named barrier for each consumer warpgroup, from this one on


@dataclass(frozen=True)
class Plan:
    """What is fixed when a kernel is compiled.

    m, n, k: sizes of the GEMM, in whole tiles and steps.
    columns: columns of a tile of C.
    ctas: number of CTAs that share the tiles.
    a_in_registers: the GEMM takes 2 A, from registers.
    by_tma: C goes through shared memory; otherwise straight from registers.
    """

    m: int = 256
    n: int = 256
    k: int = 320
    columns: int = 128
    ctas: int = 2
    a_in_registers: bool = False
    by_tma: bool = False

    @property
    def tiler(self) -> tuple[int, int, int]:
        return ROWS, self.columns, STEP

    @property
    def tiles_m(self) -> int:
        return self.m // ROWS

    @property
    def tiles(self) -> int:
        return self.tiles_m * (self.n // self.columns)

    @property
    def steps(self) -> int:
        return self.k // STEP


@dataclass(frozen=True)
class Rings:
    """Arrays in shared memory: over stages for A and B, over `TICKETS` for the work indices of tiles."""

    full: cute.Pointer  # one arrival, by the load warp, and the bytes of both loads
    empty: cute.Pointer  # every consumer warp
    ticket: cute.Pointer
    drawn: cute.Pointer  # one arrival, by the load warp
    taken: cute.Pointer  # every consumer warp


@cute.jit
def gemm(
    a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, counter: cute.Tensor, plan: cutlass.Constexpr
) -> None:
    """c = a b^T, or 2 a b^T with a in registers; a is (m, k), b is (n, k), c is (m, n).

    counter: one int32, 0 before; tiles plus CTAs after, as each CTA's last claim finds no tile left.
    """
    a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
    source = warpgroup.OperandSource.RMEM if plan.a_in_registers else warpgroup.OperandSource.SMEM
    majors = a_layout.sm90_mma_major_mode(), b_layout.sm90_mma_major_mode()
    op = warpgroup.MmaF16BF16Op(a.element_type, Float32, (OWN_ROWS, plan.columns, 16), source, *majors)
    mma = cute.make_tiled_mma(op, (CONSUMERS, 1, 1))

    layout_a = make_smem_layout_a(a_layout, plan.tiler, a.element_type, STAGES)
    layout_b = make_smem_layout_b(b_layout, plan.tiler, b.element_type, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp()
    load_a, mA = cpasync.make_tiled_tma_atom(load, a, one_stage(layout_a), plan.tiler[::2])
    load_b, mB = cpasync.make_tiled_tma_atom(load, b, one_stage(layout_b), plan.tiler[1:])
    layout_c, store_c, mC = None, None, None
    if cutlass.const_expr(plan.by_tma):
        part = (OWN_ROWS, plan.columns)
        layout_c = make_smem_layout_epi(c.element_type, LayoutEnum.ROW_MAJOR, part, CONSUMERS)
        store = cpasync.CopyBulkTensorTileS2GOp()
        store_c, mC = cpasync.make_tiled_tma_atom(store, c, one_stage(layout_c), part)

    gemm_kernel(
        mma, load_a, mA, load_b, mB, store_c, mC, c, counter, layout_a, layout_b, layout_c, plan
    ).launch(grid=(plan.ctas, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1)


def one_stage(layout: cute.ComposedLayout) -> cute.ComposedLayout:
    return cute.select(layout, mode=[0, 1])


@cute.kernel
def gemm_kernel(
    mma: cute.TiledMma,
    load_a: cute.CopyAtom,
    mA: cute.Tensor,
    load_b: cute.CopyAtom,
    mB: cute.Tensor,
    store_c: cute.CopyAtom | None,
    mC: cute.Tensor | None,
    c: cute.Tensor,
    counter: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    layout_c: cute.ComposedLayout | None,
    plan: cutlass.Constexpr,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = cute.arch.make_warp_uniform(thread // GROUP)

    memory = SmemAllocator()
    rings = Rings(
        full=memory.allocate_array(Int64, STAGES),
        empty=memory.allocate_array(Int64, STAGES),
        ticket=memory.allocate_array(Int32, TICKETS),
        drawn=memory.allocate_array(Int64, TICKETS),
        taken=memory.allocate_array(Int64, TICKETS),
    )
    sA = allocate(memory, load_a.value_type, layout_a)
    sB = allocate(memory, load_b.value_type, layout_b)
    sC = allocate(memory, c.element_type, layout_c)

    if warp_index == 0:
        initialise(rings)
    cute.arch.sync_threads()

    if group == 0:
        cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
        if warp_index == 0:
            load_tiles(load_a, mA, sA, load_b, mB, sB, counter, rings, plan)
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        consume_tiles(mma, sA, sB, c, store_c, mC, sC, rings, thread - GROUP, group - 1, plan)


@cute.jit
def initialise(rings: Rings) -> None:
    warps = CONSUMERS * GROUP // WARP
    with cute.arch.elect_one():
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(rings.full + stage, 1)
            cute.arch.mbarrier_init(rings.empty + stage, warps)
        for slot in cutlass.range_constexpr(TICKETS):
            cute.arch.mbarrier_init(rings.drawn + slot, 1)
            cute.arch.mbarrier_init(rings.taken + slot, warps)
    cute.arch.mbarrier_init_fence()


@cute.jit
def load_tiles(load_a, mA, sA, load_b, mB, sB, counter, rings, plan: cutlass.Constexpr) -> None:
    """One warp claims tiles, sends their indices to the consumers, and loads operands stage by stage."""
    tA, gA = partition(load_a, sA, cute.local_tile(mA, plan.tiler[::2], (None, None)))
    tB, gB = partition(load_b, sB, cute.local_tile(mB, plan.tiler[1:], (None, None)))
    size = stage_bytes(sA) + stage_bytes(sB)
    count, draws = Int32(0), Int32(0)
    tile = draw(counter)
    publish(tile, draws, rings)
    while tile < plan.tiles:
        for step in cutlass.range(plan.steps, unroll=1):
            stage = count % STAGES
            full = rings.full + stage
            cute.arch.mbarrier_wait(rings.empty + stage, count // STAGES % 2 ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
            cute.copy(load_a, gA[None, tile % plan.tiles_m, step], tA[None, stage], tma_bar_ptr=full)
            cute.copy(load_b, gB[None, tile // plan.tiles_m, step], tB[None, stage], tma_bar_ptr=full)
            count += 1
        tile = draw(counter)
        draws += 1
        publish(tile, draws, rings)


@cute.jit
def draw(counter: cute.Tensor) -> Int32:
    """Claims the next work index; it is the same in all lanes."""
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(counter.iterator, Int32(1))
    return cute.arch.shuffle_sync(number, 0)


@cute.jit
def publish(tile: Int32, draws: Int32, rings: Rings) -> None:
    slot = draws % TICKETS
    cute.arch.mbarrier_wait(rings.taken + slot, draws // TICKETS % 2 ^ 1)
    with cute.arch.elect_one():
        cute.arch.store(rings.ticket + slot, tile)
        cute.arch.mbarrier_arrive(rings.drawn + slot)


@cute.jit
def take(draws: Int32, rings: Rings) -> Int32:
    slot = draws % TICKETS
    cute.arch.mbarrier_wait(rings.drawn + slot, draws // TICKETS % 2)
    tile = cute.arch.make_warp_uniform(cute.arch.load(rings.ticket + slot, Int32))
    arrive(rings.taken + slot)
    return tile


@cute.jit
def consume_tiles(mma, sA, sB, c, store_c, mC, sC, rings, thread, group, plan: cutlass.Constexpr) -> None:
    """Two warpgroups compute and store tile after tile; `thread` and `group` count within them."""
    count, draws = Int32(0), Int32(0)
    tile = take(draws, rings)
    while tile < plan.tiles:
        corner = tile % plan.tiles_m, tile // plan.tiles_m
        sums = multiply(mma, sA, sB, rings, count, thread, group, plan)
        if cutlass.const_expr(plan.by_tma):
            store_rounded(mma, sums, store_c, mC, sC, corner, thread, group, plan)
        else:
            own = mma.get_slice(thread).partition_C(cute.local_tile(c, plan.tiler[:2], corner))
            cute.autovec_copy(sums, own)
        count += plan.steps
        draws += 1
        tile = take(draws, rings)
    if cutlass.const_expr(plan.by_tma):
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def multiply(mma, sA, sB, rings, count, thread, group, plan: cutlass.Constexpr) -> cute.Tensor:
    """A tile's accumulators, from the stages after `count`.

    One wgmma group stays in flight, unless A is in registers.
    """
    part = mma.get_slice(group * GROUP)
    sums = cute.make_rmem_tensor(mma.partition_shape_C(plan.tiler[:2]), Float32)
    rB = mma.make_fragment_B(part.partition_B(sB))
    if cutlass.const_expr(not plan.a_in_registers):
        rA = mma.make_fragment_A(part.partition_A(sA))
    for step in cutlass.range(plan.steps, unroll=1):
        stage = (count + step) % STAGES
        cute.arch.mbarrier_wait(rings.full + stage, (count + step) // STAGES % 2)
        left = (
            doubled(mma, sA[None, None, stage], thread)
            if plan.a_in_registers
            else rA[None, None, None, stage]
        )
        warpgroup.fence()
        for block in cutlass.range_constexpr(STEP // 16):
            mma.set(warpgroup.Field.ACCUMULATE, step > 0 if block == 0 else True)
            cute.gemm(mma, sums, left[None, None, block], rB[None, None, block, stage], sums)
        warpgroup.commit_group()
        if cutlass.const_expr(plan.a_in_registers):
            warpgroup.wait_group(0)
            arrive(rings.empty + stage)
        else:
            warpgroup.wait_group(1)
            if step > 0:
                arrive(rings.empty + (count + step - 1) % STAGES)
    if cutlass.const_expr(not plan.a_in_registers):
        warpgroup.wait_group(0)
        arrive(rings.empty + (count + plan.steps - 1) % STAGES)
    return sums


@cute.jit
def doubled(mma: cute.TiledMma, sA: cute.Tensor, thread: Int32) -> cute.Tensor:
    """The thread's share of 2 A, from shared memory."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), sA.element_type)
    copy = cute.make_tiled_copy_A(atom, mma).get_slice(thread)
    values = mma.make_fragment_A(mma.get_slice(thread).partition_A(sA))
    cute.copy(atom, copy.partition_S(sA), copy.retile(values))
    values.store((values.load().to(Float32) * 2.0).to(sA.element_type))
    return values


@cute.jit
def store_rounded(mma, sums, store_c, mC, sC, corner, thread, group, plan: cutlass.Constexpr) -> None:
    """Each warpgroup stores its own rows, once its previous store has read their buffer."""
    leading = cute.arch.make_warp_uniform(thread % GROUP // WARP) == 0
    if leading:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=STORED + group, number_of_threads=GROUP)
    rounded = cute.make_rmem_tensor(sums.shape, sC.element_type)
    rounded.store(sums.load().to(sC.element_type))
    both = cute.make_tensor(sC.iterator, cute.group_modes(cute.select(sC.layout, [0, 2, 1]), 0, 2))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), sC.element_type)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(atom, copy.retile(rounded), copy.partition_D(both))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=STORED + group, number_of_threads=GROUP)
    if leading:
        tC, gC = partition(store_c, sC, cute.local_tile(mC, (OWN_ROWS, plan.columns), (None, None)))
        with cute.arch.elect_one():  # the DSL elects a lane for loads, not for stores
            cute.copy(store_c, tC[None, group], gC[None, corner[0] * CONSUMERS + group, corner[1]])
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def arrive(barrier: cute.Pointer) -> None:
    """One arrival per warp, after all of its lanes."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def allocate(memory: SmemAllocator, dtype: type, layout: cute.ComposedLayout | None) -> cute.Tensor | None:
    if layout is None:
        return None
    return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def partition(atom: cute.CopyAtom, smem: cute.Tensor, gmem: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """(copy, stage) in shared memory and (copy, tile, tile) in global memory."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


def stage_bytes(smem: cute.Tensor) -> int:
    return cute.size_in_bytes(smem.element_type, cute.select(smem.layout, mode=[0, 1]))


def case(
    name: str, dtype: torch.dtype = torch.float16, a_turned: bool = False, b_turned: bool = False, **plan: int
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
        return operand(chosen.m, a_turned), operand(chosen.n, b_turned), c, torch.zeros(1, dtype=torch.int32)

    def reference(a: Tensor, b: Tensor, c: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
        return a.double() @ b.double().T * (
            2 if chosen.a_in_registers else 1
        ), counter + chosen.tiles + chosen.ctas

    return Case(f"hopper_gemm_{name}", gemm, make, reference, archs=("sm_90a",), constants={"plan": chosen})


CASES = (
    case("k_major"),
    case("n64", torch.bfloat16, columns=64, k=128),
    case("n256", columns=256, b_turned=True),
    case("both_turned", torch.bfloat16, a_turned=True, b_turned=True),
    case("stored_by_tma", m=384, by_tma=True),
    case("stored_by_tma_n256", torch.bfloat16, columns=256, b_turned=True, by_tma=True, m=512),
    case("a_in_registers", a_in_registers=True),
    case(
        "a_in_registers_turned", torch.bfloat16, a_in_registers=True, b_turned=True, columns=64, by_tma=True
    ),
    case("more_ctas_than_tiles", m=128, n=128, k=64, ctas=3),
)
