"""The host's side of the forward: tensor maps, grid, and compiling for any sizes."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ....configs.types import Features, Sm90Forward
from ...common import host
from ...common.args import Rule, example_rule
from ...common.attn_mask import MaskArgs, example_args
from .. import persistent
from ..warps import ROWS, WARP_ROWS, WARPS
from ..wgmma import column_major_layout, row_major_layout
from .kernel import Layouts, Maps, forward_kernel
from .plan import Plan


@cute.jit
def forward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    tickets: cute.Tensor,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask: MaskArgs | None,
    rng_state: cute.Tensor | None,
    rule: Rule,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch out = dropout(softmax(scores)) v and lse = logsumexp(scores).

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), or packed (T, H, D); last
    stride 1, the others multiples of 8 elements, bases on 16 bytes. lse (B, Hq, Sq) or (Hq, T) float32,
    contiguous. tickets int32 (1,), zero before and after. No size is 0.
    """
    plan.check()
    heads, keys = _by_key_head(q, k), host.positions_first(k)
    group = heads.shape[0][0]
    values = cute.make_tensor(v.iterator, cute.select(host.positions_first(v).layout, [1, 0, 2, 3]))
    outputs = _by_key_head(out, k)

    layouts = Layouts(
        q=row_major_layout(plan.dtype, ROWS, plan.D, plan.warpgroups * plan.config.q_stages),
        k=row_major_layout(plan.dtype, plan.keys, plan.D, plan.config.kv_stages),
        v=column_major_layout(plan.dtype, plan.Dv, plan.keys, plan.config.kv_stages),
        o=row_major_layout(plan.dtype, WARP_ROWS, plan.Dv, WARPS),
    )
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    shared = load if plan.ctas == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    maps = Maps(
        *_map(load, heads, layouts.q, (plan.box, plan.D)),
        *_map(shared, keys, layouts.k, plan.k_share, plan.ctas),
        *_map(shared, values, layouts.v, plan.v_share, plan.ctas),
        *_map(store, outputs, layouts.o, (plan.store_box, plan.Dv)),
    )
    sequences = q.shape[0]
    if cutlass.const_expr(plan.features.varlen):
        sequences = cu_seqlens_q.shape[0] - 1
    m_blocks = cute.ceil_div(rule.longest, plan.queries)
    head_blocks = cute.ceil_div(group, plan.pack)
    tiles = m_blocks * head_blocks * keys.shape[2] * sequences
    kernel = forward_kernel(
        maps, layouts, out, lse, tickets, cu_seqlens_q, cu_seqlens_k, mask, rng_state, rule, plan
    )
    persistent.launch(kernel, plan, tiles, rule.multiprocessors, stream)


def _by_key_head(x: cute.Tensor, k: cute.Tensor) -> cute.Tensor:
    """((group, S), D, Hk, B): the query heads of a key head and the positions, as rows of a tile."""
    x, Hk = host.positions_first(x), k.shape[cute.rank(k) - 2]
    S, D, Hq, B = x.shape
    s, d, h, b = x.stride
    group = Hq // Hk
    return cute.make_tensor(
        x.iterator, cute.make_layout(((group, S), D, Hk, B), stride=((h, s), d, h * group, b))
    )


def _map(op, tensor: cute.Tensor, layout: cute.ComposedLayout, tiler, parts: int = 1) -> tuple:
    """For a stage, or one of its parts: `tiler` is what one copy brings."""
    stage = cute.select(layout, mode=[0, 1])
    if parts > 1:
        stage = cute.get(cute.zipped_divide(stage, tiler), mode=[0])
    return tuple(cpasync.make_tiled_tma_atom(op, tensor, stage, tiler))[:2]


def compile_forward(features: Features, config: Sm90Forward) -> Any:
    """`forward` compiled for any sizes and strides; call it with its arguments but `plan` and `stream`."""
    plan = Plan(features, config)
    modes = 2 if features.varlen else 3
    q, k, v, out = (
        host.rows(plan.dtype, (*host.any_sizes(modes), D))
        for D in (features.D, features.D, features.Dv, features.Dv)
    )
    lse = host.compact(Float32, host.any_sizes(modes))
    tickets = host.compact(Int32, (1,))
    cu_seqlens = host.compact(Int32, host.any_sizes(1)) if features.varlen else None
    rng_state = host.compact(Int64, (2,)) if features.dropout else None
    mask = example_args(plan.mask) if features.mask else None
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = (q, k, v, out, lse, tickets, cu_seqlens, cu_seqlens, mask, rng_state)
    return cute.compile(forward, *tensors, example_rule(), plan, stream, options="--enable-tvm-ffi")
