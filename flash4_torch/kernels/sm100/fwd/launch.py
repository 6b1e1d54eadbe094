"""The host's side of the forward: tensor maps, grid, and compiling for any sizes."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup

from ....configs.types import Features, Sm100Forward
from ...aux_kernels.splits import forward_in_splits
from ...common import dependent_launch, host, tile_scheduler
from ...common.attn_mask import MaskArgs
from ...common.fwd.launch import Maps, PageArgs, compile_for_any, count_tiles, in_kernel, rows_of
from ...common.launch_params import LaunchParams
from ...common.mods import ModArgs
from ...common.smem_layouts import column_major_layout, row_major_layout
from ...common.warps import WARP, WARPS
from .context import Layouts
from .kernel import forward_kernel
from .plan import ROWS, Plan


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
    sequences_k: cute.Tensor | PageArgs | None,
    mask: MaskArgs | ModArgs | None,
    rng_state: cute.Tensor | None,
    sinks: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch out = dropout(softmax(scores)) v and lse = logsumexp(scores).

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), or packed (T, H, D); last
    stride 1, the others multiples of 8 elements, bases aligned to 16 bytes. lse (B, Hq, Sq) or (Hq, T)
    float32, contiguous; with a floating mask or score_mod also lse_low: what rounding has taken from lse;
    sinks (Hq,), which lse counts. tile_counter int32 (1,), zero before and after. No size is 0.

    With pages, `sequences_k` are `PageArgs` instead of cu_seqlens_k, and k (pages, page_size, Hk, D) and v
    (pages, page_size, Hk, Dv) have the keys of packed queries. A sequence has seqused_k[b] keys, at least 0
    and at most blocks * page_size. page_size is a multiple of `features.page_box`. Page numbers are clamped
    to those that exist; the table is not read for keys that a sequence lacks.

    With `features.is_stacked` batch entries of q, k, v and out follow one another in memory, and the kernel
    sees some as one (`common.band.Stack`). lse is as without.

    With `features.running` out is float32, and lse may have more rows than q: the kernel writes the first
    ones of each head. "add" merges its results with those that out and lse have.

    With `features.splits` out (N, B, Sq, Hq, Dv) is float32 and lse (N, B, Hq, Sq), or (N, T, Hq, Dv) and
    (N, Hq, T): of N splits of every tile's blocks, which `forward_in_splits` merges. The first one counts
    sinks.
    """
    plan.check()
    q, k, v, (out, outputs), lse = rows_of(q, k, v, out, lse, mask, params, plan)
    heads, keys = host.by_kv_head(q, k), host.positions_first(k)
    values = cute.make_tensor(v.iterator, cute.select(host.positions_first(v).layout, [1, 0, 2, 3]))

    layouts = Layouts(
        q=row_major_layout(plan.dtype, ROWS, plan.D, plan.q_tiles),
        k=row_major_layout(plan.dtype, plan.scores.b.rows, plan.D, 1),
        v=column_major_layout(plan.dtype, plan.output.b.columns, plan.keys, 1),
        o=row_major_layout(plan.dtype, WARP, plan.Dv, WARPS),
    )
    load = cpasync.CopyBulkTensorTileG2SOp(CtaGroup.ONE if plan.cluster_size == 1 else CtaGroup.TWO)
    store = cpasync.CopyBulkTensorTileS2GOp()
    maps = Maps(
        *host.tensor_map(load, heads, layouts.q, (plan.box, plan.D)),
        *host.tensor_map(load, keys, layouts.k, (plan.k_rows, plan.D), plan.boxes),
        *host.tensor_map(load, values, layouts.v, (plan.output.b.columns, plan.v_rows), plan.boxes),
        *_store_map(store, outputs, layouts, plan),
    )
    tiles = count_tiles(q, out, maps, cu_seqlens_q, params, plan)
    kernel = forward_kernel(
        maps,
        layouts,
        out,
        lse,
        lse_low,
        tile_counter,
        cu_seqlens_q,
        in_kernel(sequences_k, k, v, plan),
        mask,
        rng_state,
        sinks,
        params,
        plan,
    )
    early = dependent_launch.is_possible_after_tables(plan.features)
    tile_scheduler.launch(kernel, plan, tiles, params.num_sms, stream, use_pdl=early)


def _store_map(
    store: Any, outputs: cute.Tensor | None, layouts: Layouts, plan: Plan
) -> tuple[Any, cute.Tensor | None]:
    """The map for O; running results and those of splits are written past SMEM."""
    if plan.stores_float32:
        return None, outputs
    return host.tensor_map(store, outputs, layouts.o, (plan.store_box, plan.Dv))


def compile_forward(features: Features, config: Sm100Forward) -> Any:
    """`forward` compiled for any sizes and strides; call it with its arguments but `plan` and `stream`."""
    return compile_for_any(forward, Plan(features, config), forward_in_splits)
