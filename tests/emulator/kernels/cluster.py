"""CTAs that work together: multicast, distributed shared memory, barriers of a peer and of the cluster."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind
from cutlass.memory import SmemAllocator

from . import Case, poison
from .pipeline import STAGES, WARP, allocate, smem_layout

ROWS, COLUMNS = 64, 32
THREADS = 128


@cute.jit
def multicast(x: cute.Tensor, y: cute.Tensor, ctas: cutlass.Constexpr) -> None:
    """y[r] = (r + 1) x for the CTA of each rank r; x (M, 32), y (ctas, M, 32), float32.

    Each CTA of the cluster loads its share of every tile and multicasts it to all of them.
    """
    layout = smem_layout(SmemLayoutAtomKind.K_SW128, Float32, (ROWS, COLUMNS, STAGES))
    load, mX = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SMulticastOp(),
        x,
        cute.slice_(layout, (None, None, 0)),
        (ROWS, COLUMNS),
        num_multicast=ctas,
    )
    multicast_kernel(load, mX, y, layout, ctas).launch(
        grid=(ctas, 1, 1), block=(THREADS + WARP, 1, 1), cluster=(ctas, 1, 1)
    )


@cute.kernel
def multicast_kernel(load, mX, y, layout, ctas: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    rank = cute.arch.block_idx_in_cluster()
    warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    full = memory.allocate_array(cutlass.Int64, STAGES)
    empty = memory.allocate_array(cutlass.Int64, STAGES)
    sX = allocate(memory, Float32, layout)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, ctas * THREADS // WARP)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()

    tiles = cute.zipped_divide(mX, (ROWS, COLUMNS))
    tX, gX = cpasync.tma_partition(load, rank, cute.make_layout(ctas), cute.group_modes(sX, 0, 2), tiles)
    count = cute.size(gX, mode=[1])
    if warp_index == THREADS // WARP:
        for tile in cutlass.range(count):
            stage, phase = tile % STAGES, tile // STAGES % 2
            cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, ROWS * COLUMNS * 4)
            cute.copy(
                load,
                gX[None, tile],
                tX[None, stage],
                tma_bar_ptr=full + stage,
                mcast_mask=cutlass.Int16((1 << ctas) - 1),
            )
    else:
        for tile in cutlass.range(count):
            stage, phase = tile % STAGES, tile // STAGES % 2
            cute.arch.mbarrier_wait(full + stage, phase)
            for i in cutlass.range(thread, ROWS * COLUMNS, THREADS):
                row, column = i // COLUMNS, i % COLUMNS
                y[rank, tile * ROWS + row, column] = sX[row, column, stage] * (rank + 1).to(Float32)
            # Every CTA's next load overwrites this stage here too, so each of them must be told.
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                for peer in cutlass.range_constexpr(ctas):
                    cute.arch.mbarrier_arrive(empty + stage, peer)
    # A CTA that has exited has no barrier to arrive at.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def exchange(x: cute.Tensor, y: cute.Tensor) -> None:
    """y[r] = x[peer] + 10 x[r] for two CTAs; x, y (2, 128) float32.

    A CTA stores into its peer's shared memory, and then loads from there what the peer has made of it.
    """
    exchange_kernel(x, y).launch(grid=(2, 1, 1), block=(THREADS, 1, 1), cluster=(2, 1, 1))


@cute.kernel
def exchange_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    rank = cute.arch.block_idx_in_cluster()
    memory = SmemAllocator()
    inbox = memory.allocate_tensor(Float32, cute.make_layout(THREADS), byte_alignment=16)
    result = memory.allocate_tensor(Float32, cute.make_layout(THREADS), byte_alignment=16)
    peer_inbox = cute.arch.map_dsmem_ptr(inbox.iterator, rank ^ 1)
    peer_result = cute.arch.map_dsmem_ptr(result.iterator, rank ^ 1)

    # A CTA may write into another CTA's shared memory only once that one runs.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    cute.arch.inline_ptx(
        "st.shared::cluster.f32 [{$r0}], {$r1};", read_only_args=[peer_inbox + thread, x[rank, thread]]
    )
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    result[thread] = inbox[thread] * 10.0 + x[rank, thread]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    y[rank, thread] = cute.arch.inline_ptx(
        "ld.shared::cluster.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[peer_result + thread],
    )
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


@cute.jit
def hand_over(x: cute.Tensor, y: cute.Tensor) -> None:
    """y[r] = -x[r - 1] around the cluster, (ctas, n): a bulk copy into the next CTA's shared memory."""
    ctas = x.shape[0]
    hand_over_kernel(x, y).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(ctas, 1, 1))


