"""The host's side of the backward: tensor maps, grid, and compiling for any sizes."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ....configs.types import BackwardFeatures, Sm90Backward
from ...common.args import BackwardRule, example_backward_rule
from ...common.attn_mask import MaskArgs, example_args
from ..wgmma import column_major_layout, row_major_layout
from .kernel import Layouts, Maps, Turned, backward_kernel
from .plan import WARP_ROWS, Plan


@cute.jit
def backward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    dout: cute.Tensor,
    stats: cute.Tensor,
    dq_acc: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    tickets: cute.Tensor,
    turns: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    mask: MaskArgs | None,
    dmask: cute.Tensor | None,
    rng_state: cute.Tensor | None,
    rule: BackwardRule,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch dk, dv, and dq_acc += dq / scale.

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dout (B, Sq, Hq, Dv), or packed (T, H, D); last
    stride 1, the others multiples of 8 elements, bases on 16 bytes. dk and dv like k and v, contiguous.
    stats (2, B, Hq, Sp) or (2, Hq, Tp) float32: lse in base 2, infinite where there is no row or where one
    attends to nothing, and rowsum(out * dout) - dlse. dq_acc (B, Hq, blocks, floats) or (Hq, blocks, floats)
    float32, in the order of `dq_blocks`. tickets int32 (1,), zero before and after. turns int32 (B, Hq,
    blocks) or (Hq, blocks), zero before. mask: attn_mask.transpose(2, 3), its last dimension full, and the
    tables of that. dmask float32, the mask's gradient as it broadcasts, transposed, is added to. No size
    is 0.
    """
    plan.check()
    rows, grads, keys, values, dkeys, dvalues = map(_positions_first, (q, dout, k, v, dk, dv))
    config = plan.config
    part = plan.blocks.piece_columns
    paired, half = plan.ctas > 1, plan.D // 2
    layouts = Layouts(
        q=row_major_layout(plan.dtype, plan.queries, plan.D, config.q_stages),
        do=row_major_layout(plan.dtype, plan.queries, plan.Dv, config.do_stages),
        k=row_major_layout(plan.dtype, plan.keys, plan.D, config.kv_stages, part),
        v=row_major_layout(plan.dtype, plan.keys, plan.Dv, config.kv_stages),
        ds=column_major_layout(plan.dtype, plan.queries, plan.keys, config.ds_stages),
        other_k=row_major_layout(plan.dtype, plan.keys, half, config.kv_stages, part) if paired else None,
    )
    turned = Turned(
        q=column_major_layout(plan.dtype, plan.D, plan.queries, config.q_stages),
        do=column_major_layout(plan.dtype, plan.Dv, plan.queries, config.do_stages),
        k=column_major_layout(plan.dtype, plan.D, plan.keys, config.kv_stages, part),
        other_k=column_major_layout(plan.dtype, half, plan.keys, config.kv_stages, part) if paired else None,
    )
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    shared = load if not paired else cpasync.CopyBulkTensorTileG2SMulticastOp()
    other_k = None
    if cutlass.const_expr(paired):
        other_k = _map(load, keys, layouts.other_k, plan.keys, half)[0]
    maps = Maps(
        *_map(shared, rows, layouts.q, *plan.q_share),
        *_map(shared, grads, layouts.do, *plan.do_share),
        *_map(load, keys, layouts.k, plan.keys, plan.D),
        *_map(load, values, layouts.v, plan.keys, plan.Dv),
        *_map(store, dkeys, layouts.k, WARP_ROWS, plan.D),
        *_map(store, dvalues, layouts.v, WARP_ROWS, plan.Dv),
        other_k,
    )
    sequences = k.shape[0]
    if cutlass.const_expr(plan.features.varlen):
        sequences = cu_seqlens_k.shape[0] - 1
    tiles = cute.ceil_div(rule.longest_k, plan.ticket_keys) * keys.shape[2] * sequences
    kernel = backward_kernel(
        maps,
        layouts,
        turned,
        stats,
        dq_acc,
        dk,
        dv,
        tickets,
        turns,
        cu_seqlens_q,
        cu_seqlens_k,
        mask,
        dmask,
        rng_state,
        rule,
        plan,
    )
    block = (plan.threads, 1, 1)
    if cutlass.const_expr(plan.ctas == 1):
        grid = (cutlass.min(tiles, rule.multiprocessors), 1, 1)
        kernel.launch(grid=grid, block=block, min_blocks_per_mp=1, stream=stream)
    else:
        clusters = cutlass.max(cutlass.min(tiles, rule.multiprocessors // plan.ctas), 1)
        cluster = (plan.ctas, 1, 1)
        grid = (clusters * plan.ctas, 1, 1)
        kernel.launch(grid=grid, block=block, cluster=cluster, min_blocks_per_mp=1, stream=stream)


def _positions_first(x: cute.Tensor) -> cute.Tensor:
    """(S, D, H, B) of a (B, S, H, D) or packed (S, H, D) tensor, which is a batch of one."""
    if cute.rank(x) == 3:
        S, H, D = x.shape
        s, h, d = x.stride
        return cute.make_tensor(x.iterator, cute.make_layout((S, D, H, 1), stride=(s, d, h, 0)))
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))


