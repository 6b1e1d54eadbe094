"""Kernels for tests of the compile layer, separate from their entries: naming those imports no compiler."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32


@cute.kernel
def scale_kernel(x: cute.Tensor, factor: cutlass.Constexpr) -> None:
    i, _, _ = cute.arch.thread_idx()
    if i < x.shape[0]:
        x[i] = x[i] * factor


@cute.kernel
def deprecated_kernel(x: cute.Tensor) -> None:
    i, _, _ = cute.arch.thread_idx()
    x[i] = cute.arch.exp2(x[i])


@cute.jit
def scale(x: cute.Tensor, factor: cutlass.Constexpr, stream) -> None:
    scale_kernel(x, factor).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


@cute.jit
def deprecated(x: cute.Tensor, stream) -> None:
    deprecated_kernel(x).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


def compile_scale(factor: float) -> Any:
    return cute.compile(scale, _vector(), factor, _stream(), options="--enable-tvm-ffi")


def compile_scale_with_deprecated_names() -> Any:
    return cute.compile(deprecated, _vector(), _stream(), options="--enable-tvm-ffi")


def _vector() -> cute.Tensor:
    return cute.runtime.make_fake_compact_tensor(Float32, (cute.sym_int(),))


def _stream() -> Any:
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
