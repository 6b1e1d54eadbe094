"""Stand-ins for the backward's kernels, which compute the same from the same arguments."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash4_torch import compile
from flash4_torch.backends.compiled import GROUP_REDUCE, POSTPROCESS, PREPROCESS, Target, backward, masks
from flash4_torch.backends.compiled.targets import SINKS_GRADIENT, BackwardConfig
from flash4_torch.configs.types import Features, Scope
from flash4_torch.kernels.common.bwd.dq_blocks import sums_of
from flash4_torch.kernels.common.bwd.row_blocks import (
    GroupReducePlan,
    PostprocessPlan,
    PreprocessPlan,
    RowBlocks,
    SinksPlan,
)
from flash4_torch.kernels.common.mask_tables import MaskPlan, place
from flash4_torch.masks import Band
from flash4_torch.reference import tiled
from flash4_torch.reference.dropout import Dropout
from flash4_torch.reference.scoring import Scoring
from row_order import in_blocks, out_of_blocks, places

LOG2E = math.log2(math.e)


class Launch(NamedTuple):
    """A launch of the main kernel."""

    features: Features
    config: BackwardConfig
    args: tuple[Any, ...]
    """The dimensions of dense tensors are (B, S, H, D), whatever the order in which they came."""


def in_order(heads_first: int, *tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors as (B, S, H, D), or as packed (T, H, D)."""
    assert heads_first in (0, 1)
    swaps = [bool(heads_first) and x is not None and x.dim() == 4 for x in tensors]
    return tuple(
        x.transpose(1, 2) if swap and x is not None else x for x, swap in zip(tensors, swaps, strict=True)
    )


def stand_in(target: Target, launches: list[Launch], entry: str, static: tuple[Any, ...]) -> compile.Function:
    if entry == PREPROCESS:
        return lambda *args: _preprocess(*static, *args)
    if entry == POSTPROCESS:
        return lambda *args: _postprocess(*static, *args)
    if entry == GROUP_REDUCE:
        return lambda *args: _group_sums(*static, *args)
    if entry == SINKS_GRADIENT:
        return lambda *args: _sinks_gradient(*static, *args)
    assert entry == target.backward
    return lambda *args: _backward(launches, *static, *args)


def _rows(blocks: RowBlocks, x: Tensor, ends: Tensor | None) -> tuple[int, Tensor]:
    """`places` of rows x, (B, Sq, Hq, D) or (T, Hq, D)."""
    if ends is None:
        return places(blocks, [x.shape[1]], False)
    return places(blocks, ends.diff().tolist(), True)


