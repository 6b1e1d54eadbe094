"""The backward: which kernels serve a call, what they are told, and where they put their sums.

The first makes two numbers of each query row and clears the sums of dQ, the main one adds to these and writes
dK and dV, the third rounds dQ. Or the main one rounds it itself, when a head's last tile has added to it; or
it writes dK and dV of each query head, of which a fourth makes those of key heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compile
from ...configs.sections import Workload
from ...configs.types import Features, Scope
from ...kernels.common.bwd.dq_blocks import sums_of
from ...kernels.common.bwd.row_blocks import GroupReducePlan, PostprocessPlan, PreprocessPlan, RowBlocks
from ...kernels.common.mask_tables import MaskPlan
from ...problem import Problem
from . import forward
from .params import LaunchParams, launch_params
from .targets import GROUP_REDUCE, POSTPROCESS, PREPROCESS, BackwardConfig, Find, Target
from .tensors import contiguous_strides


class Kernels(NamedTuple):
    """The compiled kernels, and what they are told besides tensors."""

    preprocess: compile.Function
    main: compile.Function
    postprocess: compile.Function | None
    """None where the main one rounds dQ."""
    group_reduce: compile.Function | None
    """None where the main one makes dK and dV of whole groups."""
    config: BackwardConfig
    params: LaunchParams
    blocks: RowBlocks
    is_ordered: bool
    """Whether tiles wait for each other to add to dQ."""
    alone: tuple[int, int] | None
    """How many CTAs take whole key heads, and of how many query heads each is."""
    row_stats: int
    """Numbers of each query row in the workspace."""


class Shapes(NamedTuple):
    """What a call of these sizes allocates; dk_parts and dv_parts where each query head has its own."""

    dq: tuple[int, ...]
    dk: tuple[int, ...]
    dv: tuple[int, ...]
    dk_parts: tuple[int, ...]
    dv_parts: tuple[int, ...]
    stats: tuple[int, ...]
    """float32"""
    dq_acc: tuple[int, ...]
    """float32"""
    dq_semaphore: tuple[int, ...]
    """int32"""


class Operands(NamedTuple):
    """What the kernels read. Contiguous per row; see the kernels' `launch.backward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor
    lse_low: Tensor | None = None
    dlse: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    mask: tuple[Tensor, Tensor] | None = None
    """Transposed, and its tables."""
    dmask: Tensor | None = None
    """Transposed; the kernel adds to it."""
    rng_state: Tensor | None = None


Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
"""Allocates by shape, strides and dtype."""
Sequence = Callable[[Operands, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Takes the operands and the launch's tile counter, and launches all kernels; returns dq, dk and dv."""


def limits(target: Target, problem: Problem) -> list[str]:
    """Why the target's table, or any kernel, has none for the problem."""
    spec = problem.spec
    why = target.backward_configs.limits(features_of(problem)._replace(D=spec.D, Dv=spec.Dv))
    if spec.deterministic and spec.dmask and _mask_broadcasts(problem):
        why.append("it sums up the gradient of a broadcast attn_mask in any order")
    return why


def _mask_broadcasts(problem: Problem) -> bool:
    B, Sq, Sk, Hq, _ = problem.extent
    flags = problem.spec.mask.partition(":")[2]
    return any(flag == "1" and n > 1 for flag, n in zip(flags, (B, Hq, Sq, Sk), strict=True))


def decide(target: Target, problem: Problem, num_sms: int, find: Find) -> Kernels:
    config = config_of(target, problem, num_sms)
    features = main_features(features_of(problem), config)
    preprocess, postprocess = row_plans(features, config, dlse=problem.spec.dlse)
    ctas = min(num_sms, problem.extent.B * problem.extent.Hk)
    return Kernels(
        find(PREPROCESS, (preprocess,)),
        find(target.backward, (features, config)),
        None if postprocess is None else find(POSTPROCESS, (postprocess,)),
        find(GROUP_REDUCE, (group_reduce_plan(features),)) if config.scope == Scope.Q_HEAD else None,
        config,
        params_of(target, problem, config, num_sms),
        preprocess.blocks,
        preprocess.is_ordered,
        (ctas, problem.spec.group) if config.scope == Scope.KV_HEAD else None,
        features.row_stats,
    )


def main_features(features: Features, config: BackwardConfig) -> Features:
    """What the main kernel is compiled for: with whole heads sums have an order without being told."""
    return features._replace(deterministic=features.deterministic and config.scope != Scope.KV_HEAD)


def row_plans(
    features: Features, config: BackwardConfig, *, dlse: bool
) -> tuple[PreprocessPlan, PostprocessPlan | None]:
    """Of the kernels before and behind the main one."""
    f, blocks = main_features(features, config), RowBlocks.of(sums_of(features.D, config))
    asked = f.varlen, dlse, f.deterministic, config.tmem_order, config.scope != Scope.KV_HEAD
    preprocess = PreprocessPlan(f.dtype, f.Dv, blocks, *asked, float_mask=f.float_mask)
    return preprocess, None if config.scope == Scope.KV_HEAD else PostprocessPlan(
        f.dtype, f.D, blocks, f.varlen
    )


def group_reduce_plan(features: Features) -> GroupReducePlan:
    return GroupReducePlan(features.dtype, features.D, features.Dv, features.varlen)


def features_of(problem: Problem) -> Features:
    spec = problem.spec
    return forward.features_of(problem)._replace(deterministic=spec.deterministic, dmask=spec.dmask)


def config_of(target: Target, problem: Problem, num_sms: int) -> BackwardConfig:
    extent, table = problem.extent, target.backward_configs
    end_hidden = problem.band.right is not None and problem.band.right <= 0
    tile = table.backward(features_of(problem), extent.Sk, end_hidden).cluster_keys
    heads, tiles = extent.B * extent.Hk, -(-extent.Sk // tile)
    # A head each for nine tenths of the multiprocessors' time, at least.
    even = 10 * heads >= 9 * num_sms * -(-heads // num_sms)
    alone = problem.spec.group * extent.Sq if even or tiles == 1 else 0
    return table.backward(features_of(problem), extent.Sk, end_hidden, alone, problem.spec.group)


def params_of(target: Target, problem: Problem, config: BackwardConfig, num_sms: int) -> LaunchParams:
    if config.scope == Scope.Q_HEAD:
        spec, extent = problem.spec._replace(group=1), problem.extent._replace(Hk=problem.extent.Hq)
        problem = problem._replace(spec=spec, extent=extent)
    spec, extent = problem.spec, problem.extent
    work = Workload(extent.B * extent.Hk, spec.group, extent.Sq, extent.Sk, target.l2_bytes, num_sms)
    section = target.backward_configs.section(features_of(problem), config, work)
    return launch_params(problem, extent.Sk, section, num_sms)


def mask_plan(dtype: str, config: BackwardConfig) -> MaskPlan:
    """How a transposed mask, whose rows are keys, is cut into blocks."""
    return MaskPlan(dtype, config.cluster_keys, config.queries)


def transposed(mask: Tensor, Sq: int) -> Tensor:
    """The mask with keys as rows, and with all queries.

    Copied where that makes queries neighbours, which are loaded together.
    """
    x = mask.transpose(2, 3)
    if x.shape[3] > 1 and x.stride(3) != 1:
        return x.contiguous()
    return x.expand(*x.shape[:3], Sq)


def shapes_of(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, kernels: Kernels) -> Shapes:
    """For q (B, Sq, Hq, D), or (T, Hq, D) and its lengths."""
    blocks = kernels.blocks
    if cu_seqlens_q is None:
        B, Sq, Hq, _ = q.shape
        heads: tuple[int, ...] = (B, Hq)
        count = blocks.count(Sq)
    else:
        T, Hq, _ = q.shape
        heads = (Hq,)
        count = blocks.packed_count(T, len(cu_seqlens_q) - 1)
    return Shapes(
        dq=tuple(q.shape),
        dk=tuple(k.shape),
        dv=tuple(v.shape),
        dk_parts=(*k.shape[:-2], Hq, k.shape[-1]),
        dv_parts=(*v.shape[:-2], Hq, v.shape[-1]),
        stats=(kernels.row_stats, *heads, count * blocks.queries),
        dq_acc=(*(kernels.alone or heads), count, blocks.floats),
        dq_semaphore=(*heads, count),
    )


def sequence(
    kernels: Kernels, shapes: Shapes, dtype: torch.dtype, scale: float, params: Any, empty: Empty
) -> Sequence:
    """The backward's launches in their order, decided but for the tensors.

    `params` is what the main kernel takes for `kernels.params`: that, or what it was converted to before.
    """
    preprocess, main, postprocess, group_reduce = kernels[:4]
    float32, int32, is_ordered = torch.float32, torch.int32, kernels.is_ordered
    dq_at, dk_at, dv_at, dk_parts_at, dv_parts_at, stats_at, acc_at, semaphore_at = (
        (shape, contiguous_strides(shape)) for shape in shapes
    )

    def launch(x: Operands, tile_counter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, dout, lse, lse_low, dlse, ends_q, ends_k, mask, dmask, rng_state = x
        stats, dq_acc = empty(*stats_at, float32), empty(*acc_at, float32)
        semaphore = empty(*semaphore_at, int32) if is_ordered else None
        dq, dk, dv = empty(*dq_at, dtype), empty(*dk_at, dtype), empty(*dv_at, dtype)
        cleared, rounded = (None, dq) if postprocess is None else (dq_acc, None)
        dk_made, dv_made = dk, dv
        if group_reduce is not None:
            dk_made, dv_made = empty(*dk_parts_at, dtype), empty(*dv_parts_at, dtype)
        preprocess(out, dout, lse, lse_low, dlse, stats, cleared, semaphore, ends_q)
        more = (ends_q, ends_k, mask, dmask, rng_state, params)
        main(q, k, v, dout, stats, dq_acc, rounded, dk_made, dv_made, tile_counter, semaphore, *more)
        if postprocess is not None:
            postprocess(dq_acc, dq, ends_q, scale)
        if group_reduce is not None:
            group_reduce(dk_made, dv_made, dk, dv)
        return dq, dk, dv

    return launch