@cute.kernel
def hand_over_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    rank = cute.arch.block_idx_in_cluster()
    ctas, n = x.shape
    memory = SmemAllocator()
    arrived = memory.allocate_array(cutlass.Int64)
    outbox = memory.allocate_tensor(Float32, cute.make_layout(n), byte_alignment=16)
    inbox = memory.allocate_tensor(Float32, cute.make_layout(n), byte_alignment=16)
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, n * 4)
    for i in cutlass.range(thread, n, THREADS):
        outbox[i] = -x[rank, i]
    cute.arch.fence_view_async_shared()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()

    if thread == 0:
        # Not CopyBulkS2SOp, which signals the sender's mbarrier: the copy must signal where it arrives.
        peer = (rank + 1) % ctas
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                cute.arch.map_dsmem_ptr(inbox.iterator, peer).toint(),
                outbox.iterator.toint(),
                Int32(n * 4),
                cute.arch.map_dsmem_ptr(arrived, peer).toint(),
            ],
        )
    cute.arch.mbarrier_wait(arrived, 0)
    for i in cutlass.range(thread, n, THREADS):
        y[rank, i] = inbox[i]
    # The copy reads outbox until its receiver has it.
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def cluster_sum(x: cute.Tensor, y: cute.Tensor) -> None:
    """y[i] = the sum of x[i], computed by every CTA; x (groups, ctas, 128), y (groups, ctas), float32.

    Each warp sums by shuffles, each CTA in shared memory, and each sends its sum to all asynchronously.
    """
    groups, ctas, _ = x.shape
    cluster_sum_kernel(x, y).launch(grid=(ctas, groups, 1), block=(THREADS, 1, 1), cluster=(ctas, 1, 1))


@cute.kernel
def cluster_sum_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    _, group, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    lane, warp_index = cute.arch.lane_idx(), cute.arch.warp_idx()
    ctas = x.shape[1]
    memory = SmemAllocator()
    arrived = memory.allocate_array(cutlass.Int64)
    of_warps = memory.allocate_tensor(Float32, cute.make_layout(THREADS // WARP), byte_alignment=16)
    of_ctas = memory.allocate_tensor(Int32, cute.make_layout(ctas), byte_alignment=16)
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, ctas * 4)
    cute.arch.cluster_arrive_relaxed()

    total = cute.arch.warp_reduction_sum(x[group, rank, thread])
    if lane == 0:
        of_warps[warp_index] = total
    cute.arch.sync_threads()
    cute.arch.cluster_wait()
    if thread < ctas:
        total = Float32(0.0)
        for i in cutlass.range_constexpr(THREADS // WARP):
            total += of_warps[i]
        bits = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[total])
        cute.arch.store_async_dsmem(of_ctas.iterator + rank, bits, arrived, thread)
    cute.arch.mbarrier_wait(arrived, 0)
    if thread == 0:
        total = Float32(0.0)
        for i in cutlass.range_constexpr(ctas):
            bits = of_ctas[i]
            total += cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits]
            )
        y[group, rank] = total


def multicast_case(ctas: int, tiles: int) -> Case:
    ranks = torch.arange(1, ctas + 1).view(-1, 1, 1)
    return Case(
        name=f"multicast_{ctas}",
        host=multicast,
        make=lambda: (torch.randn(tiles * ROWS, COLUMNS), poison(ctas, tiles * ROWS, COLUMNS)),
        reference=lambda x, y: (x * ranks,),
        constants={"ctas": ctas},
    )


def case(host: Any, make: Any, reference: Any, **more: Any) -> Case:
    return Case(host.__name__, host, make, reference, **more)


CASES = (
    multicast_case(ctas=2, tiles=5),
    multicast_case(ctas=4, tiles=3),
    case(
        exchange,
        lambda: (torch.randint(-9, 9, (2, THREADS)).float(), poison(2, THREADS)),
        lambda x, y: (10 * x + x.flip(0),),
    ),
    case(hand_over, lambda: (torch.randn(4, 200), poison(4, 200)), lambda x, y: (-x.roll(1, 0),)),
    case(
        cluster_sum,
        lambda: (torch.randint(-9, 9, (3, 4, THREADS)).float(), poison(3, 4)),
        lambda x, y: (x.sum((1, 2))[:, None].expand(3, 4),),
    ),
)
