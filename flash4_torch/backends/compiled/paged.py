"""The forward over a cache, for many query tokens: the kernel that serves a call, and its launch.

    problem = problem_of(cache_problem)
    if not limits(target, problem):
        launch = sequence(decide(target, problem, num_sms, target.find), lambda params: params, workspace)
        launch(q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, sinks, out, lse, tile_counter)

The tensors: q (T, Hq, D) packed; k_cache (pages, page_size, Hk, D) and v_cache (pages, page_size, Hk, Dv), in
which key j of sequence b is row j % page_size of page block_table[b, j // page_size]; block_table (B, blocks)
and seqused_k (B,), integers that only the device reads, as cu_seqlens_q (B + 1,); sinks (Hq,) or None.

A sequence has seqused_k[b] keys, at least 0 and at most blocks * page_size; its last query is aligned to its
last key. Page numbers are clamped to those that exist. Nothing is read of the table for keys that a sequence
lacks. A cache without pages is one in which each sequence has one page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...configs.packing import best_pack
from ...configs.sizes import Sizes
from ...configs.types import Features, widest_box
from ...kvcache_problem import CacheProblem, CacheSpec
from ...problem import Extent, Problem, Spec
from . import forward
from .forward import Kernel
from .params import FARTHEST, LaunchParams
from .targets import Find, ForwardConfig, Target
from .tensors import lengths
from .workspace import Need, Workspace

_DTYPES = (torch.bfloat16, torch.float16)
_STEP = 16
"""Page sizes are multiples of it: keys of the smallest box."""
_MOST_TILES = (1 << 31) - 1
_MOST_TOKENS_KNOWN = 256
"""Numbers of tokens for which a launch knows its workspace."""


class PagedProblem(NamedTuple):
    """Everything about a call except its tensors' data."""

    problem: Problem
    """The same call with packed keys; `extent.Sq` and `extent.Sk` bound the lengths of all sequences."""
    page_size: int
    """0: a page holds all keys of a sequence, and its last box may reach beyond it."""
    cache_dtype: torch.dtype
    in_place: bool
    """Whether TMA can read the pages where they are."""
    causal_flags: bool = False
    """Whether some sequences are causal and others not."""
    num_splits: int = 0
    """Splits of keys that the caller asks for; 0 leaves the choice to us."""

    def of_sequences(self, number: int) -> PagedProblem:
        """The same problem for so many sequences."""
        extent = self.problem.extent._replace(B=number)
        return self._replace(problem=self.problem._replace(extent=extent))


def problem_of(problem: CacheProblem) -> PagedProblem:
    """The problem as the forward kernels have it."""
    spec, extent, band = problem.spec, problem.extent, problem.band
    packed = _packed(spec, band.left is not None, band.right is not None)
    sizes = Extent(extent.B, extent.max_seqlen_q, extent.max_seqlen_k, extent.Hq, extent.Hk)
    dense = Problem(packed, sizes, problem.scale, problem.band, problem.softcap, 0.0)
    page_size = extent.page_size if spec.paged else 0
    return PagedProblem(
        dense, page_size, spec.cache_dtype, spec.aligned, spec.causal_flags, problem.num_splits or 0
    )


