"""The decode kernel: which one serves a problem over a KV cache, its limits, and what it is compiled for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from ...configs import decode, decode_shares
from ...configs.decode import DecodeForm, Gpu
from ...configs.types import LARGE_SOFTCAP, Features
from ...kvcache_problem import CacheExtent, CacheProblem, CacheSpec
from ...masks import Band
from ..compiled.params import FARTHEST, dtype_name, kernel_band, kernel_softcap
from ..compiled.targets import Target

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_CTAS = 65535
"""CTAs along the second and third dimension of a grid."""


class Kernel(NamedTuple):
    """What serves a problem."""

    features: Features
    rows: int
    num_splits: int
    split_keys: int
    form: DecodeForm
    parts: int
    """Places in global memory for parts of a tile's results."""


class DecodeParams(NamedTuple):
    """Numbers of a launch; `kernels.decode.params.DecodeParams` documents the same fields."""

    scale: float
    softcap: float
    left: int
    right: int
    max_seqlen_q: int
    split_keys: int
    num_splits: int


def decide(target: Target, problem: CacheProblem, num_sms: int, usual: int | None = None) -> Kernel:
    """The kernel, and how it divides the keys; the number of all tokens has no say.

    usual: tokens that most sequences have at most, for which it is fast; by default `max_seqlen_q`.
    """
    B, _, most, *sizes = problem.extent
    return _decided(target, problem.of_sizes(CacheExtent(B, 0, most, *sizes)), num_sms, usual or most)


@lru_cache(maxsize=4096)
def _decided(target: Target, problem: CacheProblem, num_sms: int, usual: int) -> Kernel:
    spec, features = problem.spec, features_of(problem)
    form, rows = _form_and_rows(target, problem, features, usual)
    likely = problem.of_sizes(problem.extent._replace(max_seqlen_q=usual))
    if form.wgmma:
        rows = _wgmma_rows(likely, features, form, num_sms)
    work = _work_of(likely, features, form, rows, num_sms)
    if spec.batch_invariant:
        sizes = decode.group_clusters(features, form, rows)
        shares, split_keys = decode_shares.group_shares(work, sizes), decode.SPLIT_KEYS
    else:
        shares, split_keys = decode_shares.even_shares(work, min(problem.num_splits or 0, work.blocks)), 0
    form = form._replace(cluster=shares.cluster, parts=shares.parts > 1, alone=shares.alone)
    form = decode.with_blocks(features, form, rows, _has_many_blocks(work))
    return Kernel(features, rows, shares.num_splits, split_keys, form, shares.parts)


