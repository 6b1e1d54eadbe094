"""CTAs that wait for each other through global memory, and kernels that wait for each other."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from torch import Tensor

from . import Case, poison

THREADS = 64


@cute.jit
def take_turns(x: cute.Tensor, turn: cute.Tensor, y: cute.Tensor) -> None:
    """y += the rows of x (ctas, n), added in order; turn (1) int32 counts from 0 to the number of CTAs.

    Float32 addition is not associative, so the result reveals the order.
    """
    take_turns_kernel(x, turn, y).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def take_turns_kernel(x: cute.Tensor, turn: cute.Tensor, y: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    if thread == 0:
        now = cute.arch.load(turn.iterator, Int32, sem="acquire", scope="gpu")
        while now != cta:
            now = cute.arch.load(turn.iterator, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_threads()
    for i in cutlass.range(thread, cute.size(y), THREADS):
        y[i] = y[i] + x[cta, i]
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.red(turn.iterator, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


def added_in_order(x: Tensor, turn: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = y.clone()
    for row in x:
        total += row
    return torch.tensor([x.shape[0]], dtype=torch.int32), total


@cute.jit
def last_one_sums(x: cute.Tensor, arrivals: cute.Tensor, sums: cute.Tensor, y: cute.Tensor) -> None:
    """y (1) = the sum of x (ctas, 64): the CTA that arrives last adds the sums (ctas) of all.

    arrivals (1) int32 and sums start as 0.
    """
    last_one_sums_kernel(x, arrivals, sums, y).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def last_one_sums_kernel(x: cute.Tensor, arrivals: cute.Tensor, sums: cute.Tensor, y: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas = x.shape[0]
    cute.arch.red(sums.iterator + cta, x[cta, thread], op="add", dtype=Float32, sem="relaxed", scope="gpu")
    cute.arch.sync_threads()
    if thread == 0:
        arrived = cute.arch.atomic_add(arrivals.iterator, Int32(1), sem="acq_rel", scope="gpu")
        if arrived == ctas - 1:
            total = Float32(0.0)
            for i in cutlass.range(ctas):
                total += cute.arch.load(sums.iterator + i, Float32, sem="relaxed", scope="gpu")
            y[0] = total


@cute.jit
def dependent(x: cute.Tensor, between: cute.Tensor, y: cute.Tensor) -> None:
    """between = x + 1, y = 2 between: the second kernel may start early and waits for the first itself."""
    grid, block = (cute.size(x) // THREADS, 1, 1), (THREADS, 1, 1)
    first_kernel(x, between).launch(grid=grid, block=block, use_pdl=True)
    second_kernel(between, y).launch(grid=grid, block=block, use_pdl=True)


@cute.kernel
def first_kernel(x: cute.Tensor, between: cute.Tensor) -> None:
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    between[i] = x[i] + 1.0


@cute.kernel
def second_kernel(between: cute.Tensor, y: cute.Tensor) -> None:
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    cute.arch.griddepcontrol_wait()
    y[i] = between[i] * 2.0


def counter() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


CASES = (
    Case(
        "take_turns",
        take_turns,
        lambda: (torch.randn(6, 200) * 1000, counter(), torch.randn(200)),
        added_in_order,
    ),
    Case(
        "last_one_sums",
        last_one_sums,
        lambda: (torch.randint(-9, 9, (7, THREADS)).float(), counter(), torch.zeros(7), poison(1)),
        lambda x, arrivals, sums, y: (torch.tensor([7]), x.sum(1), x.sum()[None]),
    ),
    Case(
        "dependent",
        dependent,
        lambda: (torch.randn(5 * THREADS), poison(5 * THREADS), poison(5 * THREADS)),
        lambda x, between, y: (x + 1, 2 * (x + 1)),
    ),
)
