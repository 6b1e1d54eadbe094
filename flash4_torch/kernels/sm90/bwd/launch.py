"""The host side of the backward kernel: tensor maps, grid, and compiling for any sizes."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from ....configs.types import Features, Scope, Sm90Backward
from ...common import dependent_launch, host, tile_scheduler
from ...common.attn_mask import MaskArgs
from ...common.bwd.launch import compile_for_any, map_of
from ...common.bwd.row_stats import RowInputs
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from ...common.smem_layouts import column_major_layout, row_major_layout
from ..warps import ROWS, WARP_ROWS
from .context import Layouts, Maps, Turned
from .kernel import backward_kernel
from .plan import Plan
from .store_commands import finished_layout, gradient_layout


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
    """Launch dk, dv, and dq_acc += dq / scale; with scope `KV_HEAD` dk, dv and dq.

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dout (B, Sq, Hq, Dv), or packed (T, H, D). The last
    stride is 1, the others are multiples of 8 elements, and bases are aligned to 16 bytes. dk and dv are like
    k and v. stats (2 or 4, B, Hq, Sp) or (2, Hq, Tp) float32: lse in base 2, infinite where there
    is no row or where a row attends to nothing, and rowsum(out * dout) - dlse; with a floating mask or
    score_mod also lse in natural units, and lse_low in base 2. dq_acc (B, Hq, blocks, floats) or (Hq, blocks,
    floats) float32, in the layout of `dq_blocks`. tile_counter int32 (1,), zero before and after.
    dq_semaphore int32 (B, Hq, blocks) or (Hq, blocks), zero before. mask: attn_mask.transpose(2, 3), its last
    dimension full, and its tables; or what `mods` describes, transposed. dmask float32: the mask's gradient,
    transposed and as the mask broadcasts, is added to it. No size is 0.

    With `features.is_stacked` batch entries of q, k, v, dout and their gradients follow one another in
    memory, and the kernel sees some as one (`common.band.Stack`); the workspaces are for these.

    With scope `Q_HEAD` dk and dv have a head for each query head; those of a group are to be summed up.

    With scope `KV_HEAD` dq_acc is (CTAs, Hq / Hk, blocks, floats) with any contents. The number of CTAs is
    `params.num_sms`, or that of the batch's KV heads if there are fewer. dq is like q.
    """
    before = q, k, v, dout, stats, dq_acc, dq, dk, dv, tile_counter, dq_semaphore
    _launch(*before, cu_seqlens_q, cu_seqlens_k, mask, dmask, rng_state, None, params, plan, stream)


@cute.jit
def preprocess_and_backward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    dout: cute.Tensor,
    stats: cute.Tensor,
    dq_acc: cute.Tensor,
    dq: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    rng_state: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch stats, and dk, dv and dq of `backward` with scope `KV_HEAD`, in one kernel with `preprocesses`.

    out like dout; lse (B, Hq, Sq) float32, contiguous; both as the preprocess kernel takes them, which gets
    the same stats from them. stats and dq_acc may have any contents; there is a CTA for each KV head of the
    batch. It is without what scope `KV_HEAD` does not take, and without a counter of tiles.
    """
    inputs = RowInputs(*host.in_order(params.out_heads_first, out, dout), lse)
    none = (None,) * 6
    _launch(q, k, v, dout, stats, dq_acc, dq, dk, dv, *none, rng_state, inputs, params, plan, stream)


