"""The host side of the weights kernel: tensor maps, grid, and compiling for any sizes."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync

from ...configs.types import Features
from ...configs.weights import KEYS, QUERIES
from ..common import dependent_launch, dropout, host
from ..common.attn_mask import MaskArgs, example_args
from ..common.launch_params import LaunchParams, example_params
from ..common.smem_layouts import row_major_layout
from .context import Maps
from .kernel import weights_kernel
from .plan import WeightsPlan


@cute.jit
def attention_weights(
    q: cute.Tensor,
    k: cute.Tensor,
    lse: cute.Tensor,
    lse_low: cute.Tensor | None,
    weights: cute.Tensor,
    mask: MaskArgs | None,
    rng_state: cute.Tensor | None,
    params: LaunchParams,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch weights = dropout(exp(scores - lse)), or their mean over the query heads, or exp(scores - lse)
    with signs that are negative where dropout takes a weight.

    q (B, Sq, Hq, D), k (B, Sk, Hk, D): the last stride is 1, the others are multiples of 8 elements, and
    bases are aligned to 16 bytes. lse (B, Hq, Sq) float32, contiguous; with a floating mask lse_low as well.
    weights (B, Hq, Sq, Sk), averaged (B, Sq, Sk), contiguous, in q's dtype. No size is 0.
    """
    plan.check()
    queries, keys = host.positions_first(q), host.positions_first(k)
    dtype, columns = plan.staged_dtype, plan.halves(plan.chunk)
    layouts = (
        row_major_layout(dtype, QUERIES, columns, plan.stages),
        row_major_layout(dtype, KEYS, columns, plan.stages),
    )
    maps = Maps(None, queries, None, keys)
    if cutlass.const_expr(plan.tma):
        op = cpasync.CopyBulkTensorTileG2SOp()
        maps = Maps(
            *host.tensor_map(op, queries, layouts[0], (QUERIES, plan.chunk)),
            *host.tensor_map(op, keys, layouts[1], (KEYS, plan.chunk)),
        )
    B, Sq, Hq, _ = q.shape
    across = B if cutlass.const_expr(plan.average) else B * Hq
    grid = (cute.ceil_div(k.shape[1], KEYS), cute.ceil_div(Sq, QUERIES), across)
    weights_kernel(maps, layouts, weights, lse, lse_low, mask, rng_state, params, plan).launch(
        grid=grid,
        block=(plan.threads, 1, 1),
        stream=stream,
        use_pdl=dependent_launch.is_possible(),
        min_blocks_per_mp=1,
    )


def compile_weights(features: Features, average: bool, tma: bool = True, signed: bool = False) -> Any:
    """`attention_weights` compiled for any sizes; call it with its arguments but `plan` and `stream`."""
    plan = WeightsPlan(features, average, tma, signed)
    q, k = (host.rows(plan.dtype, (*host.any_sizes(3), features.D)) for _ in range(2))
    lse = host.compact(Float32, host.any_sizes(3))
    lse_low = host.compact(Float32, host.any_sizes(3)) if features.float_mask else None
    weights = host.compact(plan.dtype, host.any_sizes(3 if average else 4))
    mask = example_args(plan.mask) if features.mask else None
    rng_state = dropout.example_state(features)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = (q, k, lse, lse_low, weights, mask, rng_state)
    return cute.compile(
        attention_weights, *tensors, example_params(), plan, stream, options="--enable-tvm-ffi"
    )
