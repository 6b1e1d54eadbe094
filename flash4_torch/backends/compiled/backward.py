"""The backward: the kernels that serve a call, their parameters, and their workspace.

The preprocess kernel computes two numbers per query row (four with a floating mask) and clears the sums of
dQ; the main kernel adds to these sums and writes dK and dV; the postprocess kernel rounds dQ. With scope
KV_HEAD the main kernel rounds dQ itself, once a head's last tile has added to it; in small calls it also
computes the numbers of each row, and nothing is launched before it. With scope Q_HEAD it writes dK and dV of
each query head, from which the group reduction computes those of the KV heads. The gradients of sinks need
nothing but the two numbers of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ... import compile
from ...configs.sections import Workload
from ...configs.sizes import BackwardSizes
from ...configs.types import Features, Mods, Scope
from ...kernels.common.bwd.dq_blocks import sums_of
from ...kernels.common.bwd.row_blocks import (
    GroupReducePlan,
    PostprocessPlan,
    PreprocessPlan,
    RowBlocks,
    SinksPlan,
)
from ...kernels.common.mask_tables import MaskPlan
from ...problem import Inputs, Problem, Saved, new_gradient
from ..base import Grads
from . import forward
from .masks import Read
from .params import LaunchParams, launch_params
from .targets import GROUP_REDUCE, POSTPROCESS, PREPROCESS, SINKS_GRADIENT, BackwardConfig, Find, Row, Target
from .tensors import Allocator, lengths

_MOST_DMASK = 1 << 28
"""Numbers of attn_mask's gradient, at most, before they are summed to the mask's shape."""


class Kernels(NamedTuple):
    """The compiled kernels, and their parameters besides tensors."""

    preprocess: compile.Function | None
    """None if the main kernel computes the row statistics."""
    main: compile.Function
    postprocess: compile.Function | None
    """None if the main kernel rounds dQ."""
    group_reduce: compile.Function | None
    """None if the main kernel computes dK and dV of whole groups."""
    sinks_gradient: compile.Function | None
    config: BackwardConfig
    params: LaunchParams
    blocks: RowBlocks
    is_ordered: bool
    """Whether tiles wait for each other to add to dQ."""
    cta_sums: tuple[int, int] | None
    """Scope KV_HEAD: the number of CTAs, and the query heads of each KV head; None with other scopes."""
    row_stats: int
    """Numbers per query row in the workspace."""
    entries: int = 1
    """Batch entries of a stack."""


class Shapes(NamedTuple):
    """Shapes that a call of these sizes allocates; dk_parts and dv_parts are used with scope Q_HEAD."""

    dk_parts: tuple[int, ...]
    dv_parts: tuple[int, ...]
    stats: tuple[int, ...]
    """Statistics of the query rows, float32."""
    dq_acc: tuple[int, ...]
    """Sums of dQ, float32."""
    dq_semaphore: tuple[int, ...]
    """Semaphores of the dQ order, int32."""


Sequence = Callable[[Saved, Inputs, Tensor | None, Tensor], Grads]
"""Function that launches all kernels, given readable tensors, the mask's gradient, to which the main kernel
adds, and a tile counter."""


def limits(target: Target, problem: Problem) -> list[str]:
    """The reasons why no kernel serves the problem: those of the target's table, and one of all targets."""
    spec = problem.spec
    why = target.backward_configs.limits(features_of(problem)._replace(D=spec.D, Dv=spec.Dv))
    if spec.deterministic and spec.dmask and _adds_in_any_order(problem):
        why.append("it sums up the gradient of a broadcast attn_mask in any order")
    return why


