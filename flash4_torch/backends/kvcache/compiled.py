"""The backend of our compiled kernels for attention over a KV cache: its launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...configs import decode
from ...kvcache_problem import CacheExtent, CacheInputs, CacheProblem
from .. import constants, tile_counters
from ..compiled import paged
from ..compiled.backend import num_sms
from ..compiled.paged import PagedProblem
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
from . import decode_kernel
from .base import CacheLaunch

_ALIGNMENT = 16
"""Bytes."""

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
    workspace: paged.FindWorkspace


class Compiled(OnTargets):
    """The backend that serves the GPUs of its targets."""

    def why_not(self, problem: CacheProblem) -> list[str]:
        spec = problem.spec
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        gpu = self._any_target(spec.capability).decode
        return [*self._why_not_here(spec.capability), *decode_kernel.limits(problem, gpu)]

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
        most, index = most_tokens(problem), inputs.q.get_device()
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
        kernel = decode_kernel.decide(self.target(problem), problem, self.sms(index), usual)
        function = self.find(problem)(DECODE, (kernel.features, kernel.rows, kernel.form))
        form, params = kernel.form, means.convert(decode_kernel.params_of(problem, kernel))
        parts, Hq, columns = kernel.parts, extent.Hq, decode.part_columns(spec.Dv)

        @lru_cache(_MOST_TOKENS_KNOWN)
        def workspace(T: int) -> Workspace:
            float32 = torch.float32
            sums, lse = (parts, T, Hq, columns), (parts, form.cluster, Hq, T)
            return means.workspace(((sums, float32), (lse, float32)))

        canonical_k, canonical_v = caches
        number, counters = decode_kernel.num_tiles(problem, kernel.rows) * form.cluster, self.counters
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
        device, least = inputs.q.device, most_tokens(problem) + 1
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
            most = most_tokens(problem)
            yield from paged.reachable(target, many, most + 1)
            B, T, Sq, *sizes = extent
            problem = problem.of_sizes(CacheExtent(B, T, min(Sq, most), *sizes))
        yield from ((DECODE, static) for static in decode_kernel.reachable(target, problem, num_sms))

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


def with_many_tokens(problem: CacheProblem, target: Target) -> PagedProblem | None:
    """The problem of the forward kernel, if sequences with many tokens go to it: it is faster with these.

    Its sums depend on its tiles, so with `batch_invariant` there is one kernel for all.
    """
    if problem.spec.batch_invariant or problem.extent.max_seqlen_q <= most_tokens(problem):
        return None
    if not target.has_pages:
        return None
    many = paged.problem_of(problem)
    return None if paged.limits(target, many) else many


def most_tokens(problem: CacheProblem) -> int:
    """Tokens of a sequence up to which the decode kernel serves where the forward could."""
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
