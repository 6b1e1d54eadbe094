"""Launches of calls like one before: everything is decided but the tensors, which come one by one.

Tensors stay as the caller has them. Where their dimensions have another order, kernels get views that are
made past the dispatcher, and results are allocated in the caller's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import Inputs, Problem, new_gradient
from .. import tile_counters
from ..base import BackwardLaunch, Launch, Order
from ..views import Layout, view
from . import backward as slow_backward
from . import forward as slow_forward
from .backward import Kernels
from .forward import Kernel
from .masks import Read
from .tensors import contiguous_strides, is_readable, lengths, readable


def converted(params: tuple[Any, ...]) -> Any:
    """Parameters as a launch takes them fastest: a tuple would be converted again every time."""
    import tvm_ffi

    return tvm_ffi.convert(params)


class _Seen(NamedTuple):
    """A tensor's sizes and strides, as the caller has it and as kernels see it."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    kernel_sizes: tuple[int, ...]
    kernel_strides: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, heads_first: bool) -> _Seen:
        sizes, strides = layout
        if not heads_first:
            return cls(sizes, strides, sizes, strides)
        return cls(_swapped(sizes), _swapped(strides), sizes, strides)

    @classmethod
    def gradient(cls, x: Tensor, heads_first: bool) -> _Seen:
        """The gradient's, for `x` as kernels see it."""
        return cls.of(Layout.of(new_gradient(x)), heads_first)


def _swapped(values: tuple[int, ...]) -> tuple[int, ...]:
    first, second, third, *others = values
    return first, third, second, *others


def _empty(device: str) -> Callable[..., Tensor]:
    """Allocates on the current device as torch's compiled graphs do, from sizes, strides and dtype."""
    empty: Callable[..., Tensor] = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")
    return empty


def forward(
    kernel: Kernel,
    inputs: Inputs,
    problem: Problem,
    index: int,
    read_mask: Read,
    order: Order,
    out: Layout | None = None,
    has_low: bool = False,
) -> Launch:
    """The launch of a forward on device `index`; `inputs` are those of a call before it.

    out: its layout as kernels see it, contiguous by default. has_low: whether lse has a rounding error, as it
    has with a floating mask.
    """
    function, params, dtype = kernel.function, converted(kernel.params), problem.spec.dtype
    heads_first, out_heads_first = order
    shapes = slow_forward.shapes_of(inputs.q, inputs.v)
    *_, q_sizes, q_strides = _Seen.of(Layout.of(inputs.q), heads_first)
    *_, k_sizes, k_strides = _Seen.of(Layout.of(inputs.k), heads_first)
    *_, v_sizes, v_strides = _Seen.of(Layout.of(inputs.v), heads_first)
    layout = Layout(shapes.out, contiguous_strides(shapes.out)) if out is None else out
    out_sizes, out_strides, *seen_out = _Seen.of(layout, out_heads_first)
    lse_sizes, lse_strides = shapes.lse, contiguous_strides(shapes.lse)
    has_low = has_low or problem.has_float_mask
    converts, copies_sinks = _converts(inputs)
    empty, float32 = _empty(problem.spec.device), torch.float32
    counter, current_device = tile_counters.counter, tile_counters.current_device

    def launch(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        rng_state: Tensor | None = None,
        ends_q: Tensor | None = None,
        ends_k: Tensor | None = None,
    ) -> tuple[Any, ...]:
        if current_device() != index:
            with torch.cuda.device(index):
                return launch(q, k, v, attn_mask, sinks, rng_state, ends_q, ends_k)
        written = out = empty(out_sizes, out_strides, dtype)
        lse = empty(lse_sizes, lse_strides, float32)
        low = empty(lse_sizes, lse_strides, float32) if has_low else None
        if heads_first:
            q, k, v = view(q, q_sizes, q_strides), view(k, k_sizes, k_strides), view(v, v_sizes, v_strides)
        if out_heads_first:
            written = view(out, *seen_out)
        if converts:
            ends_q, ends_k = lengths(ends_q), lengths(ends_k)
        if copies_sinks and sinks is not None:
            sinks = sinks.contiguous()
        mask = None if attn_mask is None else read_mask(attn_mask)
        function(
            q, k, v, written, lse, low, counter(index), ends_q, ends_k, mask, rng_state, sinks, params
        )  # fmt: skip
        return out, lse, low, None

    return launch


