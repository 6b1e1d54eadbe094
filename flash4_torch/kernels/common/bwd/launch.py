"""Host code that backward kernels share: TMA maps, and compiling for any sizes.

`plan` is what a kernel is compiled for.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ....configs.types import Scope
from .. import attn_mask, dropout, host, mods
from ..launch_params import example_params
from .plan import BackwardPlan


def map_of(op: Any, tensor: cute.Tensor, layout: cute.ComposedLayout, rows: int, columns: int) -> tuple:
    """The TMA atom, and the tensor as it takes it, for `rows` rows of a stage, `columns` columns of each."""
    stage, tiler = cute.select(layout, mode=[0, 1]), (rows, columns)
    if tiler != tuple(cute.size(stage, mode=[i]) for i in range(2)):
        stage = cute.get(cute.zipped_divide(stage, tiler), mode=[0])
    return tuple(cpasync.make_tiled_tma_atom(op, tensor, stage, tiler))[:2]


def compile_for_any(backward: Any, plan: BackwardPlan, floats: int) -> Any:
    """`backward` compiled for any sizes and strides; `floats`: floats of a block of dQ's sums.

    With `preprocesses` it takes out and lse in place of what comes between dv and rng_state.
    """
    features = plan.features
    # Workspaces of segments are those of packed sequences.
    modes, packed = (2 if features.is_packed else 3), (1 if features.varlen else 2)
    q, k, v, dout, dk, dv = (
        host.rows(plan.dtype, (*host.any_sizes(modes), D))
        for D in (features.D, features.D, features.Dv, features.Dv, features.D, features.Dv)
    )
    stats = host.rows(
        Float32, (features.row_stats, *host.any_sizes(packed), cute.sym_int(divisibility=plan.queries))
    )
    dq_acc = host.rows(Float32, (*host.any_sizes(packed + 1), floats))
    tile_counter = host.compact(Int32, (1,))
    cu_seqlens = host.compact(Int32, host.any_sizes(1)) if features.varlen else None
    dq_semaphore = host.compact(Int32, host.any_sizes(packed + 1)) if features.deterministic else None
    mask = attn_mask.example_args(plan.mask) if features.mask else None
    if any(features.mods):
        mask = mods.example_args(plan)
    dmask = host.strided(Float32, 4) if features.dmask else None
    rng_state = dropout.example_state(features)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    dq = host.rows(plan.dtype, (*host.any_sizes(modes), features.D)) if plan.scope == Scope.KV_HEAD else None
    others: tuple = (tile_counter, dq_semaphore, cu_seqlens, cu_seqlens, mask, dmask)
    if plan.config.preprocesses:
        out = host.rows(plan.dtype, (*host.any_sizes(modes), features.Dv))
        others = out, host.compact(Float32, host.any_sizes(modes))
    tensors = (q, k, v, dout, stats, dq_acc, dq, dk, dv, *others, rng_state)
    return cute.compile(backward, *tensors, example_params(), plan, stream, options="--enable-tvm-ffi")