def _map(op, tensor: cute.Tensor, layout: cute.ComposedLayout, rows: int, columns: int) -> tuple:
    """For rows of a stage, `columns` of each."""
    stage, tiler = cute.select(layout, mode=[0, 1]), (rows, columns)
    if tiler != tuple(cute.size(stage, mode=[i]) for i in range(2)):
        stage = cute.get(cute.zipped_divide(stage, tiler), mode=[0])
    return tuple(cpasync.make_tiled_tma_atom(op, tensor, stage, tiler))[:2]


def compile_backward(features: BackwardFeatures, config: Sm90Backward) -> Any:
    """`backward` compiled for any sizes and strides; call it with its arguments but `plan` and `stream`."""
    plan = Plan(features, config)
    q, k, v, dout = (_rows(plan, D) for D in (features.D, features.D, features.Dv, features.Dv))
    packed = 1 if features.varlen else 2
    # Workspaces may have more numbers than 32 bits count.
    stats = _rows_of(Float32, (2, *_any(packed), cute.sym_int(divisibility=plan.queries)))
    dq_acc = _rows_of(Float32, (*_any(packed + 1), plan.blocks.floats))
    dk, dv = (_rows(plan, D) for D in (features.D, features.Dv))
    tickets = _compact(Int32, (1,), 4)
    cu_seqlens = _compact(Int32, _any(1), 4) if features.varlen else None
    turns = _compact(Int32, _any(packed + 1), 4) if features.deterministic else None
    mask = example_args(plan.mask) if features.mask else None
    dmask = _strided(Float32, 4) if features.dmask else None
    rng_state = _compact(Int64, (2,), 8) if features.dropout else None
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    workspaces = (stats, dq_acc, dk, dv, tickets, turns)
    tensors = (q, k, v, dout, *workspaces, cu_seqlens, cu_seqlens, mask, dmask, rng_state)
    return cute.compile(backward, *tensors, example_backward_rule(), plan, stream, options="--enable-tvm-ffi")


def _any(count: int) -> tuple:
    return tuple(cute.sym_int() for _ in range(count))


def _rows(plan: Plan, D: int) -> cute.Tensor:
    """Stands for any (B, S, H, D) or (T, H, D) tensor that the copy engine takes."""
    return _rows_of(plan.dtype, (*_any(2 if plan.features.varlen else 3), D))


def _rows_of(dtype: type, shape: tuple) -> cute.Tensor:
    stride = (*(cute.sym_int64(divisibility=8) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16)


def _strided(dtype: type, modes: int) -> cute.Tensor:
    stride = tuple(cute.sym_int64() for _ in range(modes))
    return cute.runtime.make_fake_tensor(dtype, _any(modes), stride, assumed_align=dtype.width // 8)


def _compact(dtype: type, shape: tuple, align: int) -> cute.Tensor:
    order = tuple(range(len(shape) - 1, -1, -1))
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)
