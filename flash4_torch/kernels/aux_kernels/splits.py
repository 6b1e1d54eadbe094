"""The forward with the keys of each tile in splits: a kernel for these, and one that merges their results."""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common import host
from ..common.attn_mask import MaskArgs
from ..common.fwd.launch import PageArgs
from ..common.launch_params import LaunchParams
from ..common.mods import ModArgs
from . import merge_states


@cute.jit
def forward_in_splits(
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
    parts: cute.Tensor,
    forward: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    stream: cuda.CUstream,
) -> None:
    """Launch an architecture's `forward` with the keys of each tile in splits, and what merges their results.

    Arguments are those of a forward in one piece, and parts (N, numbers) float32, contiguous, for results of
    N splits: numbers is the least multiple of 8 that is enough for out, lse and lse_low. In one call both
    launches take the host little more than one.
    """
    rows = host.in_order(params.out_heads_first, out)
    of_splits = _parts_of(parts, rows, lse, lse_low)
    forward(
        q,
        k,
        v,
        of_splits.out,
        of_splits.lse,
        of_splits.lse_low,
        tile_counter,
        cu_seqlens_q,
        sequences_k,
        mask,
        rng_state,
        sinks,
        params,
        plan,
        stream,
    )
    sequences, lows = None, None
    if cutlass.const_expr(plan.features.varlen):
        least = sequences_k.min_seqlen_q if cutlass.const_expr(plan.paged) else Int32(0)
        sequences = merge_states.Sequences(cu_seqlens_q, least)
    if cutlass.const_expr(lse_low is not None):
        lows = (of_splits.lse_low,)
    merge_states.merge(
        (of_splits.out,), (of_splits.lse,), lows, rows, lse, lse_low, sequences, plan.merge, stream
    )


class Parts(NamedTuple):
    """Results of all splits."""

    out: cute.Tensor
    lse: cute.Tensor
    lse_low: cute.Tensor | None


def _parts_of(parts: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, lse_low: cute.Tensor | None) -> Parts:
    """Views of (N, numbers): out (N, B, Sq, Hq, Dv), lse and, if there is one, lse_low (N, B, Hq, Sq)."""
    numbers, start = Int64(parts.shape[1]), parts.iterator
    found = []
    for x in (out, lse, lse_low):
        if x is None:
            found.append(None)
            continue
        strides: list[Any] = [1]
        for size in reversed(x.shape[1:]):
            strides.append(strides[-1] * Int64(size))
        layout = cute.make_layout((parts.shape[0], *x.shape), stride=(numbers, *reversed(strides)))
        found.append(cute.make_tensor(start, layout))
        start = start + strides[-1] * Int64(x.shape[0])
    return Parts(*found)