def dmask_shape(problem: Problem, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor to which kernels add attn_mask's gradient, which is then summed to `shape`.

    They add number by number, so that many additions to one number take as long as they are many, and round
    as often. So a mask of one row or one key has a number for each score of its heads, if there is room. One
    for each score of the call gives sums an order, but takes longer: it is for deterministic calls.
    """
    B, Sq, Sk, Hq, _ = problem.extent
    of_heads = *shape[:2], Sq, Sk
    tried = [(B, Hq, Sq, Sk), of_heads] if problem.spec.deterministic else [of_heads]
    return next((each for each in tried if math.prod(each) <= _MOST_DMASK), shape)


def _adds_in_any_order(problem: Problem) -> bool:
    """Whether kernels add to a number of attn_mask's gradient more than once."""
    B, Sq, Sk, Hq, _ = problem.extent
    sizes = B, Hq, Sq, Sk
    flags = problem.spec.mask.partition(":")[2]
    shape = tuple(1 if flag == "1" else n for flag, n in zip(flags, sizes, strict=True))
    return dmask_shape(problem, shape) != sizes


def decide(target: Target, problem: Problem, num_sms: int, find: Find, mods: Mods | None = None) -> Kernels:
    """The kernels that serve a call, whose scores `mods` change."""
    config = config_of(target, problem, num_sms, mods)
    features = main_features(features_of(problem, mods), config)
    preprocess, postprocess = row_plans(features, config, dlse=problem.spec.dlse)
    ctas = min(num_sms, problem.extent.B * problem.extent.Hk)
    return Kernels(
        None if preprocess is None else find(PREPROCESS, (preprocess,)),
        find(target.backward, (features, config)),
        None if postprocess is None else find(POSTPROCESS, (postprocess,)),
        find(GROUP_REDUCE, (group_reduce_plan(features),)) if config.scope == Scope.Q_HEAD else None,
        find(SINKS_GRADIENT, (sinks_plan(problem.spec.sinks, features, config),))
        if problem.spec.sinks
        else None,
        config,
        params_of(target, problem, config, num_sms, mods),
        _row_blocks(features, config),
        features.deterministic,
        (ctas, problem.spec.group) if config.scope == Scope.KV_HEAD else None,
        features.row_stats,
        problem.entries,
    )


def main_features(features: Features, config: BackwardConfig) -> Features:
    """Features that the main kernel is compiled for: with scope KV_HEAD dQ is always summed in order."""
    return features._replace(deterministic=features.deterministic and config.scope != Scope.KV_HEAD)


def row_plans(
    features: Features, config: BackwardConfig, *, dlse: bool
) -> tuple[PreprocessPlan | None, PostprocessPlan | None]:
    """Plans of the preprocess and postprocess kernels; None where the main kernel does their work."""
    f, blocks = main_features(features, config), _row_blocks(features, config)
    preprocess, postprocess = None, None
    if not config.preprocesses:
        asked = f.varlen, dlse, f.deterministic, config.tmem_order, config.scope != Scope.KV_HEAD
        preprocess = PreprocessPlan(
            f.dtype,
            f.Dv,
            blocks,
            *asked,
            large_scores=f.large_scores,
            segments=f.segments,
            stacked=f.is_stacked,
        )
    if config.scope != Scope.KV_HEAD:
        postprocess = PostprocessPlan(f.dtype, f.D, blocks, f.varlen, f.segments, f.is_stacked)
    return preprocess, postprocess


def _row_blocks(features: Features, config: BackwardConfig) -> RowBlocks:
    return RowBlocks.of(sums_of(features.D, config, features.column_step))


def group_reduce_plan(features: Features) -> GroupReducePlan:
    return GroupReducePlan(features.dtype, features.D, features.Dv, features.is_packed)


def sinks_plan(dtype: str, features: Features, config: BackwardConfig) -> SinksPlan:
    return SinksPlan(dtype, features.varlen, config.tmem_order)


def features_of(problem: Problem, mods: Mods | None = None) -> Features:
    spec = problem.spec
    # lse counts the sinks, which is all that the kernels need.
    features = forward.features_of(problem, mods)
    return features._replace(deterministic=spec.deterministic, dmask=spec.dmask, sinks="")


def config_of(target: Target, problem: Problem, num_sms: int, mods: Mods | None = None) -> BackwardConfig:
    extent = problem.extent
    sizes = BackwardSizes(
        extent.Sk,
        _end_masked(problem),
        _kv_head_rows(target, problem, num_sms),
        problem.spec.group,
        may_preprocess=extent.B * extent.Hk <= num_sms and not problem.spec.dlse and problem.entries == 1,
    )
    return target.backward_configs.backward(features_of(problem, mods), sizes)


def row_of(target: Target, problem: Problem, num_sms: int) -> Row:
    """The table's row that serves the problem."""
    return target.backward_configs.row(features_of(problem), _kv_head_rows(target, problem, num_sms))


def _end_masked(problem: Problem) -> bool:
    return problem.band.right is not None and problem.band.right <= 0


def _kv_head_rows(target: Target, problem: Problem, num_sms: int) -> int:
    """Query rows of a KV head, if there are heads enough for each CTA to take whole ones; else 0."""
    extent, table = problem.extent, target.backward_configs
    tile = table.backward(features_of(problem), BackwardSizes(extent.Sk, _end_masked(problem))).cluster_keys
    heads, tiles = extent.B * extent.Hk, -(-extent.Sk // tile)
    # One KV head per SM at a time keeps the SMs busy for at least nine tenths of the time.
    even = 10 * heads >= 9 * num_sms * -(-heads // num_sms)
    # The first tile of a stack does not see what the others see.
    may_be = tiles == 1 or (even and problem.entries == 1)
    return problem.spec.group * extent.Sq if may_be else 0


def params_of(
    target: Target, problem: Problem, config: BackwardConfig, num_sms: int, mods: Mods | None = None
) -> LaunchParams:
    if config.scope == Scope.Q_HEAD:
        spec, extent = problem.spec._replace(group=1), problem.extent._replace(Hk=problem.extent.Hq)
        problem = problem._replace(spec=spec, extent=extent)
    spec, extent = problem.spec, problem.extent
    work = Workload(extent.B * extent.Hk, spec.group, extent.Sq, extent.Sk, target.l2_bytes, num_sms)
    section = target.backward_configs.section(features_of(problem, mods), config, work)
    return launch_params(problem, extent.Sk, section, num_sms)


def mask_plan(dtype: str, config: BackwardConfig) -> MaskPlan:
    """How a transposed mask, whose rows are keys, is divided into blocks."""
    column_major = config.copies_masks and dtype not in ("", "bool")
    return MaskPlan(dtype, config.cluster_keys, config.queries, column_major=column_major)


def shapes_of(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, kernels: Kernels) -> Shapes:
    """Shapes for q (B, Sq, Hq, D), or (T, Hq, D) with its cumulative lengths; with them the former has
    segments.
    """
    blocks = kernels.blocks
    *rows, Hq, _ = q.shape
    if cu_seqlens_q is None:
        entries = kernels.entries
        heads: tuple[int, ...] = (rows[0] // entries, Hq)
        count = blocks.count(rows[1] * entries)
    else:
        heads = (Hq,)
        count = blocks.packed_count(math.prod(rows), len(cu_seqlens_q) - 1)
    return Shapes(
        dk_parts=(*k.shape[:-2], Hq, k.shape[-1]),
        dv_parts=(*v.shape[:-2], Hq, v.shape[-1]),
        stats=(kernels.row_stats, *heads, count * blocks.queries),
        dq_acc=(*(kernels.cta_sums or heads), count, blocks.floats),
        dq_semaphore=(*heads, count),
    )


class Workspace(NamedTuple):
    """Tensors between the kernels of a backward, as `Shapes` describes them."""

    stats: Tensor
    dq_acc: Tensor
    dq_semaphore: Tensor | None


def new_workspace(kernels: Kernels, shapes: Shapes, allocator: Allocator) -> Callable[[], Workspace]:
    """Allocates the workspace of a call."""
    new_stats, new_dq_acc = allocator(shapes.stats, torch.float32), allocator(shapes.dq_acc, torch.float32)
    if not kernels.is_ordered:
        return lambda: Workspace(new_stats(), new_dq_acc(), None)
    new_semaphore = allocator(shapes.dq_semaphore, torch.int32)
    return lambda: Workspace(new_stats(), new_dq_acc(), new_semaphore())


def preprocess(kernels: Kernels, saved: Saved, ends_q: Tensor | None, work: Workspace) -> None:
    """Launch the first kernel, if there is one: it fills the statistics, and clears the sums that the main
    kernel adds to.
    """
    if kernels.preprocess is None:
        return
    dout, dlse, out, lse, _, lse_low = saved
    cleared = None if kernels.postprocess is None else work.dq_acc
    kernels.preprocess(out, dout, lse, lse_low, dlse, work.stats, cleared, work.dq_semaphore, ends_q, 0)


class MainLaunch(Protocol):
    """Function that launches the main kernel, and the group reduction if there is one."""

    def __call__(
        self,
        inputs: Inputs,
        saved: Saved,
        work: Workspace,
        dq: Tensor | None,
        dmask: Tensor | None,
        tile_counter: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(dk, dv), given tensors that the kernels can read, and dq if the main kernel rounds it."""
        ...


def main_launch(
    kernels: Kernels, shapes: Shapes, dtype: torch.dtype, params: Any, read_mask: Read, allocator: Allocator
) -> MainLaunch:
    """The launches between `preprocess` and what rounds dQ; arguments as for `sequence`."""
    main, group_reduce = kernels.main, kernels.group_reduce
    new_parts = None
    if group_reduce is not None:
        new_parts = allocator(shapes.dk_parts, dtype), allocator(shapes.dv_parts, dtype)

    def launch(
        inputs: Inputs,
        saved: Saved,
        work: Workspace,
        dq: Tensor | None,
        dmask: Tensor | None,
        tile_counter: Tensor,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, mask, _, rng_state, ends_q, ends_k, _ = inputs
        stats, dq_acc, semaphore = work
        dk_made, dv_made = dk, dv = new_gradient(k), new_gradient(v)
        if new_parts is not None:
            dk_made, dv_made = (new() for new in new_parts)
        before = q, k, v, saved.dout, stats, dq_acc, dq, dk_made, dv_made
        if kernels.preprocess is None:
            main(*before, saved.out, saved.lse, rng_state, params)
        else:
            dmask_rows = None if dmask is None else dmask.transpose(2, 3)
            more = (ends_q, ends_k, read_mask(mask), dmask_rows, rng_state, params)
            main(*before, tile_counter, semaphore, *more)
        if group_reduce is not None:
            group_reduce(dk_made, dv_made, dk, dv, 0)
        return dk, dv

    return launch


def sequence(
    kernels: Kernels,
    shapes: Shapes,
    dtype: torch.dtype,
    scale: float,
    params: Any,
    read_mask: Read,
    allocator: Allocator,
) -> Sequence:
    """The backward's launches in their order, with everything decided but the tensors.

    `params` is what the main kernel takes for `kernels.params`: that, or what it was converted to before.
    `read_mask` takes the mask as the forward gets it.
    """
    postprocess, sinks_gradient = kernels.postprocess, kernels.sinks_gradient
    new_work = new_workspace(kernels, shapes, allocator)
    main = main_launch(kernels, shapes, dtype, params, read_mask, allocator)

    def launch(saved: Saved, inputs: Inputs, dmask: Tensor | None, tile_counter: Tensor) -> Grads:
        ends_q, ends_k, sinks = lengths(inputs.cu_seqlens_q), lengths(inputs.cu_seqlens_k), inputs.sinks
        inputs = inputs._replace(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
        work, dq = new_work(), new_gradient(inputs.q)
        preprocess(kernels, saved, ends_q, work)
        rounded = dq if postprocess is None else None
        dk, dv = main(inputs, saved, work, rounded, dmask, tile_counter)
        if postprocess is not None:
            postprocess(work.dq_acc, dq, ends_q, scale, 0)
        dsinks = None
        if sinks_gradient is not None and sinks is not None:
            dsinks = torch.empty_like(sinks, memory_format=torch.contiguous_format)
            sinks_gradient(work.stats, sinks.contiguous(), dsinks)
        return Grads(dq, dk, dv, dmask, dsinks)

    return launch
