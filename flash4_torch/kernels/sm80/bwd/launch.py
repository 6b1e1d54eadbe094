"""The host side of the backward's main kernel: layouts, grid, and compiling for any sizes."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from ....configs.types import Features, Sm80Backward
from ...common import dependent_launch, host
from ...common.attn_mask import MaskArgs
from ...common.bwd.launch import compile_for_any
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from ...common.smem_layouts import row_major_layout
from .context import Layouts, Maps
from .kernel import backward_kernel
from .plan import Plan


@cute.jit
def backward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    dout: cute.Tensor,
    stats: cute.Tensor,
    dq_acc: cute.Tensor,
    dq: cute.Tensor | None,
    dk: cute.Tensor,
    dv: cute.Tensor,
    tile_counter: cute.Tensor,
    dq_semaphore: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask: MaskArgs | ModArgs | None,
    dmask: cute.Tensor | None,
    rng_state: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch dk, dv, and dq_acc += dq / scale.

    The arguments are those of the Hopper kernel, with scope `KEY_TILE`, so that dq is None; dq_acc has the
    order `by_register` of `dq_blocks`. tile_counter is used where sums have an order.
    """
    plan.check()
    q, k, v, dk, dv = host.in_order(params.heads_first, q, k, v, dk, dv)
    dout = host.in_order(params.out_heads_first, dout)
    dtype, (q_width, do_width) = plan.staged_dtype, (plan.halves(n) for n in (plan.D, plan.Dv))
    layouts = Layouts(
        q=row_major_layout(dtype, plan.queries, q_width, plan.stages),
        do=row_major_layout(dtype, plan.queries, do_width, plan.stages),
        k=row_major_layout(dtype, plan.keys, q_width, 1),
        v=row_major_layout(dtype, plan.keys, do_width, 1),
        weights=_weights_layout(plan),
    )
    maps = Maps(*map(host.positions_first, (q, dout, k, v)))
    sequences = k.shape[0]
    if cutlass.const_expr(plan.features.varlen):
        sequences = cu_seqlens_k.shape[0] - 1
    num_work = cute.ceil_div(params.max_seqlen, plan.keys) * maps.mK.shape[2] * sequences
    backward_kernel(
        maps,
        layouts,
        stats,
        dq_acc,
        dk,
        dv,
        tile_counter,
        dq_semaphore,
        cu_seqlens_q,
        cu_seqlens_k,
        mask,
        dmask,
        rng_state,
        params,
        plan,
    ).launch(
        grid=(num_work, 1, 1),
        block=(plan.threads, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=dependent_launch.is_possible(),
    )


def _weights_layout(plan: Plan) -> cute.ComposedLayout:
    """Layout of P and dS: of float32 numbers the rows are queries, so that lanes store single numbers without
    conflicts, and there are keys for whole chunks.
    """
    if plan.is_float32:
        return row_major_layout(plan.staged_dtype, plan.queries, plan.halves(plan.config.weight_keys), 1)
    return row_major_layout(plan.dtype, plan.keys, plan.queries, 1, plan.chunk_queries)


def compile_backward(features: Features, config: Sm80Backward) -> Any:
    """`backward` compiled for any sizes and strides; call it with its arguments but `plan` and `stream`."""
    plan = Plan(features, config)
    return compile_for_any(backward, plan, plan.blocks.floats)
