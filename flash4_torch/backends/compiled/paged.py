"""The forward over a paged cache, for many query tokens: the kernel that serves a call, and its launch.

    problem = describe(q, k_cache, v_cache, block_table, sinks, options, max_seqlen_q)
    if not limits(target, problem):
        launch = sequence(decide(target, problem, num_sms, target.find))
        launch(q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, sinks, out, lse, tile_counter)

The tensors: q (T, Hq, D) packed; k_cache (pages, page_size, Hk, D) and v_cache (pages, page_size, Hk, Dv), in
which key j of sequence b is row j % page_size of page block_table[b, j // page_size]; block_table (B, blocks)
and seqused_k (B,), integers that only the device reads, as cu_seqlens_q (B + 1,); sinks (Hq,) or None.

A sequence has seqused_k[b] keys, at least 0 and at most blocks * page_size; its last query is aligned to its
last key. Page numbers are clamped to those that exist. Nothing is read of the table for keys that a sequence
lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...configs.types import widest_box
from ...problem import CallOptions, Extent, Problem, Spec, dtype_key
from . import forward
from .forward import Kernel
from .params import FARTHEST
from .targets import Find, ForwardConfig, Target
from .tensors import is_readable, lengths, readable

_DTYPES = (torch.bfloat16, torch.float16)
_STEP = 16
"""Page sizes are multiples of it: keys of the smallest box."""
_MOST_TILES = (1 << 31) - 1


class PagedProblem(NamedTuple):
    """Everything about a call except its tensors' data."""

    problem: Problem
    """The same call with packed keys; `extent.Sq` and `extent.Sk` bound the lengths of all sequences."""
    page_size: int
    cache_dtype: torch.dtype
    in_place: bool
    """Whether TMA can read the pages where they are."""
    causal_flags: bool = False
    """Whether some sequences are causal and others not."""


def describe(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sinks: Tensor | None,
    options: CallOptions,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal_flags: bool = False,
    capability: tuple[int, int] = (0, 0),
) -> PagedProblem:
    """The problem of checked tensors.

    Args:
        max_seqlen_q: a bound on the queries of a sequence. Default: all of them.
        max_seqlen_k: a bound on the keys of a sequence. Default: blocks * page_size.
    """
    (T, Hq, D), (_, page_size, Hk, _), (B, blocks) = q.shape, k_cache.shape, block_table.shape
    room = blocks * page_size
    spec = Spec(
        device=q.device.type,
        dtype=q.dtype,
        D=D,
        Dv=v_cache.shape[-1],
        group=Hq // max(Hk, 1),
        varlen=True,
        left=options.window_left is not None,
        right=options.window_right is not None,
        softcap=options.softcap != 0.0,
        mask="",
        dropout=False,
        deterministic=False,
        sinks=dtype_key(sinks),
        capability=capability,
    )
    extent = Extent(
        B,
        T if max_seqlen_q is None else max_seqlen_q,
        room if max_seqlen_k is None else min(max_seqlen_k, room),
        Hq,
        Hk,
    )
    problem = Problem(spec, extent, options.scale, options.band, options.softcap, dropout_p=0.0)
    in_place = not k_cache.numel() or (is_readable(k_cache) and is_readable(v_cache))
    return PagedProblem(problem, page_size, k_cache.dtype, in_place, causal_flags)


def limits(target: Target, paged: PagedProblem) -> list[str]:
    """The reasons why the target's forward kernels cannot serve the problem; none of them depends on data."""
    spec, extent, why = paged.problem.spec, paged.problem.extent, []
    if spec.dtype not in _DTYPES:
        why.append(f"the dtype is {spec.dtype}, and it serves bfloat16 and float16")
    if paged.cache_dtype != spec.dtype:
        why.append(f"the cache is {paged.cache_dtype}, and it serves caches of q's dtype, {spec.dtype}")
    if paged.page_size % _STEP:
        why.append(f"the page size is {paged.page_size}, and it serves multiples of {_STEP}")
    if paged.causal_flags:
        why.append("causal is a tensor, and it serves one flag for all sequences")
    if not paged.in_place:
        why.append("it reads pages in place: columns side by side, all else at multiples of 16 bytes")
    if spec.mask or spec.dropout:
        why.append("attn_mask or dropout is given, and with pages it serves neither")
    if spec.sinks and spec.sinks not in ("bfloat16", "float16", "float32"):
        why.append(f"sinks are {spec.sinks}, and it takes up to float32")
    why += target.forward_configs.limits(forward.features_of(paged.problem)._replace(D=spec.D, Dv=spec.Dv))
    if max(extent) > FARTHEST or extent.B * extent.Hq * (extent.Sq // 64 + 1) > _MOST_TILES:
        why.append(f"the sizes are {tuple(extent)}, and it counts positions and tiles in 32 bits")
    return why


def decide(target: Target, paged: PagedProblem, num_sms: int, find: Find) -> Kernel:
    """The kernel that serves a problem without `limits`, and its parameters."""
    config = config_of(target, paged)
    page_box = widest_box(paged.page_size, config.keys)
    features = forward.features_of(paged.problem)._replace(page_box=page_box)
    params = forward.params_of(target, paged.problem, config, num_sms)
    return Kernel(find(target.forward, (features, config)), config, params)


def config_of(target: Target, paged: PagedProblem) -> ForwardConfig:
    problem = paged.problem
    band, extent = problem.band, problem.extent
    return target.forward_configs.forward(
        forward.features_of(problem)._replace(page_box=widest_box(paged.page_size)),
        extent.Sq,
        extent.Sk,
        problem.spec.group,
        forward.seen(problem),
        band.right is not None and band.right <= 0,
    )


Sequence = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], None
]
"""Function of the tensors above, out (T, Hq, Dv), lse (Hq, T) and tile_counter, which launches the kernel."""


def sequence(kernel: Kernel, min_seqlen_q: int = 0) -> Sequence:
    """The launch, with everything decided but the tensors.

    min_seqlen_q: sequences with fewer queries are left alone.

    It writes out, of q's dtype, and lse, float32, natural logarithm; either may have any strides. Rows of no
    sequence are left alone. tile_counter: int32 (1,), which is 0 before and after.
    """
    function, params = kernel.function, kernel.params

    def launch(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor,
        tile_counter: Tensor,
    ) -> None:
        if not q.numel() or not seqused_k.numel():
            return
        if not k_cache.numel() or not block_table.numel():
            out.zero_()
            lse.fill_(-math.inf)
            if sinks is not None:
                lse.copy_(sinks[:, None].expand(lse.shape))
            return
        own_out = out if is_readable(out) else out.contiguous()
        own_lse = lse if lse.is_contiguous() else lse.contiguous()
        function(
            readable(q),
            k_cache,
            v_cache,
            own_out,
            own_lse,
            None,
            tile_counter,
            lengths(cu_seqlens_q),
            (block_table.to(torch.int32), lengths(seqused_k), min_seqlen_q),
            None,
            None,
            None if sinks is None else sinks.contiguous(),
            params,
        )
        if own_out is not out:
            out.copy_(own_out)
        if own_lse is not lse:
            lse.copy_(own_lse)

    return launch
