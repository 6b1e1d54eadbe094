"""The backend of our compiled kernels for attention over a KV cache: its limits, and its launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...configs import decode, decode_shares
from ...configs.decode import DecodeForm, Gpu
from ...configs.types import LARGE_SOFTCAP, Features
from ...kvcache_problem import CacheExtent, CacheInputs, CacheProblem, CacheSpec
from ...masks import Band
from .. import constants, tile_counters
from ..compiled import paged
from ..compiled.backend import num_sms
from ..compiled.paged import PagedProblem
from ..compiled.params import FARTHEST, dtype_name, kernel_band, kernel_softcap
from ..compiled.prepared import converted
from ..compiled.served import OnTargets
from ..compiled.targets import DECODE, Find, Target
from ..compiled.tensors import (
    allocator_like,
    is_readable,
    lengths,
    new_past_dispatcher,
    past_dispatcher,
    readable,
)
from ..compiled.workspace import Need, Workspace, allocated, shared
from .base import CacheLaunch

_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16
"""Bytes."""
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


Launch = Callable[[CacheInputs, Tensor, Tensor], None]
"""Function that writes out and lse of some sequences."""
New = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Function that allocates a contiguous tensor of a shape and dtype."""
View = Callable[[Tensor], Tensor]
"""Function that gives a cache strides that the kernel accepts."""
_MOST_TOKENS_KNOWN = 256
"""Numbers of tokens for which a prepared launch knows its workspace."""


class Means(NamedTuple):
    """How a launch comes by what it needs besides the call's tensors."""

    new: New
    convert: Callable[[tuple[Any, ...]], Any]
    """Makes of parameters what a kernel is given."""
    workspace: Callable[[tuple[Need, ...]], Workspace]


