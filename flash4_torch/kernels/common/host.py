"""What the host's side of kernels shares: types, views, and tensors that stand for any others."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

NUMERIC = {
    "bool": cutlass.Boolean,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
}


def positions_first(x: cute.Tensor) -> cute.Tensor:
    """(S, D, H, B) of a (B, S, H, D) or packed (S, H, D) tensor, which is a batch of one."""
    if cute.rank(x) == 3:
        S, H, D = x.shape
        s, h, d = x.stride
        return cute.make_tensor(x.iterator, cute.make_layout((S, D, H, 1), stride=(s, d, h, 0)))
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))


def any_sizes(count: int) -> tuple[Any, ...]:
    return tuple(cute.sym_int() for _ in range(count))


def rows(dtype: type, shape: tuple[Any, ...]) -> cute.Tensor:
    """Stands for a tensor that the copy engine takes: bases, and strides but the last, which is 1, in eights.

    It may have more elements than 32 bits count.
    """
    stride = (*(cute.sym_int64(divisibility=8) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16)


def strided(dtype: type, modes: int) -> cute.Tensor:
    """Stands for a tensor of any strides."""
    stride = tuple(cute.sym_int64() for _ in range(modes))
    align = max(dtype.width // 8, 1)
    return cute.runtime.make_fake_tensor(dtype, any_sizes(modes), stride, assumed_align=align)


def compact(dtype: type, shape: tuple[Any, ...]) -> cute.Tensor:
    """Stands for a contiguous tensor."""
    order = tuple(range(len(shape) - 1, -1, -1))
    return cute.runtime.make_fake_compact_tensor(
        dtype, shape, stride_order=order, assumed_align=dtype.width // 8
    )
