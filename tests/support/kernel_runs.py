"""Launches of one attention kernel in the emulator, and the laws that every such kernel keeps."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from everything import examples
from flash4_torch import testing
from flash4_torch.backends.compiled.backward import mask_plan, row_plans
from flash4_torch.compile import jit
from flash4_torch.configs.types import (
    LARGE_BYTES,
    SMALL_BYTES,
    Features,
    Scope,
    Sm80Backward,
    Sm80Forward,
    Sm90Backward,
    Sm90Forward,
    Sm100Backward,
    Sm100Forward,
)
from flash4_torch.emulator.host import Launch
from flash4_torch.kernels.common.bwd.dq_blocks import sums_of
from flash4_torch.kernels.common.bwd.row_blocks import PreprocessPlan
from flash4_torch.kernels.common.mask_tables import MaskPlan, place
from flash4_torch.reference.dropout import thresholds
from flash4_torch.testing import emulate
from kernel_calls import (
    Call,
    Gradients,
    Kernel,
    Results,
    blind,
    calls,
    check_gradients,
    check_results,
    drawn,
    each_alone,
    results,
)
from sm80_kernels import LARGE, LARGEST, SMALL

_LAUNCHES = {
    Sm80Forward: ((*LARGE, *SMALL), "sm80.fwd.launch", "compile_forward"),
    Sm80Backward: ((*LARGE, *SMALL), "sm80.bwd.launch", "compile_backward"),
    Sm90Forward: (("sm_90a",), "sm90.fwd.launch", "compile_forward"),
    Sm90Backward: (("sm_90a",), "sm90.bwd.launch", "compile_backward"),
    Sm100Forward: (("sm_100a",), "sm100.fwd.launch", "compile_forward"),
    Sm100Backward: (("sm_100a",), "sm100.bwd.launch", "compile_backward"),
}
"""The architectures and the compile function of a kernel, by the type of its config."""


def arch_of(kernel: Kernel) -> str:
    """The architecture as which a kernel runs if a test names none: one of those with room for it."""
    features, config = kernel
    archs, _, _ = _LAUNCHES[type(config)]
    if len(archs) > 1 and config.shared_memory(features) > SMALL_BYTES:
        archs = LARGE if config.shared_memory(features) <= LARGE_BYTES else LARGEST
    return archs[zlib.crc32(repr(kernel).encode()) % len(archs)]


@functools.cache
def compiled(features: Features, config: Any, arch: str = "") -> Any:
    """The kernel for the device that is there; its `arch` tells those of several devices apart."""
    _, module, function = _LAUNCHES[type(config)]
    with jit.quiet():
        return getattr(importlib.import_module(f"flash4_torch.kernels.{module}"), function)(features, config)


@functools.cache
def compiled_preprocess(plan: PreprocessPlan) -> Any:
    from flash4_torch.kernels.aux_kernels.bwd_preprocess import compile_preprocess

    return compile_preprocess(plan)


@functools.cache
def compiled_tables(plan: MaskPlan) -> Any:
    from flash4_torch.kernels.aux_kernels.mask_blocks import compile_mask_blocks

    return compile_mask_blocks(plan)


@contextmanager
def emulated(kernel: Kernel, call: Call, arch: str = "", **schedule: Any) -> Iterator[emulate.Device]:
    """A device for one launch, which may ask for as much shared memory as the tables count."""
    features, config = kernel
    with (
        launches() as asked,
        emulate.device(arch or arch_of(kernel), num_sms=call.num_sms, **schedule) as device,
    ):
        yield device
    # What merges splits comes last.
    launch = asked[-1 - features.splits]
    assert launch.smem_bytes <= config.shared_memory(features), "the tables allow for less"


class RowStats(NamedTuple):
    """The statistics of query rows, and what they are computed from."""

    stats: Tensor
    out: Tensor
    lse: Tensor


Where = AbstractContextManager[Any]
"""A launch's context; it gives a device, whose `touching` names the tensors that the launch may touch."""