class Compiled(OnTargets):
    """The backend that serves the GPUs of its targets."""

    def why_not(self, problem: CacheProblem) -> list[str]:
        spec = problem.spec
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        gpu = self._any_target(spec.capability).decode
        return [*self._why_not_here(spec.capability), *limits(problem, gpu)]

    def attend(self, inputs: CacheInputs, problem: CacheProblem, out: Tensor | None) -> tuple[Tensor, Tensor]:
        q = readable(inputs.q)
        # A copy of all of `out`: rows of no sequence keep what they have.
        target = None if out is None else readable(out)
        launch = self._sequence(inputs, problem, _dispatched(q))
        results = launch(inputs._replace(q=q), target)
        if target is out or out is None:
            return results
        return out.copy_(results[0]), results[1]

    def prepare(self, inputs: CacheInputs, problem: CacheProblem, out: Tensor | None) -> CacheLaunch | None:
        """`attend`, prepared for tensors of these sizes and strides, unless q or `out` needs a copy."""
        if not is_readable(inputs.q) or not (out is None or is_readable(out)):
            return None
        workspace = partial(self.workspace, inputs.q.get_device())
        means = Means(new_past_dispatcher(problem.spec.device), converted, workspace)
        return self._sequence(inputs, problem, means)

    def _sequence(self, inputs: CacheInputs, problem: CacheProblem, means: Means) -> CacheLaunch:
        """The launch, with everything decided but the tensors; q and out are readable.

        The number of tokens decides nothing, so that it may be another one later.
        """
        spec, extent = problem.spec, problem.extent
        Hq, Dv, dtype = extent.Hq, spec.Dv, spec.dtype
        caches = _canonical(inputs.k_cache), _canonical(inputs.v_cache)
        launches: list[Launch] = []
        index = inputs.q.get_device()
        if extent.B and extent.T and extent.max_seqlen_q:
            many = with_many_tokens(problem, self.target(problem))
            if many is None:
                launches.append(self._decode(index, problem, caches, means, extent.max_seqlen_q))
            else:
                launches.append(self._forward(inputs, problem, caches, many, means))
                if spec.ragged:
                    launches.append(self._decode_others(inputs, problem, caches, means))
        current_device, new = self.current_device, means.new

        def launch(x: CacheInputs, out: Tensor | None) -> tuple[Tensor, Tensor]:
            if current_device() != index:
                with torch.cuda.device(index):
                    return launch(x, out)
            T = x.q.shape[0]
            out, lse = new((T, Hq, Dv), dtype) if out is None else out, new((Hq, T), torch.float32)
            for one in launches:
                one(x, out, lse)
            return out, lse

        return launch

    def _decode_others(
        self, inputs: CacheInputs, problem: CacheProblem, caches: tuple[View, View], means: Means
    ) -> Launch:
        """The launch of the decode kernel next to the forward's, of sequences with few tokens."""
        most, index = most_tokens(self.target(problem), problem), inputs.q.get_device()
        few = with_few_tokens(problem, most)

        @cache
        def launch_of(usual: int) -> Launch:
            return self._decode(index, few, caches, means, usual)

        def usual_of(q: Tensor) -> int:
            """Tokens of each if all have as many, or more that fill a tile of the same rows."""
            long, group = _longest_sequences(problem, q.shape[0]), problem.spec.group
            tokens = max(q.shape[0] - long * problem.extent.max_seqlen_q, 1)
            each = -(-tokens // max(problem.extent.B - long, 1))
            return min(max(decode.rows(each, group) // group, 1), most)

        launch_of(usual_of(inputs.q))
        return lambda x, out, lse: launch_of(usual_of(x.q))(x, out, lse)

    def _decode(
        self, index: int, problem: CacheProblem, caches: tuple[View, View], means: Means, usual: int
    ) -> Launch:
        """The launch that splits keys, of sequences with up to max_seqlen_q tokens, most of which have no
        more than `usual`.
        """
        spec, extent = problem.spec, problem.extent
        kernel = decide(self.target(problem), problem, self.sms(index), usual)
        function = self.find(problem)(DECODE, (kernel.features, kernel.rows, kernel.form))
        form, params = kernel.form, means.convert(params_of(problem, kernel))
        parts, Hq, columns = kernel.parts, extent.Hq, decode.part_columns(spec.Dv)

        @lru_cache(_MOST_TOKENS_KNOWN)
        def workspace(T: int) -> Workspace:
            float32 = torch.float32
            sums, lse = (parts, T, Hq, columns), (parts, form.cluster, Hq, T)
            return means.workspace(((sums, float32), (lse, float32)))

        canonical_k, canonical_v = caches
        number, counters = _tiles(problem, kernel.rows) * form.cluster, self.counters
        nothing = (None, None, None)

        def launch(x: CacheInputs, out: Tensor, lse: Tensor) -> None:
            partial: Any = nothing
            if form.parts:
                partial = *workspace(x.q.shape[0])(), counters(index, number)
            sinks = x.sinks
            function(
                x.q,
                canonical_k(x.k_cache),
                canonical_v(x.v_cache),
                x.block_table,
                lengths(x.cu_seqlens_q),
                lengths(x.seqused_k),
                lengths(x.causal) if form.causal_flags else None,
                sinks if sinks is None else sinks.contiguous(),
                x.k_scale,
                x.v_scale,
                out,
                lse,
                *partial,
                params,
            )

        return launch

    def _forward(
        self,
        inputs: CacheInputs,
        problem: CacheProblem,
        caches: tuple[View, View],
        many: PagedProblem,
        means: Means,
    ) -> Launch:
        """The launch of the forward kernel, of sequences with many tokens."""
        target, index = self.target(problem), inputs.q.get_device()
        B, Sq, counter = problem.extent.B, problem.extent.max_seqlen_q, self.counters
        device, least = inputs.q.device, most_tokens(target, problem) + 1
        canonical_k, canonical_v = caches

        @cache
        def run_of(sequences: int) -> paged.Sequence:
            """The launch, with tiles of so many sequences with many tokens."""
            kernel = paged.decide(target, many.of_sequences(sequences), self.sms(index), self.find(problem))
            return paged.sequence(kernel, means.convert, means.workspace, least)

        run_of(_longest_sequences(problem, inputs.q.shape[0]))

        def launch(x: CacheInputs, out: Tensor, lse: Tensor) -> None:
            ends, table, used = x.cu_seqlens_q, x.block_table, x.seqused_k
            if ends is None:
                ends = constants.even_ends(device, B, Sq)
            if table is None:
                table = constants.own_pages(device, B)
            if used is None:
                used = constants.even_lengths(device, B, x.k_cache.shape[1])
            caches = canonical_k(x.k_cache), canonical_v(x.v_cache)
            run = run_of(_longest_sequences(problem, x.q.shape[0]))
            run(x.q, *caches, table, ends, used, x.sinks, out, lse, counter(index, 1))

        return launch

    def reachable(self, problem: CacheProblem, num_sms: int) -> Iterator[tuple[str, tuple[object, ...]]]:
        """Entries and what they are compiled for: all that `attend` looks for where problems are like this
        one, with sizes up to its own; and some more.
        """
        target, extent = self.target(problem), problem.extent
        many = with_many_tokens(problem, target)
        if many is not None:
            most = most_tokens(target, problem)
            yield from paged.reachable(target, many, most + 1)
            B, T, Sq, *sizes = extent
            problem = problem.of_sizes(CacheExtent(B, T, min(Sq, most), *sizes))
        yield from ((DECODE, static) for static in reachable(target, problem, num_sms))

    # The emulator's backend overrides the following methods.

    def target(self, problem: CacheProblem) -> Target:
        """The target for the problem's GPU."""
        return self._targets[problem.spec.capability]

    def find(self, problem: CacheProblem) -> Find:
        """The function that gets compiled kernels."""
        return self.target(problem).find

    def sms(self, index: int) -> int:
        return num_sms(index)

    def current_device(self) -> int:
        """The index of this thread's device."""
        return tile_counters.current_device()

    def workspace(self, index: int, needs: tuple[Need, ...]) -> Workspace:
        """What finds tensors that nobody reads after a launch on that device's current stream."""
        return shared(index, needs, past_dispatcher("cuda"))

    def counters(self, index: int, number: int) -> Tensor:
        """Counters of tiles, int32, which are 0."""
        return tile_counters.counters(index, number)


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


def with_many_tokens(problem: CacheProblem, target: Target) -> PagedProblem | None:
    """The problem of the forward kernel, if sequences with many tokens go to it: it is faster with these.

    Its sums depend on its tiles, so with `batch_invariant` there is one kernel for all.
    """
    if problem.spec.batch_invariant or problem.extent.max_seqlen_q <= most_tokens(target, problem):
        return None
    if not target.has_pages:
        return None
    many = paged.problem_of(problem)
    return None if paged.limits(target, many) else many


def most_tokens(target: Target, problem: CacheProblem) -> int:
    """Tokens of a sequence up to which the decode kernel serves where the forward could."""
    if target.split_configs is None:
        return decode.MOST_TOKENS
    return max(decode.MOST_ROWS // problem.spec.group, 1)


def with_few_tokens(problem: CacheProblem, most: int) -> CacheProblem:
    """The problem without sequences that have many tokens."""
    if not problem.spec.ragged:
        problem = problem._replace(spec=problem.spec._replace(ragged=True))
    B, T, _, *sizes = problem.extent
    return problem.of_sizes(CacheExtent(B, T, most, *sizes))


def _longest_sequences(problem: CacheProblem, T: int) -> int:
    """How many sequences of T tokens are as long as the longest one, if the others have few."""
    return min(max(T // problem.extent.max_seqlen_q, 1), problem.extent.B)


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


def _work_of(
    problem: CacheProblem, features: Features, form: DecodeForm, rows: int, num_sms: int
) -> decode_shares.Work:
    tiles, keys = _tiles(problem, rows), problem.extent.max_seqlen_k
    return decode_shares.work_of(features, form, rows, tiles, keys, num_sms)


def _has_many_blocks(work: decode_shares.Work) -> bool:
    return work.tiles * work.blocks >= decode.SHARED_MANY_BLOCKS * work.num_sms


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


def _dispatched(x: Tensor) -> Means:
    """Everything is allocated where `x` is, by the dispatcher, which observers see."""

    allocator = allocator_like(x)

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return allocator(shape, dtype)()

    return Means(new, lambda params: params, partial(allocated, allocator=allocator))


def _canonical(cache: Tensor) -> View:
    """What gives caches of these sizes strides that the kernel accepts, also of dimensions of size 1."""
    step = _ALIGNMENT // cache.element_size()
    if all(stride > 0 and stride % step == 0 for stride in cache.stride()[:-1]):
        return lambda x: x
    shape = tuple(cache.shape)
    strides = [step if size == 1 else stride for size, stride in zip(shape, cache.stride(), strict=True)]
    return lambda x: x.as_strided(shape, (*strides[:-1], 1))


def params_of(problem: CacheProblem, kernel: Kernel) -> DecodeParams:
    softcap, band = kernel_softcap(problem.softcap), kernel_band(problem.band)
    tokens, splits = problem.extent.max_seqlen_q, (kernel.split_keys, kernel.num_splits)
    return DecodeParams(problem.scale, softcap, *band, tokens, *splits)


def _row_choice(problem: CacheProblem, features: Features, form: DecodeForm) -> tuple[int, ...]:
    """Rows that a tile may have."""
    return (decode.group_rows if problem.spec.batch_invariant else decode.rows_of)(features, form)


def _wgmma_rows(problem: CacheProblem, features: Features, form: DecodeForm, num_sms: int) -> int:
    """Rows of a tile by warpgroup MMAs."""
    extent, spec = problem.extent, problem.spec
    choice = decode.wgmma_rows(features, form._replace(groups=spec.batch_invariant))
    rows = decode.rows(extent.max_seqlen_q, spec.group, choice)
    tiles = _tiles(problem, rows)
    if spec.batch_invariant:
        shares = decode.shares_kv_in_groups(extent.max_seqlen_k, tiles, num_sms)
    else:
        blocks = tiles * math.ceil(extent.max_seqlen_k / decode.KEYS)
        shares = decode.shares_kv(extent.max_seqlen_k, blocks, num_sms)
    return rows if shares else choice[0]


def _tiles(problem: CacheProblem, rows: int) -> int:
    """Tiles of rows of all KV heads and sequences."""
    extent = problem.extent
    return extent.B * extent.Hk * math.ceil(extent.max_seqlen_q * problem.spec.group / rows)
