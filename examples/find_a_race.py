"""A synchronisation bug that rarely shows on a GPU, and how the emulator finds it on any machine.

python examples/find_a_race.py
python -m flash4_torch.testing.emulate examples/find_a_race.py    # with counters, and all findings at the end

Each thread writes a number to shared memory and reads its neighbour's. The first version forgets the barrier
between the two: the last lane of a warp reads from the next warp, and may read the old value.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from flash4_torch.testing import emulate

THREADS = 128


@cute.kernel
def rotate_kernel(x: cute.Tensor, y: cute.Tensor, forget_barrier: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    shared = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(THREADS), byte_alignment=16)
    shared[thread] = x[thread]
    if cutlass.const_expr(not forget_barrier):
        cute.arch.sync_threads()
    y[thread] = shared[(thread + 1) % THREADS]


@cute.jit
def rotate(x: cute.Tensor, y: cute.Tensor, forget_barrier: cutlass.Constexpr) -> None:
    """y[i] = x[i + 1], wrapping at the end."""
    rotate_kernel(x, y, forget_barrier).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def run(forget_barrier: bool) -> None:
    x, y = torch.randn(THREADS), torch.full((THREADS,), torch.nan)
    with emulate.device("sm_90a") as device:
        compiled = cute.compile(rotate, from_dlpack(x), from_dlpack(y), forget_barrier)
        try:
            compiled(from_dlpack(x), from_dlpack(y))
            print(f"no findings, the result is {'right' if torch.equal(y, x.roll(-1)) else 'wrong'}")
        except emulate.EmulationError as error:
            print(error.findings[0])
    print(f"{device.reports[0].counters.instructions} instructions of warps were executed\n")


if __name__ == "__main__":
    print("without the barrier")
    run(forget_barrier=True)
    print("with the barrier")
    run(forget_barrier=False)