def _preprocess(
    plan: PreprocessPlan,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    low: Tensor | None,
    dlse: Tensor | None,
    stats: Tensor,
    dq_acc: Tensor | None,
    dq_semaphore: Tensor | None,
    ends: Tensor | None,
    heads_first: int,
) -> None:
    out, dout = in_order(heads_first, out, dout)
    for x in (out, dout):
        check_rows(x, plan.dtype, plan.varlen)
        assert x.shape == out.shape and x.shape[-1] == plan.Dv
    *batch, Sq, Hq, _ = out.shape
    count, at = _rows(plan.blocks, out, ends)
    assert (dlse is not None) == plan.dlse and (dq_semaphore is not None) == plan.is_ordered
    assert (ends is not None) == plan.varlen
    assert (low is not None) == plan.large_scores
    for x in (lse, low, dlse):
        assert x is None or (x.shape == (*batch, Hq, Sq) and x.is_contiguous() and x.dtype == torch.float32)
    assert stats.shape == (plan.stats, *batch, Hq, count)
    assert stats.is_contiguous() and stats.dtype == torch.float32
    blocks = (*batch, Hq, count // plan.blocks.queries)
    assert (dq_acc is not None) == plan.clears
    if dq_acc is not None:
        assert dq_acc.shape == (*blocks, plan.blocks.floats)
        assert dq_acc.is_contiguous() and dq_acc.dtype == torch.float32
        dq_acc.zero_()
    delta = (out.float() * dout.float()).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    sees = lse != -math.inf
    sign = -1.0 if plan.negated else 1.0
    stats[0], stats[1] = sign * math.inf, 0.0
    stats[0][..., at] = sign * torch.where(sees, lse * LOG2E, math.inf)
    if low is not None:
        stats[2], stats[3] = sign * math.inf, 0.0
        stats[2][..., at] = sign * torch.where(sees, lse, math.inf)
        stats[3][..., at] = sign * torch.where(sees, low * LOG2E, 0.0)
    stats[1][..., at] = sign * torch.where(sees, delta, 0.0)
    if dq_semaphore is not None:
        assert (
            dq_semaphore.shape == blocks
            and dq_semaphore.dtype == torch.int32
            and dq_semaphore.is_contiguous()
        )
        dq_semaphore.zero_()


def _postprocess(
    plan: PostprocessPlan, dq_acc: Tensor, dq: Tensor, ends: Tensor | None, scale: float, heads_first: int
) -> None:
    (dq,) = in_order(heads_first, dq)
    check_rows(dq, plan.dtype, plan.varlen)
    assert dq.shape[-1] == plan.D and (ends is not None) == plan.varlen
    _, at = _rows(plan.blocks, dq, ends)
    rows = out_of_blocks(plan.blocks, dq_acc)[..., at, : plan.D]
    dq.copy_((rows * scale).transpose(-3, -2))


def _group_sums(
    plan: GroupReducePlan, dk_parts: Tensor, dv_parts: Tensor, dk: Tensor, dv: Tensor, heads_first: int
) -> None:
    dk_parts, dv_parts, dk, dv = in_order(heads_first, dk_parts, dv_parts, dk, dv)
    for parts, grad, D in ((dk_parts, dk, plan.D), (dv_parts, dv, plan.Dv)):
        check_rows(grad, plan.dtype, plan.varlen)
        check_rows(parts, plan.dtype, plan.varlen)
        assert parts.is_contiguous() and grad.shape[-1] == D
        grad.copy_(parts.unflatten(-2, (grad.shape[-2], -1)).float().sum(-2))


def _sinks_gradient(plan: SinksPlan, stats: Tensor, sinks: Tensor, dsinks: Tensor) -> None:
    assert stats.is_contiguous() and stats.dim() == 4 - plan.varlen
    for x in (sinks, dsinks):
        assert x.shape == (stats.shape[-2],) and x.is_contiguous() and str(x.dtype) == f"torch.{plan.dtype}"
    lse, delta = (-stats if plan.negated else stats)[:2]
    terms = torch.exp2(sinks.float()[:, None] * LOG2E - lse) * delta
    dsinks.copy_(-terms.sum(-1).reshape(-1, len(sinks)).sum(0))


def check_rows(x: Tensor, dtype: str, varlen: bool) -> None:
    """Asserts what the kernels are promised of q, k, v, out and dout."""
    assert x.dim() == 4 - varlen and x.numel() > 0
    assert str(x.dtype) == f"torch.{dtype}"
    assert x.stride(-1) == 1 and all(s > 0 and s % 8 == 0 for s in x.stride()[:-1])
    assert x.data_ptr() % 16 == 0 and x.shape[-1] % 8 == 0


def _backward(launches: list[Launch], features: Features, config: BackwardConfig, *args: Any) -> None:
    *_, heads_first, out_heads_first = args[-1]
    if config.preprocesses:
        *before, out, lse, state, params = args
        blocks = RowBlocks.of(sums_of(features.D, config, features.column_step))
        plan = PreprocessPlan(features.dtype, features.Dv, blocks, clears=False)
        dout, stats = before[3:5]
        _preprocess(plan, out, dout, lse, None, None, stats, None, None, None, out_heads_first)
        counter = torch.zeros(1, dtype=torch.int32)
        args = *before, counter, *[None] * 5, state, params
    q, k, v, *gradients = in_order(heads_first, *args[:3], *args[6:9])
    args = q, k, v, *in_order(out_heads_first, args[3]), *args[4:6], *gradients, *args[9:]
    launches.append(Launch(features, config, args))
    (
        q,
        k,
        v,
        dout,
        stats,
        dq_acc,
        dq_whole,
        dk,
        dv,
        counter,
        dq_semaphore,
        ends_q,
        ends_k,
        mask_args,
        *others,
    ) = args
    dmask, state, params = others
    assert counter.shape == (1,) and counter.dtype == torch.int32 and counter.item() == 0
    for x in (q, k, v, dout):
        check_rows(x, features.dtype, features.varlen)
    assert (dq_whole is not None) == (config.scope == Scope.KV_HEAD)
    if config.scope == Scope.Q_HEAD:
        # As many KV heads as the gradients have.
        k, v = (x.repeat_interleave(q.shape[-2] // x.shape[-2], -2) for x in (k, v))
    for grad, x in ((dk, k), (dv, v), *(((dq_whole, q),) if config.scope == Scope.KV_HEAD else ())):
        assert grad.shape == x.shape and grad.dtype == x.dtype
        check_rows(grad, features.dtype, features.varlen)
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (features.D, features.D, features.Dv)
    assert (dq_semaphore is not None) == features.deterministic
    assert (ends_q is not None) == (ends_k is not None) == features.varlen
    assert (mask_args is not None) == bool(features.mask)
    assert (dmask is not None) == features.dmask
    assert (state is not None) == features.dropout
    scale, softcap, left, right, max_seqlen, heads_per_section, _, drop_byte, drop_fraction, *_ = params
    assert heads_per_section >= 1 and (scale > 0.0 or features.scaled)
    p = (drop_byte + drop_fraction / 2**32) / 256
    blocks = RowBlocks.of(sums_of(features.D, config, features.column_step))
    count, at = _rows(blocks, q, ends_q)
    assert len(stats) == features.row_stats
    signed = -stats if config.tmem_order else stats
    base2, delta = signed[:2, ..., at]
    natural, lse_low = base2 / LOG2E, None
    if features.float_mask:
        natural, low = signed[2:, ..., at]
        lse_low = low / LOG2E
    band = Band(left if features.left else None, right if features.right else None)
    mask = _mask(features, config, mask_args, q, k) if mask_args else None
    if mask is not None and dmask is not None:
        mask = mask.expand(torch.broadcast_shapes(mask.shape, dmask.mT.shape))

    def grads(b: int, rows: slice, keys: slice) -> tiled.Gradients:
        dropout = Dropout(state, p, b) if features.dropout else None
        scoring = Scoring(scale, band, softcap if features.softcap else 0.0, mask, dropout)
        x = [y if ends_q is None else y[None] for y in (q[rows], k[keys], v[keys], dout[rows])]
        q_, k_, v_, dout_ = (y.float() for y in x)
        lse, negative = (y if ends_q is None else y[None, :, rows] for y in (natural, -delta))
        # O is given as zeros, so delta is passed as lse's gradient, which is subtracted.
        none = torch.zeros_like(dout_)
        return tiled.backward(
            dout_, negative, q_, k_, v_, none, lse, scoring, features.dmask, lse_low=lse_low
        )

    dq = torch.zeros(*stats.shape[1:-1], count, blocks.columns)
    if ends_q is None or ends_k is None:
        assert max_seqlen == k.shape[1]
        end_masked = features.right and right <= 0
        tail = getattr(config, "ragged_k", True)
        assert tail or k.shape[1] % config.cluster_keys == 0 or end_masked
        found = grads(0, slice(None), slice(None))
        dk.copy_(found.dk)
        dv.copy_(found.dv)
        dq[..., at, : features.D] = found.dq.transpose(1, 2)
        if found.dmask is not None:
            _add_dmask(dmask, found.dmask)
    else:
        spans = (pairwise(ends.tolist()) for ends in (ends_q, ends_k))
        for b, ((i0, i1), (j0, j1)) in enumerate(zip(*spans, strict=True)):
            assert j1 - j0 <= max_seqlen
            found = grads(b, slice(i0, i1), slice(j0, j1))
            dk[j0:j1], dv[j0:j1] = found.dk[0], found.dv[0]
            dq[:, at[i0:i1], : features.D] = found.dq[0].transpose(0, 1)
    if dq_whole is not None:
        # Each CTA has an accumulator of its own, whose contents before do not matter.
        heads, group = k.shape[0] * k.shape[2], q.shape[2] // k.shape[2]
        assert dq_acc.shape == (min(params[6], heads), group, count // config.queries, blocks.floats)
        dq_whole.copy_(dq[..., at, : features.D].transpose(-3, -2))
        return
    # Of several calls on the same rows each has the workspace from its first row on.
    number = count // blocks.queries
    if dq_semaphore is not None:
        assert not dq_semaphore[..., :number].any()
        dq_semaphore[..., :number] = 1
    sums = dq_acc[..., :number, :]
    assert sums.isfinite().all()
    sums += in_blocks(blocks, dq / scale if scale else torch.zeros_like(dq))


def _mask(
    features: Features, config: BackwardConfig, args: tuple[Tensor, Tensor], q: Tensor, k: Tensor
) -> Tensor:
    """The mask with queries as rows again."""
    mask, tables = args
    assert str(mask.dtype) == f"torch.{features.mask}" and mask.shape[3] == q.shape[1]
    plan = backward.mask_plan(features.mask, config)
    together = [3, 2] if plan.column_major else [3]
    assert mask.shape[2] in (1, k.shape[1])
    # Of a bool mask bits are read, whose order does not depend on the mask's.
    is_free = features.mask == "bool" or (not plan.column_major and mask.numel() <= masks._FEW)
    assert is_free or any(mask.shape[d] == 1 or mask.stride(d) in (0, 1) for d in together)
    check_tables(plan, mask, tables)
    return mask.transpose(2, 3)


def check_tables(plan: MaskPlan, mask: Tensor, tables: Tensor) -> None:
    """Those of the mask's sizes, or of a floating mask's only row of blocks."""
    at = place(plan, *mask.shape)
    assert tables.dtype == torch.int32
    if tables.numel() != at.words:
        assert plan.dtype != "bool"
        assert tables.tolist() == [*range(1, 2 * at.NB, 2), *range(at.NB + 1)]


def _add_dmask(dmask: Tensor, found: Tensor) -> None:
    """Adds to dmask, which has keys as rows, and is cleared."""
    assert dmask.dtype == torch.float32 and not dmask.any()
    target = dmask.transpose(2, 3)
    assert target.is_contiguous()
    target += found.sum_to_size(target.shape)
