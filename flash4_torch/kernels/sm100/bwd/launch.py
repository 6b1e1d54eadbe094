"""The host's side of the backward: tensor maps, grid, and compiling for any sizes."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup

from ....configs.types import Features, Sm100Backward
from ...common import dependent_launch, host, tile_scheduler
from ...common.attn_mask import MaskArgs
from ...common.bwd.launch import compile_for_any, map_of
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from ...common.smem_layouts import row_major_layout
from ...common.warps import WARP
from ..umma import Matrix
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
    dq: None,
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

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dout (B, Sq, Hq, Dv), or packed (T, H, D); last
    stride 1, the others multiples of 8 elements, bases aligned to 16 bytes. dk and dv like k and v. stats
    (2 or 4, B, Hq, Sp) or (2, Hq, Tp) float32, negated: -lse in base 2, -infinite where
    there is no row or where one attends to nothing, and dlse - rowsum(out * dout); with a floating mask or
    score_mod also -lse in natural units, and -lse_low in base 2. dq_acc (B, Hq, blocks, floats) or (Hq,
    blocks, floats) float32, in the order of `dq_blocks.DqLanes`. tile_counter int32 (1,), zero before and
    after. dq_semaphore int32 (B, Hq, blocks) or (Hq, blocks), zero before. mask: attn_mask.transpose(2, 3),
    its last dimension full, and the tables of that; or what `mods` describes, transposed. dmask float32, the
    mask's gradient as it broadcasts, transposed, is added to. No size is 0.

    With `features.is_stacked` batch entries of q, k, v, dout and their gradients follow one another in
    memory, and the kernel sees some as one (`common.band.Stack`); the workspaces are for these.
    """
    plan.check()
    q, k, v, dk, dv = host.in_order(params.heads_first, q, k, v, dk, dv)
    dout = host.in_order(params.out_heads_first, dout)
    if cutlass.const_expr(plan.features.is_stacked):
        q, k, v, dout, dk, dv = host.stacked(mask.bounds.entries, q, k, v, dout, dk, dv)
    rows, grads, keys, values, dkeys, dvalues = map(host.positions_first, (q, dout, k, v, dk, dv))
    config = plan.config
    paired = plan.cluster_size > 1
    own = plan.queries // plan.cluster_size
    layouts = Layouts(
        q=row_major_layout(plan.dtype, own, plan.D, config.q_stages),
        do=row_major_layout(plan.dtype, own, plan.Dv, config.do_stages),
        k=row_major_layout(plan.dtype, plan.keys, plan.D, config.kv_stages),
        v=row_major_layout(plan.dtype, plan.keys, plan.Dv, config.kv_stages),
        ds=row_major_layout(plan.dtype, plan.cluster_keys, own, 1),
        q_columns=_layout(plan, plan.columns_of_q) if paired else None,
        do_columns=_layout(plan, plan.columns_of_do) if paired else None,
        k_columns=_layout(plan, plan.columns_of_k) if paired else None,
        weights=row_major_layout(plan.dtype, plan.keys, plan.queries, 1) if plan.wide else None,
    )
    load, load_here = (
        cpasync.CopyBulkTensorTileG2SOp(group)
        for group in (CtaGroup.TWO if paired else CtaGroup.ONE, CtaGroup.ONE)
    )
    store = cpasync.CopyBulkTensorTileS2GOp()
    columns, ends = [None] * 3, [None] * 7
    if cutlass.const_expr(paired):
        straight = (
            *((rows, plan.rows_of_q), (grads, plan.rows_of_do)),
            *((keys, Matrix(plan.keys, plan.D)), (values, Matrix(plan.keys, plan.Dv))),
        )
        turned = (rows, plan.columns_of_q), (grads, plan.columns_of_do), (keys, plan.columns_of_k)
        columns = [_loads(load, plan, x, part) for x, part in turned]
        if cutlass.const_expr(plan.features.varlen):
            ends = [_loads(load_here, plan, x, part) for x, part in (*straight, *turned)]
    maps = Maps(
        *map_of(load, rows, layouts.q, own, plan.D),
        *map_of(load, grads, layouts.do, own, plan.Dv),
        *map_of(load, keys, layouts.k, plan.keys, plan.D),
        *map_of(load, values, layouts.v, plan.keys, plan.Dv),
        *map_of(store, dkeys, layouts.k, WARP, plan.D),
        *map_of(store, dvalues, layouts.v, WARP, plan.Dv),
        *columns,
        *ends,
    )
    sequences = k.shape[0]
    if cutlass.const_expr(plan.features.varlen):
        sequences = cu_seqlens_k.shape[0] - 1
    tiles = cute.ceil_div(params.max_seqlen, plan.cluster_keys) * keys.shape[2] * sequences
    kernel = backward_kernel(
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
    )
    early = dependent_launch.is_possible()
    tile_scheduler.launch(kernel, plan, tiles, params.num_sms, stream, use_pdl=early)


def _loads(op: Any, plan: Plan, tensor: cute.Tensor, part: Matrix) -> Any:
    return map_of(op, tensor, _layout(plan, part), part.rows, part.columns)[0]


def _layout(plan: Plan, matrix: Matrix) -> cute.ComposedLayout:
    return row_major_layout(plan.dtype, matrix.rows, matrix.columns, 1)


def compile_backward(features: Features, config: Sm100Backward) -> Any:
    """`backward` compiled for any sizes and strides. Call it with its arguments but `plan` and `stream`."""
    plan = Plan(features, config)
    return compile_for_any(backward, plan, plan.sums.floats)