@lru_cache(maxsize=1024)
def _packed(spec: CacheSpec, left: bool, right: bool) -> Spec:
    """The properties of the same call with packed keys."""
    return Spec(
        device=spec.device,
        dtype=spec.dtype,
        D=spec.D,
        Dv=spec.Dv,
        group=spec.group,
        varlen=True,
        left=left,
        right=right,
        softcap=spec.softcap,
        mask="",
        dropout=False,
        deterministic=False,
        sinks=spec.sinks,
        capability=spec.capability,
    )


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
    why += _limits_of(target, forward.features_of(paged.problem), spec.D, spec.Dv)
    if max(extent) > FARTHEST or extent.B * extent.Hq * (extent.Sq // 64 + 1) > _MOST_TILES:
        why.append(f"the sizes are {tuple(extent)}, and it counts positions and tiles in 32 bits")
    return why


@lru_cache(maxsize=1024)
def _limits_of(target: Target, features: Features, D: int, Dv: int) -> tuple[str, ...]:
    """The table's reasons; the features have padded head sizes."""
    return tuple(target.forward_configs.limits(features._replace(D=D, Dv=Dv)))


def decide(target: Target, paged: PagedProblem, num_sms: int, find: Find) -> Kernel:
    """The kernel that serves a problem without `limits`, and its parameters."""
    features = forward.features_of(paged.problem)
    asked = features._replace(page_box=widest_box(paged.page_size))
    split = forward.split_of(target, paged.problem, num_sms, asked, paged.num_splits)
    config = forward.config_of(target, paged.problem, num_sms, asked) if split is None else split.config
    features = features._replace(page_box=widest_box(paged.page_size, config.keys))
    if split is not None:
        return forward.with_splits(target, paged.problem, split, features, num_sms, find)
    params = forward.params_of(target, paged.problem, config, num_sms)
    return Kernel(find(target.forward, (features, config)), config, params)


def common_kernels(
    target: Target, features: Features, group: int
) -> Iterator[tuple[Features, ForwardConfig]]:
    """What the forward kernels are compiled for where pages have 16, 64 or 256 keys, or there are none."""
    for page_size in (16, 64, 256):
        asked = features._replace(varlen=True, page_box=widest_box(page_size))
        for own, config in forward.reachable(target, asked, group):
            yield own._replace(page_box=widest_box(page_size, config.keys)), config


def reachable(target: Target, paged: PagedProblem, queries: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Entries, and what every kernel is compiled for that `decide` finds for problems like this one with
    sizes up to its own, and at least `queries` in the longest sequence; and some more.
    """
    problem, page_size = paged.problem, paged.page_size
    (left, right), (_, Sq, Sk, *_), group = problem.band, problem.extent, problem.spec.group
    tokens = {Sq, Sq if right is None else max(queries, min(right + 1, Sq))}
    keys = {Sk, Sk if left is None else min(max(left + 1, 1), Sk)}
    found: dict[tuple[Features, ForwardConfig], None] = {}
    for size_q, size_k in product(sorted(tokens), sorted(keys)):
        sizes = problem.extent._replace(Sq=size_q, Sk=size_k)
        asked = forward.features_of(problem._replace(extent=sizes))._replace(page_box=widest_box(page_size))
        ragged_k = not (right is not None and right <= 0 and asked.right)
        for own, config in forward.reachable(target, asked, group):
            rows, pack = config.queries * config.pack_gqa, config.pack_gqa
            packs = {1, *(best_pack(asked, rows, Sizes(n, size_k, group)) for n in range(queries, rows))}
            if (own.splits or config.ragged_k == ragged_k) and pack in packs:
                found[own._replace(page_box=widest_box(page_size, config.keys)), config] = None
    yield from ((target.forward, static) for static in found)


FindWorkspace = Callable[[tuple[Need, ...]], Workspace]
"""What finds tensors that nobody reads after a launch, by their shapes and dtypes."""
Sequence = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], None
]
"""Function of the tensors above, out (T, Hq, Dv), lse (Hq, T) and tile_counter, which launches the kernel."""


def sequence(
    kernel: Kernel, convert: Callable[[LaunchParams], Any], workspace: FindWorkspace, min_seqlen_q: int = 0
) -> Sequence:
    """The launch, with everything decided but the tensors, of which q and out are readable.

    convert: makes of parameters what the kernel is given. workspace: finds memory for results of splits.
    min_seqlen_q: sequences with fewer queries are left alone.

    It writes out, of q's dtype, and lse, float32, contiguous, natural logarithm. Rows of no sequence are left
    alone. tile_counter: int32 (1,), which is 0 before and after.
    """
    function, params, splits = kernel.function, convert(kernel.params), kernel.splits

    @lru_cache(_MOST_TOKENS_KNOWN)
    def parts_of(T: int, Hq: int, Dv: int) -> Workspace:
        assert splits is not None
        return workspace((splits.need(forward.Shapes((T, Hq, Dv), (Hq, T))),))

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
        if block_table.dtype != torch.int32:
            block_table = block_table.to(torch.int32)
        ends = lengths(cu_seqlens_q)
        parts = () if splits is None else parts_of(*out.shape)()
        function(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            None,
            tile_counter,
            ends,
            (block_table, lengths(seqused_k), min_seqlen_q),
            None,
            None,
            None if sinks is None else sinks.contiguous(),
            params,
            *parts,
        )

    return launch