def backward(
    kernels: Kernels,
    inputs: Inputs,
    problem: Problem,
    index: int,
    read_mask: Read,
    dout: Tensor,
    order: Order,
    out: Layout | None = None,
) -> BackwardLaunch:
    """The launches of a backward on device `index`; `inputs` and dout are those of a call before it.

    Of the tensors only dout may need a copy: the gradient of a sum is an expanded tensor. out: as for the
    forward.
    """
    preprocess, main, postprocess = kernels.preprocess, kernels.main, kernels.postprocess
    group_reduce, sinks_gradient = kernels.group_reduce, kernels.sinks_gradient
    is_ordered = kernels.is_ordered
    params, scale, dtype = converted(kernels.params), problem.scale, problem.spec.dtype
    heads_first, out_heads_first = order
    shapes = slow_backward.shapes_of(*inputs[:3], inputs.cu_seqlens_q, kernels)
    *_, q_sizes, q_strides = _Seen.of(Layout.of(inputs.q), heads_first)
    *_, k_sizes, k_strides = _Seen.of(Layout.of(inputs.k), heads_first)
    *_, v_sizes, v_strides = _Seen.of(Layout.of(inputs.v), heads_first)
    dq_sizes, dq_strides, *seen_dq = _Seen.gradient(inputs.q, heads_first)
    dk_sizes, dk_strides, *seen_dk = _Seen.gradient(inputs.k, heads_first)
    dv_sizes, dv_strides, *seen_dv = _Seen.gradient(inputs.v, heads_first)
    out_shape = slow_forward.shapes_of(inputs.q, inputs.v).out
    out_sizes, out_strides = Layout(out_shape, contiguous_strides(out_shape)) if out is None else out
    dout_strides, copies_dout = dout.stride(), not is_readable(dout)
    stats_shape = shapes.stats, contiguous_strides(shapes.stats), torch.float32
    dq_acc_shape = shapes.dq_acc, contiguous_strides(shapes.dq_acc), torch.float32
    semaphore_shape = shapes.dq_semaphore, contiguous_strides(shapes.dq_semaphore), torch.int32
    dk_parts_shape = shapes.dk_parts, contiguous_strides(shapes.dk_parts), dtype
    dv_parts_shape = shapes.dv_parts, contiguous_strides(shapes.dv_parts), dtype
    converts, copies_sinks = _converts(inputs)
    empty = _empty(problem.spec.device)
    counter, current_device = tile_counters.counter, tile_counters.current_device

    def launch(
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        low: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        rng_state: Tensor | None = None,
        ends_q: Tensor | None = None,
        ends_k: Tensor | None = None,
    ) -> tuple[Any, ...]:
        if current_device() != index:
            with torch.cuda.device(index):
                return launch(
                    dout, out, lse, low, q, k, v, attn_mask, sinks, rng_state, ends_q, ends_k
                )  # fmt: skip
        if out_heads_first:
            out, dout = view(out, out_sizes, out_strides), view(dout, out_sizes, dout_strides)
        if copies_dout:
            dout = readable(dout)
        if converts:
            ends_q, ends_k = lengths(ends_q), lengths(ends_k)
        stats, dq_acc = empty(*stats_shape), empty(*dq_acc_shape)
        semaphore = empty(*semaphore_shape) if is_ordered else None
        cleared = None if postprocess is None else dq_acc
        preprocess(out, dout, lse, low, None, stats, cleared, semaphore, ends_q)
        new_dq = dq = empty(dq_sizes, dq_strides, dtype)
        new_dk = dk = empty(dk_sizes, dk_strides, dtype)
        new_dv = dv = empty(dv_sizes, dv_strides, dtype)
        if heads_first:
            q, k, v = view(q, q_sizes, q_strides), view(k, k_sizes, k_strides), view(v, v_sizes, v_strides)
            dq, dk, dv = view(dq, *seen_dq), view(dk, *seen_dk), view(dv, *seen_dv)
        mask = None if attn_mask is None else read_mask(attn_mask)
        dk_parts, dv_parts = dk, dv
        if group_reduce is not None:
            dk_parts, dv_parts = empty(*dk_parts_shape), empty(*dv_parts_shape)
        main(
            q, k, v, dout, stats, dq_acc, dq if postprocess is None else None, dk_parts, dv_parts,
            counter(index), semaphore, ends_q, ends_k, mask, None, rng_state, params,
        )  # fmt: skip
        if group_reduce is not None:
            group_reduce(dk_parts, dv_parts, dk, dv)
        if postprocess is not None:
            postprocess(dq_acc, dq, ends_q, scale)
        dsinks = None
        if sinks_gradient is not None and sinks is not None:
            dsinks = torch.empty_like(sinks, memory_format=torch.contiguous_format)
            sinks_gradient(stats, sinks.contiguous() if copies_sinks else sinks, dsinks)
        return new_dq, new_dk, new_dv, dsinks

    return launch


def _converts(inputs: Inputs) -> tuple[bool, bool]:
    """Whether kernels need copies of cumulative lengths, and of sinks."""
    ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    sinks = inputs.sinks
    return any(lengths(x) is not x for x in ends), sinks is not None and not sinks.is_contiguous()
