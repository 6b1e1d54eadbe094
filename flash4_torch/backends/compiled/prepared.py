"""Launches of calls like one before: everything is decided but the tensors, which come one by one.

Tensors stay as the caller has them, and results are allocated like them: kernels are told the order of
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...problem import Inputs, Problem, new_gradient
from .. import tile_counters
from ..base import BackwardLaunch, Launch, Order
from ..views import Layout
from . import backward as slow_backward
from . import forward as slow_forward
from . import stacks
from .backward import Kernels
from .forward import Kernel
from .masks import Read
from .tensors import contiguous_strides, is_readable, lengths, past_dispatcher, readable
from .workspace import Need, shared


def converted(params: tuple[Any, ...]) -> Any:
    """Parameters as a launch takes them fastest: a tuple would be converted again every time."""
    import tvm_ffi

    return tvm_ffi.convert(params)


def _contiguous(sizes: tuple[int, ...], heads_first: bool = False) -> Layout:
    """The caller's view of (B, S, H, D) that is contiguous."""
    return _in_order(Layout(sizes, contiguous_strides(sizes)), heads_first)


def _in_order(layout: Layout, heads_first: bool) -> Layout:
    """The caller's view of (B, S, H, D), or of packed (T, H, D)."""
    return Layout(*map(_swapped, layout)) if heads_first else layout


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
    function, dtype, stack = kernel.function, problem.spec.dtype, _stack(problem)
    params = converted(kernel.params.in_order(order))
    shapes = slow_forward.shapes_of(inputs.q, inputs.v)
    layout = Layout(shapes.out, contiguous_strides(shapes.out)) if out is None else out
    out_sizes, out_strides = _in_order(layout, order.out_heads_first)
    lse_sizes, lse_strides = _contiguous(shapes.lse)
    has_low = has_low or problem.has_float_mask
    converts, copies_sinks = _converts(inputs)
    empty, float32 = _empty(problem.spec.device), torch.float32
    find_parts = slow_forward.no_parts
    if kernel.splits is not None:
        find_parts = shared(index, (kernel.splits.need(shapes),), past_dispatcher(problem.spec.device))
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
        out = empty(out_sizes, out_strides, dtype)
        lse = empty(lse_sizes, lse_strides, float32)
        low = empty(lse_sizes, lse_strides, float32) if has_low else None
        if converts:
            ends_q, ends_k = lengths(ends_q), lengths(ends_k)
        if copies_sinks and sinks is not None:
            sinks = sinks.contiguous()
        mask = stack if attn_mask is None else read_mask(attn_mask)
        results, tile_counter = (out, lse, low), counter(index)
        function(
            q, k, v, *results, tile_counter, ends_q, ends_k, mask, rng_state, sinks, params, *find_parts()
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
) -> BackwardLaunch:
    """The launches of a backward on device `index`; `inputs` and dout are those of a call before it.

    Of the tensors only dout may need a copy: the gradient of a sum is an expanded tensor.
    """
    preprocess, main, postprocess = kernels.preprocess, kernels.main, kernels.postprocess
    group_reduce, sinks_gradient = kernels.group_reduce, kernels.sinks_gradient
    params, scale, dtype = converted(kernels.params.in_order(order)), problem.scale, problem.spec.dtype
    stack = _stack(problem)
    heads_first, out_heads_first = map(int, order)
    shapes = slow_backward.shapes_of(*inputs[:3], inputs.cu_seqlens_q, kernels)
    new_dq, new_dk, new_dv = (
        (*_in_order(Layout.of(new_gradient(x)), order.heads_first), dtype) for x in inputs[:3]
    )
    copies_dout = not is_readable(dout)
    needs: tuple[Need, ...] = (shapes.stats, torch.float32), (shapes.dq_acc, torch.float32)
    if kernels.is_ordered:
        needs = *needs, (shapes.dq_semaphore, torch.int32)
    find_workspace = shared(index, needs, past_dispatcher(problem.spec.device))
    new_dk_parts, new_dv_parts = (
        (*_contiguous(x, order.heads_first), dtype) for x in (shapes.dk_parts, shapes.dv_parts)
    )
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
        if copies_dout:
            dout = readable(dout)
        if converts:
            ends_q, ends_k = lengths(ends_q), lengths(ends_k)
        stats, dq_acc, *ordered = find_workspace()
        semaphore = ordered[0] if ordered else None
        if preprocess is not None:
            cleared = None if postprocess is None else dq_acc
            preprocess(out, dout, lse, low, None, stats, cleared, semaphore, ends_q, out_heads_first)
        dq, dk, dv = empty(*new_dq), empty(*new_dk), empty(*new_dv)
        dk_parts, dv_parts = dk, dv
        if group_reduce is not None:
            dk_parts, dv_parts = empty(*new_dk_parts), empty(*new_dv_parts)
        if preprocess is None:
            main(q, k, v, dout, stats, dq_acc, dq, dk, dv, out, lse, rng_state, params)
        else:
            mask = stack if attn_mask is None else read_mask(attn_mask)
            main(
                q, k, v, dout, stats, dq_acc, dq if postprocess is None else None, dk_parts, dv_parts,
                counter(index), semaphore, ends_q, ends_k, mask, None, rng_state, params,
            )  # fmt: skip
        if group_reduce is not None:
            group_reduce(dk_parts, dv_parts, dk, dv, heads_first)
        if postprocess is not None:
            postprocess(dq_acc, dq, ends_q, scale, heads_first)
        dsinks = None
        if sinks_gradient is not None and sinks is not None:
            dsinks = torch.empty_like(sinks, memory_format=torch.contiguous_format)
            sinks_gradient(stats, sinks.contiguous() if copies_sinks else sinks, dsinks)
        return dq, dk, dv, dsinks

    return launch


def _stack(problem: Problem) -> Any:
    """What a kernel takes for a stack, None if the call is none."""
    stack = stacks.arguments(problem)
    return stack if stack is None else converted(stack)


def _converts(inputs: Inputs) -> tuple[bool, bool]:
    """Whether kernels need copies of cumulative lengths, and of sinks."""
    ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    sinks = inputs.sinks
    return any(lengths(x) is not x for x in ends), sinks is not None and not sinks.is_contiguous()