def run(kernel: Kernel, call: Call, where: Where | None = None, **schedule: Any) -> Results:
    """A launch of the forward into memory full of NaN; raises for whatever the emulator finds wrong.

    where: a context to use instead of a device with that schedule.
    """
    features, config = kernel
    q = call.q
    out = torch.full((*q.shape[:-1], features.Dv), math.nan, dtype=q.dtype)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), math.nan)
    mask, plan = call.mask, None
    if mask is not None:
        mask = mask.expand(*mask.shape[:3], call.k.shape[1])
        plan = MaskPlan(features.mask, config.queries, config.keys, config.pack_gqa)
    low = torch.full_like(lse, math.nan) if features.float_mask else None
    tensors = (*_ordered(call.order[0], q, call.k, call.v), *_ordered(call.order[1], out), lse, low)
    where = where or emulated(kernel, call, **schedule)
    parts = ()
    if features.splits:
        numbers = sum(x.numel() for x in (out, lse, low) if x is not None)
        parts = (torch.full((call.splits, -(-numbers // 8) * 8), math.nan),)
    _launch(kernel, call, tensors, (), mask, plan, (), max(call.lengths[0]), where, (call.sinks,), parts)
    assert low is None or not low.isnan().any()
    return Results(out, lse)


def empty_splits_have_nothing(kernel: Kernel) -> None:
    """Three blocks make the same bits in three splits and in more, whatever the schedule."""
    (features, config), generator = kernel, torch.Generator().manual_seed(0)
    shape = 1, 1, 150, 3 * config.keys
    mask = torch.rand(shape, generator=generator) > 0.2 if features.mask else None
    if features.float_mask:
        numbers = 9.0 * torch.randn(shape, generator=generator)
        mask = numbers.masked_fill(~mask, -math.inf).to(getattr(torch, features.mask))
    call = drawn(kernel, lengths=((shape[2],), (shape[3],)), splits=3, left=9999, mask=mask)
    found = run(kernel, call)
    check_results(kernel, call, found)
    for splits, schedule, order in ((4, "late", call.order), (17, "fuzz", (1, 1))):
        more = run(kernel, dataclasses.replace(call, splits=splits, order=order), schedule=schedule)
        assert torch.equal(more.out, found.out) and torch.equal(more.lse, found.lse)


def run_backward(
    kernel: Kernel,
    call: Call,
    where: Where | None = None,
    stats_of: Call | None = None,
    given: RowStats | None = None,
    **schedule: Any,
) -> Gradients:
    """A launch of the backward, as `run`.

    stats_of: the call whose rows the preprocess has seen, if another one.
    given: the rows' statistics and what they are computed from, instead of those that the preprocess makes.
    """
    features, config = kernel
    blocks = sums_of(features.D, config, features.column_step)
    stats, first = _stats(features, stats_of or call, config.queries) if given is None else (given.stats, [])
    count = stats.shape[-1] // config.queries
    dq_acc, dq = torch.zeros(*stats.shape[1:-1], count, blocks.floats), None
    if config.scope == Scope.KV_HEAD:
        B, _, Hk, _ = call.k.shape
        ctas, group = B * Hk if config.preprocesses else min(call.num_sms, B * Hk), call.q.shape[2] // Hk
        dq_acc = torch.full((ctas, group, count, blocks.floats), math.nan)
        dq = torch.full(call.q.shape, math.nan, dtype=call.q.dtype)
    dq_semaphore = (
        torch.zeros(*stats.shape[1:-1], count, dtype=torch.int32) if features.deterministic else None
    )
    heads = call.q.shape[-2] if config.scope == Scope.Q_HEAD else call.k.shape[-2]
    dk, dv = (
        torch.full((*x.shape[:-2], heads, x.shape[-1]), math.nan, dtype=x.dtype) for x in (call.k, call.v)
    )
    dmask = torch.zeros(call.mask.shape) if features.dmask else None
    mask, plan = call.mask, None
    if mask is not None:
        mask = mask.transpose(2, 3).expand(-1, -1, -1, call.q.shape[1])
        plan = mask_plan(features.mask, config)
    stats = -stats if config.tmem_order else stats
    q, k, v, *gradients = _ordered(call.order[0], call.q, call.k, call.v, dq, dk, dv)
    tensors = (q, k, v, *_ordered(call.order[1], call.dout), stats, dq_acc, *gradients)
    behind = (None if dmask is None else dmask.transpose(2, 3),)
    where = where or emulated(kernel, call, **schedule)
    if config.preprocesses:
        rows = *_ordered(call.order[1], given.out), given.lse
        _launch_small(kernel, call, (*tensors, *rows), where)
        return Gradients(dq, dk, dv)
    _launch(kernel, call, tensors, (dq_semaphore,), mask, plan, behind, max(call.lengths[1]), where)
    dk, dv = (
        x.unflatten(-2, (call.k.shape[-2], -1)).float().sum(-2).to(x.dtype)
        if config.scope == Scope.Q_HEAD
        else x
        for x in (dk, dv)
    )
    if dq is not None:
        return Gradients(dq, dk, dv, dmask)
    order = torch.tensor([[blocks.place(i, j) for j in range(features.D)] for i in range(config.queries)])
    rows = dq_acc[..., order].flatten(-3, -2) * call.scale
    if features.varlen:
        parts = [rows[:, start : start + n] for start, n in zip(first, call.lengths[0], strict=True)]
        rows = torch.cat(parts, 1).transpose(0, 1)
    else:
        rows = rows[:, :, : call.q.shape[1]].transpose(1, 2)
    return Gradients(rows.to(call.q.dtype), dk, dv, dmask)


def _ordered(heads_first: bool, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same memory, seen with heads before positions if it is not packed."""
    return tuple(x.transpose(1, 2) if heads_first and x is not None and x.dim() == 4 else x for x in tensors)


def _launch(
    kernel: Kernel,
    call: Call,
    tensors: tuple[Tensor, ...],
    behind_tile_counter: tuple[Tensor | None, ...],
    mask: Tensor | None,
    plan: MaskPlan | None,
    behind_mask: tuple[Tensor | None, ...],
    max_seqlen: int,
    where: Where,
    behind_rng_state: tuple[Tensor | None, ...] = (),
    behind_params: tuple[Tensor, ...] = (),
) -> None:
    features, config = kernel
    tile_counter = torch.zeros(1, dtype=torch.int32)
    ends = [None, None]
    if features.varlen:
        ends = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in call.lengths]
    params = _params(call, max_seqlen)
    rng_state = call.rng_state if features.dropout else None
    with where as device:
        tables = None
        if plan is not None:
            tables = torch.full((place(plan, *mask.shape).words,), -7, dtype=torch.int32)
            with device.touching(mask, tables):
                compiled_tables(plan)(mask, tables)
        before = (*tensors, tile_counter, *behind_tile_counter, *ends)
        touched = (*before, mask, tables, *behind_mask, rng_state, *behind_rng_state, *behind_params)
        with device.touching(*(x for x in touched if x is not None)):
            mask_args = None if plan is None else (mask, tables)
            others = (*behind_mask, rng_state, *behind_rng_state)
            compiled(features, config, device.arch)(*before, mask_args, *others, params, *behind_params)
    assert tile_counter.item() == 0


def _launch_small(kernel: Kernel, call: Call, tensors: tuple[Tensor, ...], where: Where) -> None:
    """A launch of a backward that `preprocesses`."""
    rng_state = call.rng_state if kernel[0].dropout else None
    with where as device, device.touching(*(x for x in (*tensors, rng_state) if x is not None)):
        compiled(*kernel, device.arch)(*tensors, rng_state, _params(call, max(call.lengths[1])))


def _params(call: Call, max_seqlen: int) -> tuple[Any, ...]:
    byte, fraction = thresholds(call.p)
    numbers = (call.scale, call.softcap, call.left, call.right, max_seqlen)
    more = call.num_sms, byte, fraction, 1.0 / (1.0 - call.p), call.run_length
    return (*numbers, call.heads_per_section, *more, *map(int, call.order))


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """The launches that are requested meanwhile."""
    launch = emulate.Device.launch
    asked: list[Launch] = []

    def noted(device: emulate.Device, what: Launch) -> None:
        asked.append(what)
        launch(device, what)

    with mock.patch.object(emulate.Device, "launch", noted):
        yield asked


def _stats(features: Features, call: Call, m: int) -> tuple[Tensor, list[int]]:
    """The row statistics that the preprocess makes, and where each sequence begins in them."""
    out, lse = results(features, call, torch.float64)
    delta = (out * call.dout.double()).sum(-1).transpose(-1, -2)
    rows = torch.stack([(lse * math.log2(math.e)).masked_fill(lse == -math.inf, math.inf), delta])
    if not features.varlen:
        Sq = call.q.shape[1]
        stats = rows.new_zeros(features.row_stats, *rows.shape[1:-1], -(-Sq // m) * m)
        stats[0] = math.inf
        stats[:2, ..., :Sq] = rows
        if features.float_mask:
            stats[2] = math.inf
            stats[2, ..., :Sq] = lse.float().double().masked_fill(lse == -math.inf, math.inf)
            stats[3, ..., :Sq] = (lse - lse.float().double()).nan_to_num(0.0) * math.log2(math.e)
        return stats.float(), []
    lengths = call.lengths[0]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    first = [(start // m + b) * m for b, start in enumerate(starts)][:-1]
    stats = rows.new_zeros(2, rows.shape[1], (starts[-1] // m + len(lengths)) * m)
    stats[0] = math.inf
    for b, (start, end) in enumerate(pairwise(starts)):
        stats[..., first[b] : first[b] + end - start] = rows[..., start:end]
    return stats.float(), first


# Laws.


def is_right(kernel: Kernel, data: st.DataObject, arch: str = "") -> None:
    """The forward of a generated call is right and has the same bits, whatever the schedule."""
    features, config = kernel
    call = data.draw(calls(features, whole=1 if config.ragged_k else config.keys, packed=config.pack_gqa > 1))
    found = run(kernel, call, arch=arch, schedule="late")
    check_results(kernel, call, found)
    schedule, seed = data.draw(st.sampled_from(["eager", "fuzz"])), data.draw(st.integers(0, 9))
    again = run(kernel, _in_any_order(call, data), arch=arch, schedule=schedule, seed=seed)
    assert torch.equal(found.out, again.out) and torch.equal(found.lse, again.lse)


def _in_any_order(call: Call, data: st.DataObject) -> Call:
    """The same call; its tensors' dimensions may be in another order."""
    return dataclasses.replace(call, order=(data.draw(st.booleans()), data.draw(st.booleans())))


def gradients_are_right(kernel: Kernel, data: st.DataObject, arch: str = "") -> None:
    """The backward of a generated call is right under any schedule; dK, dV and ordered dQ keep their bits."""
    features, config = kernel
    call = data.draw(calls(features, whole=1 if config.ragged_k else config.cluster_keys))
    if isinstance(config, Sm90Backward) and config.heads_inner and not features.mask:
        call.run_length = data.draw(st.integers(0, 3))
    found = run_backward(kernel, call, arch=arch, schedule="late")
    check_gradients(kernel, call, found)
    schedule, seed = data.draw(st.sampled_from(["eager", "fuzz"])), data.draw(st.integers(0, 9))
    again = run_backward(kernel, _in_any_order(call, data), arch=arch, schedule=schedule, seed=seed)
    assert torch.equal(found.dk, again.dk) and torch.equal(found.dv, again.dv)
    if features.deterministic or kernel[1].scope == Scope.KV_HEAD:
        assert torch.equal(found.dq, again.dq)
    else:
        check_gradients(kernel, call, again)


def one_launch_has_the_bits_of_two(kernel: Kernel, data: st.DataObject) -> None:
    """A backward that `preprocesses` has the bits of one after the preprocess kernel under any schedule."""
    features, config = kernel
    two_launches = features, config._replace(preprocesses=False)
    whole = 1 if config.ragged_k else config.cluster_keys
    call = _in_any_order(data.draw(calls(features, whole=whole)), data)
    out, lse = results(features, call, torch.float64)
    (plan, _), blank = row_plans(*two_launches, dlse=False), _stats(features, call, config.queries)[0]
    apart = RowStats(torch.full_like(blank, math.nan), out.to(call.q.dtype), lse.float().contiguous())
    with emulated(two_launches, call) as device, device.touching(*apart, call.dout):
        heads_first = call.order[1]
        rows = _ordered(heads_first, apart.out, call.dout)
        none = (None,) * 2
        compiled_preprocess(plan)(*rows, apart.lse, *none, apart.stats, *none, None, int(heads_first))
    expected = run_backward(two_launches, call, given=apart, schedule="late")
    for schedule in ("eager", "fuzz", "late")[: examples(1, 3)]:
        alone = apart._replace(stats=torch.full_like(blank, math.nan))
        found = run_backward(kernel, call, given=alone, schedule=schedule, seed=data.draw(st.integers(0, 9)))
        assert torch.equal(alone.stats, apart.stats)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True))


def sums_have_an_order(kernel: Kernel) -> None:
    """dQ has the same bits where all tiles of a head run at once, each on an SM of its own."""
    lengths = ((300,), (900,))
    call = drawn(kernel, lengths=lengths, num_sms=16, heads_per_section=1, left=700, right=700)
    late, *others = (
        run_backward(kernel, call, schedule=schedule, seed=seed).dq
        for schedule, seed in [("late", 0), ("fuzz", 0), ("fuzz", 1)][: examples(2, 3)]
    )
    assert all(torch.equal(late, other) for other in others)


def blind_rows_are_zero(kernel: Kernel) -> None:
    """Rows that see no key are 0, whatever the values."""
    call = blind(kernel)
    call.v.fill_(math.nan)
    out, lse = run(kernel, call)
    assert (out == 0).all() and (lse == -math.inf).all()


def unseen_keys_have_no_gradient(kernel: Kernel) -> None:
    assert all((x == 0).all() for x in run_backward(kernel, blind(kernel))[:3])


def sequences_are_alone(kernel: Kernel, poison: float) -> None:
    """The forward of each sequence is the same, whatever the others hold."""
    call = _three_sequences(kernel, last=33)
    clean = run(kernel, call)
    for alone in each_alone(call, poison):
        found, rows = run(kernel, alone.call), alone.rows
        assert torch.equal(found.out[rows], clean.out[rows])
        assert torch.equal(found.lse[:, rows], clean.lse[:, rows])


def gradients_are_alone(kernel: Kernel, poison: float) -> None:
    call = _three_sequences(kernel, last=133)
    clean = run_backward(kernel, call)
    for alone in each_alone(call, poison):
        found, rows, keys = run_backward(kernel, alone.call, stats_of=call), alone.rows, alone.keys
        assert torch.equal(found.dk[keys], clean.dk[keys]) and torch.equal(found.dv[keys], clean.dv[keys])
        testing.assert_close_as_peer(found.dq[rows], clean.dq[rows].double(), clean.dq[rows], what="dq")


def _three_sequences(kernel: Kernel, last: int) -> Call:
    more = {"left": 60, "right": 20, "p": 0.2 if kernel[0].dropout else 0.0}
    return drawn(kernel, lengths=((40, 70, 9), (50, 101, last)), **more)


def every_tile_is_drawn_once(kernel: Kernel, tiles: int) -> None:
    """Odd numbers of tiles leave a CTA of a pair without rows; on one SM it still is a pair."""
    _, config = kernel
    backward = isinstance(config, Sm80Backward | Sm90Backward | Sm100Backward)
    rows = config.keys if backward else config.queries
    lengths = ((150,) * 2, (rows * tiles - 7,) * 2)
    for num_sms, schedule in ((1, "late"), (5, "fuzz")):
        call = drawn(
            kernel,
            seed=tiles,
            lengths=lengths if backward else lengths[::-1],
            num_sms=num_sms,
            right=9,
        )
        if backward:
            check_gradients(kernel, call, run_backward(kernel, call, schedule=schedule))
        else:
            check_results(kernel, call, run(kernel, call, schedule=schedule))
