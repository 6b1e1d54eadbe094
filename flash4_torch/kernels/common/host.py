"""Host-side helpers of the kernels: types, views, and tensors that stand for any others."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

NUMERIC = {
    "bool": cutlass.Boolean,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
}


def positions_first(x: cute.Tensor) -> cute.Tensor:
    """A (S, D, H, B) view of a (B, S, H, D) or packed (S, H, D) tensor, which is a batch of one."""
    if cute.rank(x) == 3:
        S, H, D = x.shape
        s, h, d = x.stride
        return cute.make_tensor(x.iterator, cute.make_layout((S, D, H, 1), stride=(s, d, h, 0)))
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))


def in_order(heads_first: Int32, *tensors: cute.Tensor) -> Any:
    """(B, S, H, D) views of tensors whose dimensions are these or, if `heads_first` is not 0, (B, H, S, D).

    A packed tensor has one order.
    """
    views = tuple(_in_order(heads_first != 0, x) for x in tensors)
    return views if len(views) > 1 else views[0]


def _in_order(heads_first: Any, x: cute.Tensor) -> cute.Tensor:
    if cute.rank(x) == 3:
        return x
    (B, first, second, D), (b, of_first, of_second, d) = x.shape, x.stride
    sizes = (Int32(cutlass.select_(heads_first, *pair)) for pair in ((second, first), (first, second)))
    strides = (
        cute.assume(Int64(cutlass.select_(heads_first, *pair)), divby=_vector(x.element_type))
        for pair in ((of_second, of_first), (of_first, of_second))
    )
    return cute.make_tensor(x.iterator, cute.make_layout((B, *sizes, D), stride=(b, *strides, d)))


def stacked(entries: Int32, *tensors: cute.Tensor) -> Any:
    """(B / entries, entries * S, H, D) views of (B, S, H, D) tensors whose entries follow one another."""
    views = tuple(_stacked(entries, x) for x in tensors)
    return views if len(views) > 1 else views[0]


def _stacked(entries: Int32, x: cute.Tensor) -> cute.Tensor:
    (B, S, H, D), (b, s, h, d) = x.shape, x.stride
    step = cute.assume(Int64(b) * Int64(entries), divby=_vector(x.element_type))
    layout = cute.make_layout((B // entries, S * entries, H, D), stride=(step, s, h, d))
    return cute.make_tensor(x.iterator, layout)


def stacked_rows(entries: Int32, x: cute.Tensor) -> cute.Tensor:
    """A (B / entries, H, (S, entries)) view of numbers of rows, (B, H, S) and contiguous."""
    B, H, S = x.shape
    each = Int64(H) * Int64(S)
    layout = cute.make_layout((B // entries, H, (S, entries)), stride=(each * Int64(entries), S, (1, each)))
    return cute.make_tensor(x.iterator, layout)


def _vector(dtype: type) -> int:
    """What divides the strides of `rows` of that type."""
    return max(8, 128 // dtype.width)


def any_sizes(count: int) -> tuple[Any, ...]:
    return tuple(cute.sym_int() for _ in range(count))


def rows(dtype: type, shape: tuple[Any, ...]) -> cute.Tensor:
    """A stand-in for any tensor that TMA takes: aligned to 16 bytes, as are strides but for the last, 1.

    It may have more elements than 32 bits count.
    """
    stride = (*(cute.sym_int64(divisibility=_vector(dtype)) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16)


def strided(dtype: type, modes: int) -> cute.Tensor:
    """A stand-in for any tensor of any strides."""
    stride = tuple(cute.sym_int64() for _ in range(modes))
    align = max(dtype.width // 8, 1)
    return cute.runtime.make_fake_tensor(dtype, any_sizes(modes), stride, assumed_align=align)


def compact(dtype: type, shape: tuple[Any, ...]) -> cute.Tensor:
    """A stand-in for any contiguous tensor."""
    order = tuple(range(len(shape) - 1, -1, -1))
    return cute.runtime.make_fake_compact_tensor(
        dtype, shape, stride_order=order, assumed_align=dtype.width // 8
    )


def by_kv_head(x: cute.Tensor, k: cute.Tensor) -> cute.Tensor:
    """A ((group, S), D, Hk, B) view: query heads of a KV head and positions are the rows of a tile."""
    x, Hk = positions_first(x), k.shape[cute.rank(k) - 2]
    S, D, Hq, B = x.shape
    s, d, h, b = x.stride
    group = Hq // Hk
    return cute.make_tensor(
        x.iterator, cute.make_layout(((group, S), D, Hk, B), stride=((h, s), d, h * group, b))
    )


def tensor_map(op, tensor: cute.Tensor, layout: cute.ComposedLayout, tiler, parts: int = 1) -> tuple:
    """The TMA atom and tensor for a stage, or for one of its `parts`: `tiler` is what one copy brings."""
    stage = cute.select(layout, mode=[0, 1])
    if parts > 1:
        stage = cute.get(cute.zipped_divide(stage, tiler), mode=[0])
    return tuple(cpasync.make_tiled_tma_atom(op, tensor, stage, tiler))[:2]