def reachable(
    target: Target, problem: CacheProblem, num_sms: int
) -> Iterator[tuple[Features, int, DecodeForm]]:
    """What every kernel is compiled for that `decide` returns for problems like this one, with sizes up to
    its own; and some more. The number of splits is left to us.
    """
    spec, (B, _, Sq, Sk, *heads) = problem.spec, problem.extent
    found: dict[tuple[Features, int, DecodeForm], None] = {}
    left, right = problem.band
    # From some tokens on, all tiles have the most rows, and the bound to the right masks something.
    enough = decode.SHARED_ROWS + max(right or 0, 0) + 2
    for tokens in {*range(1, min(Sq, enough) + 1), Sq}:
        # Tiles with fewer rows are for fewer tokens that most sequences have.
        fewer = {max(rows // spec.group, 1) for rows in decode.ROWS if rows < tokens * spec.group}
        for keys, usual in product({Sk, Sk if left is None else min(max(left + 1, 1), Sk)}, {tokens, *fewer}):
            whole = problem.of_sizes(CacheExtent(B, 0, tokens, keys, *heads))
            found.update(dict.fromkeys(_reachable(target, whole, usual, num_sms)))
    return iter(found)


def _reachable(
    target: Target, problem: CacheProblem, usual: int, num_sms: int
) -> Iterator[tuple[Features, int, DecodeForm]]:
    """The same for these bounds on tokens and keys, up to so many sequences, and `usual` tokens."""
    features, (B, _, _, keys, *heads) = features_of(problem), problem.extent
    one, all_, short = (
        problem.of_sizes(CacheExtent(n, 0, usual, k, *heads)) for n, k in ((1, keys), (B, keys), (1, 1))
    )
    form, rows = _form_and_rows(target, problem, features, usual)
    both = {rows}
    if form.wgmma:
        both = {_wgmma_rows(each, features, form, num_sms) for each in (short, all_)}
    for rows in both:
        work = _work_of(one, features, form, rows, num_sms)
        if problem.spec.batch_invariant:
            sizes = decode.group_clusters(features, form, rows)
            shares = decode_shares.possible_group_shares(work, sizes)
        else:
            shares = decode_shares.possible_shares(work)
        may_be_many = {False, _has_many_blocks(_work_of(all_, features, form, rows, num_sms))}
        for (cluster, has_parts, alone), has_many in product(sorted(shares), sorted(may_be_many)):
            own = form._replace(cluster=cluster, parts=has_parts, alone=alone)
            yield features, rows, decode.with_blocks(features, own, rows, has_many)


def _form_and_rows(
    target: Target, problem: CacheProblem, features: Features, usual: int
) -> tuple[DecodeForm, int]:
    """The form of CTAs that share nothing, and the rows of a tile, which warpgroup MMAs may change.

    A tile has room for the rows of `usual` tokens, and a sequence with more several tiles.
    """
    spec, tokens = problem.spec, problem.extent.max_seqlen_q
    form = form_of(problem)._replace(gpu=target.decode)
    rows = decode.rows(usual, spec.group, _row_choice(problem, features, form))
    wgmma = target.has_wgmma and decode.may_use_wgmma(form, rows, spec.group, spec.batch_invariant)
    few_rows = decode.has_few_rows(rows, tokens * spec.group)
    return form._replace(groups=spec.batch_invariant, wgmma=wgmma, few_rows=few_rows), rows


def _row_choice(problem: CacheProblem, features: Features, form: DecodeForm) -> tuple[int, ...]:
    """Rows that a tile may have."""
    return (decode.group_rows if problem.spec.batch_invariant else decode.rows_of)(features, form)


def _wgmma_rows(problem: CacheProblem, features: Features, form: DecodeForm, num_sms: int) -> int:
    """Rows of a tile by warpgroup MMAs."""
    extent, spec = problem.extent, problem.spec
    choice = decode.wgmma_rows(features, form._replace(groups=spec.batch_invariant))
    rows = decode.rows(extent.max_seqlen_q, spec.group, choice)
    tiles = num_tiles(problem, rows)
    if spec.batch_invariant:
        shares = decode.shares_kv_in_groups(extent.max_seqlen_k, tiles, num_sms)
    else:
        blocks = tiles * math.ceil(extent.max_seqlen_k / decode.KEYS)
        shares = decode.shares_kv(extent.max_seqlen_k, blocks, num_sms)
    return rows if shares else choice[0]


def _work_of(
    problem: CacheProblem, features: Features, form: DecodeForm, rows: int, num_sms: int
) -> decode_shares.Work:
    tiles, keys = num_tiles(problem, rows), problem.extent.max_seqlen_k
    return decode_shares.work_of(features, form, rows, tiles, keys, num_sms)


def _has_many_blocks(work: decode_shares.Work) -> bool:
    return work.tiles * work.blocks >= decode.SHARED_MANY_BLOCKS * work.num_sms


def num_tiles(problem: CacheProblem, rows: int) -> int:
    """Tiles of rows of all KV heads and sequences."""
    extent = problem.extent
    return extent.B * extent.Hk * math.ceil(extent.max_seqlen_q * problem.spec.group / rows)


def form_of(problem: CacheProblem) -> DecodeForm:
    """The tensors of a launch, of CTAs that share nothing."""
    spec = problem.spec
    return DecodeForm(
        paged=spec.paged,
        cluster=1,
        ragged=spec.ragged,
        lengths=spec.lengths,
        causal_flags=spec.causal_flags and problem.band.right is not None,
        cache_dtype="" if spec.cache_dtype == spec.dtype else dtype_name(spec.cache_dtype),
        runs=spec.paged and problem.extent.page_size % decode.RUN == 0,
    )


def features_of(problem: CacheProblem) -> Features:
    """The features that the kernel must have; a bound that masks nothing does not count."""
    spec, band, extent = problem.spec, problem.band, problem.extent
    return Features(
        dtype=dtype_name(spec.dtype),
        D=spec.D,
        Dv=spec.Dv,
        left=band.left is not None and band.left < extent.max_seqlen_k - 1,
        right=band.right is not None and band.right < extent.max_seqlen_q - 1,
        softcap=spec.softcap,
        scaled=spec.softcap or problem.scale <= 0.0,
        large_softcap=problem.softcap > LARGE_SOFTCAP,
        sinks=spec.sinks,
    )


def params_of(problem: CacheProblem, kernel: Kernel) -> DecodeParams:
    softcap, band = kernel_softcap(problem.softcap), kernel_band(problem.band)
    tokens, splits = problem.extent.max_seqlen_q, (kernel.split_keys, kernel.num_splits)
    return DecodeParams(problem.scale, softcap, *band, tokens, *splits)


def limits(problem: CacheProblem, gpu: Gpu = decode.HOPPER) -> tuple[str, ...]:
    """The reasons why the kernel for such a GPU cannot serve the problem, on whatever device it is."""
    extent = problem.extent
    why, rows = _limits_of_any_size(problem.spec, extent.page_size, gpu)
    if max(extent.max_seqlen_k, extent.T) > FARTHEST:
        return *why, f"the sizes are {tuple(extent)}, and it counts positions in 32 bits"
    if rows:
        # The fewest tiles of a sequence, of all KV heads.
        tiles = extent.Hk * -(-extent.max_seqlen_q * problem.spec.group // rows)
        if max(extent.B, tiles) > _MOST_CTAS:
            return *why, f"the sizes are {tuple(extent)}, and a grid has up to {_MOST_CTAS} of each"
    return why


@lru_cache(maxsize=1024)
def _limits_of_any_size(spec: CacheSpec, page_size: int, gpu: Gpu) -> tuple[tuple[str, ...], int]:
    """The reasons that hold for all sizes, and the most rows of a tile, 0 if no head fits."""
    extent = CacheExtent(1, 1, 1, 1, spec.group, 1, page_size)
    problem = CacheProblem(spec, extent, 1.0, Band(None, None), 0.0, 0)
    features, form = features_of(problem), form_of(problem)._replace(gpu=gpu)
    why = []
    if spec.dtype not in _DTYPES:
        why.append(f"the dtype is {spec.dtype}, and it serves bfloat16 and float16")
    head_limits = decode.limits(features, form)
    why += head_limits
    if not spec.aligned:
        why.append("rows of the cache are not contiguous at multiples of 16 bytes")
    if spec.sinks not in ("", "bfloat16", "float16", "float32"):
        why.append(f"sinks are {spec.sinks}, and it takes up to float32")
    return tuple(why), 0 if head_limits else _row_choice(problem, features, form)[-1]


def common_kernels(
    target: Target, features: Features, group: int
) -> Iterator[tuple[Features, int, DecodeForm]]:
    """What the kernels of common calls are compiled for, on a target."""
    for form in common_forms(features, target.decode):
        kinds = [form]
        if target.has_wgmma and not form.cache_dtype:
            kinds.append(form._replace(wgmma=True))
            pairs = form._replace(wgmma=True, alone=True)
            may_be_pairs = form.groups and form.parts and form.cluster == 2
            if may_be_pairs and decode.merges_in_regs(features, pairs, decode.WARPGROUP_ROWS, 2):
                kinds.append(pairs)
        for kind in kinds:
            for rows in decode.rows_of(features, kind)[: 1 if kind.alone else None]:
                own = {
                    decode.with_blocks(features, kind._replace(few_rows=few), rows, has_many)
                    for few in {False, decode.has_few_rows(rows, group)}
                    for has_many in (False, True)
                }
                yield from ((features, rows, form) for form in sorted(own, key=str))


def common_forms(features: Features, gpu: Gpu) -> Iterator[DecodeForm]:
    """Forms of the calls that serving engines make: paged and dense, of one token or packed ones."""
    choice = product(gpu.clusters, (False, True), (False, True), ("", decode.FP8))
    for cluster, parts, groups, cache_dtype in choice:
        form = DecodeForm(
            False,
            cluster,
            ragged=False,
            lengths=True,
            cache_dtype=cache_dtype,
            parts=parts,
            groups=groups,
            gpu=gpu,
        )
        # Where there are clusters, a CTA without one has no part of anything.
        shares = cluster > 1 or groups or not gpu.has_clusters
        if (shares or not parts) and not decode.limits(features, form):
            yield form
            # Pages of 16 keys or more, or packed tokens over pages of one.
            yield from (form._replace(paged=True, runs=True, ragged=ragged) for ragged in (False, True))
            yield form._replace(paged=True, ragged=True)
