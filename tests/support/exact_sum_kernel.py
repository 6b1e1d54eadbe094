"""A kernel that adds up numbers in an exact sum, each by a thread of its own."""

from __future__ import annotations

import functools
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int64
from torch import Tensor

from flash4_torch.backends.flex import totals
from flash4_torch.compile import jit
from flash4_torch.kernels.common import host
from flash4_torch.kernels.common.captured import add_exactly
from flash4_torch.testing import emulate

THREADS = 64


@cute.jit
def sum_up(numbers: cute.Tensor, total: cute.Tensor, stream: cuda.CUstream) -> None:
    """total (FIELDS,) += numbers (up to THREADS)."""
    sum_up_kernel(numbers, total).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def sum_up_kernel(numbers: cute.Tensor, total: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    if thread < numbers.shape[0]:
        add_exactly(total.iterator, numbers[thread])


@functools.cache
def _compiled() -> Any:
    """The kernel; a device of the architecture must be active."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    example = host.strided(Float32, 1), host.strided(Int64, 1)
    with jit.quiet():
        return cute.compile(sum_up, *example, stream, options="--enable-tvm-ffi")


def summed(numbers: Tensor) -> Tensor:
    """The exact sum of float32 numbers, added up in their order."""
    total = totals.zeros(numbers.new_zeros(()), exact=True)[0]
    with emulate.device("sm_90a") as device, device.touching(numbers, total):
        _compiled()(numbers, total)
    return total