@cute.jit
def _launch(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    dout: cute.Tensor,
    stats: cute.Tensor,
    dq_acc: cute.Tensor,
    dq: cute.Tensor | None,
    dk: cute.Tensor,
    dv: cute.Tensor,
    tile_counter: cute.Tensor | None,
    dq_semaphore: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask: MaskArgs | ModArgs | None,
    dmask: cute.Tensor | None,
    rng_state: cute.Tensor | None,
    row_inputs: RowInputs | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """What `backward` and `preprocess_and_backward` launch: the host's side of the kernel."""
    plan.check()
    q, k, v, dk, dv = host.in_order(params.heads_first, q, k, v, dk, dv)
    dout = host.in_order(params.out_heads_first, dout)
    if cutlass.const_expr(plan.features.is_stacked):
        q, k, v, dout, dk, dv = host.stacked(mask.bounds.entries, q, k, v, dout, dk, dv)
    rows, grads, keys, values, dkeys, dvalues = map(host.positions_first, (q, dout, k, v, dk, dv))
    config = plan.config
    part = plan.blocks.piece_columns
    paired, half = plan.cluster_size > 1, plan.D // 2
    layouts = Layouts(
        q=row_major_layout(plan.dtype, plan.queries, plan.D, config.q_stages),
        do=row_major_layout(plan.dtype, plan.queries, plan.Dv, config.do_stages),
        k=row_major_layout(plan.dtype, plan.keys, plan.D, config.kv_stages, part),
        v=row_major_layout(plan.dtype, plan.keys, plan.Dv, config.kv_stages),
        ds=column_major_layout(plan.dtype, plan.queries, plan.keys, config.ds_stages),
        peer_k=row_major_layout(plan.dtype, plan.keys, half, config.kv_stages, part) if paired else None,
    )
    turned = Turned(
        q=column_major_layout(plan.dtype, plan.D, plan.queries, config.q_stages),
        do=column_major_layout(plan.dtype, plan.Dv, plan.queries, config.do_stages),
        k=column_major_layout(plan.dtype, plan.D, plan.keys, config.kv_stages, part),
        peer_k=column_major_layout(plan.dtype, half, plan.keys, config.kv_stages, part) if paired else None,
    )
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    shared = load if not paired else cpasync.CopyBulkTensorTileG2SMulticastOp()
    dk_rows, dk_layout, dv_layout = WARP_ROWS, layouts.k, layouts.v
    if cutlass.const_expr(plan.dkv_via_dq_smem):
        dk_rows, dk_layout, dv_layout = ROWS, gradient_layout(plan, plan.D), gradient_layout(plan, plan.Dv)
    finished = None, None
    if cutlass.const_expr(plan.scope == Scope.KV_HEAD):
        dq = host.in_order(params.heads_first, dq)
        if cutlass.const_expr(plan.features.is_stacked):
            dq = host.stacked(mask.bounds.entries, dq)
        queries = host.positions_first(dq)
        finished = map_of(store, queries, finished_layout(plan), WARP_ROWS, plan.blocks.piece_columns)
    peer_k = None
    if cutlass.const_expr(paired):
        peer_k = map_of(load, keys, layouts.peer_k, plan.keys, half)[0]
    maps = Maps(
        *map_of(shared, rows, layouts.q, *plan.q_share),
        *map_of(shared, grads, layouts.do, *plan.do_share),
        *map_of(load, keys, layouts.k, plan.keys, plan.D),
        *map_of(load, values, layouts.v, plan.keys, plan.Dv),
        *map_of(store, dkeys, dk_layout, dk_rows, plan.D),
        *map_of(store, dvalues, dv_layout, dk_rows, plan.Dv),
        *finished,
        peer_k,
    )
    sequences = k.shape[0]
    if cutlass.const_expr(plan.features.varlen):
        sequences = cu_seqlens_k.shape[0] - 1
    num_work = dkeys.shape[2] * sequences
    if cutlass.const_expr(plan.scope != Scope.KV_HEAD):
        num_work = cute.ceil_div(params.max_seqlen, plan.cluster_keys) * num_work
    kernel = backward_kernel(
        maps,
        layouts,
        turned,
        stats,
        row_inputs,
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
    num_ctas = num_work if config.preprocesses else params.num_sms
    # A kernel that preprocesses is the only one of a call.
    early = dependent_launch.is_possible() and not config.preprocesses
    tile_scheduler.launch(kernel, plan, num_work, num_ctas, stream, use_pdl=early)


def compile_backward(features: Features, config: Sm90Backward) -> Any:
    """`backward` compiled for any sizes and strides; call it with its arguments but `plan` and `stream`.

    With `preprocesses` it is `preprocess_and_backward`.
    """
    plan = Plan(features, config)
    if not config.preprocesses:
        return compile_for_any(backward, plan, plan.blocks.floats)
    return compile_for_any(preprocess_and_backward, plan, plan.blocks.floats)
