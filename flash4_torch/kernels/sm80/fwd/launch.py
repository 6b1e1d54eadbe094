"""The host side of the forward kernel: layouts, grid, and compiling for any sizes."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from ....configs.types import Features, Sm80Forward
from ...aux_kernels.splits import forward_in_splits
from ...common import dependent_launch, host
from ...common.attn_mask import MaskArgs
from ...common.fwd.launch import Maps, compile_for_any, count_tiles, outputs_of
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from ...common.smem_layouts import column_major_layout, row_major_layout
from .context import Layouts
from .kernel import forward_kernel
from .plan import Plan


@cute.jit
def forward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    lse_low: cute.Tensor | None,
    tile_counter: cute.Tensor,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask: MaskArgs | ModArgs | None,
    rng_state: cute.Tensor | None,
    sinks: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch out = dropout(softmax(scores)) v and lse = logsumexp(scores).

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), or packed (T, H, D). The last
    stride is 1, the others are multiples of 8 elements, and bases are aligned to 16 bytes. lse (B, Hq, Sq) or
    (Hq, T) float32, contiguous; with a floating mask or score_mod lse_low as well: what rounding took from
    lse. sinks (Hq,) are counted by lse. tile_counter is not used: a CTA has one tile. No size is 0.

    With `features.running` out is float32, and lse may have more rows than q: the kernel writes the first
    ones of each head. "add" merges its results with those that out and lse have.

    With `features.splits` out (N, B, Sq, Hq, Dv) is float32 and lse (N, B, Hq, Sq), or (N, T, Hq, Dv) and
    (N, Hq, T): of N splits of every tile's blocks, which `forward_in_splits` merges. The first one counts
    sinks.
    """
    plan.check()
    q, k, v = host.in_order(params.heads_first, q, k, v)
    out, outputs = outputs_of(out, k, params, plan)
    values = host.positions_first(v)
    maps = Maps(
        None,
        host.by_kv_head(q, k),
        None,
        host.positions_first(k),
        None,
        cute.make_tensor(values.iterator, cute.select(values.layout, [1, 0, 2, 3])),
        None,
        outputs,
    )
    dtype, D, Dv = plan.staged_dtype, plan.halves(plan.D), plan.halves(plan.Dv)
    layouts = Layouts(
        q=row_major_layout(dtype, plan.rows, D, plan.q_stages),
        k=row_major_layout(dtype, plan.keys, D, plan.stages),
        v=column_major_layout(dtype, Dv, plan.keys, plan.stages, plan.halves(plan.own_columns)),
        o=None if plan.is_float32 else _o_layout(plan),
        weights=_weights_layout(plan) if plan.shares_rows else None,
    )
    tiles = count_tiles(q, out, maps, cu_seqlens_q, params, plan)
    forward_kernel(
        maps,
        layouts,
        out,
        lse,
        lse_low,
        tile_counter,
        cu_seqlens_q,
        cu_seqlens_k,
        mask,
        rng_state,
        sinks,
        params,
        plan,
    ).launch(
        grid=(tiles, 1, 1),
        block=(plan.threads, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=dependent_launch.is_possible_after_tables(plan.features),
    )


def _o_layout(plan: Plan) -> cute.ComposedLayout:
    row_warps = plan.warps // plan.column_warps
    return row_major_layout(plan.dtype, plan.warp_rows, plan.Dv, row_warps, plan.own_columns)


def _weights_layout(plan: Plan) -> cute.ComposedLayout:
    part = None if plan.is_float32 else plan.own_keys
    return row_major_layout(plan.staged_dtype, plan.rows, plan.halves(plan.keys), 1, part)


def compile_forward(features: Features, config: Sm80Forward) -> Any:
    """`forward` compiled for any sizes and strides; call it with its arguments but `plan` and `stream`."""
    return compile_for_any(forward, Plan(features, config), forward_in_splits)
