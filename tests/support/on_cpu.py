"""The host side of our kernels without a GPU: stand-ins take the place of the compiled ones.

They assert what the host promises to kernels, and compute from their arguments what kernels would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, starmap
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import on_cpu_backward
from driver_stand_in import driver
from flash4_torch import compile, fast_path
from flash4_torch.backends import dispatch
from flash4_torch.backends.compiled import (
    MASK_BLOCKS,
    MASK_TRANSPOSE,
    SM90A,
    Compiled,
    Target,
    backend,
    forward,
    mask_kinds,
)
from flash4_torch.backends.compiled.targets import WEIGHTS, ForwardConfig
from flash4_torch.backends.tiled import Tiled
from flash4_torch.configs.types import Features
from flash4_torch.kernels.common.mask_tables import MaskPlan
from flash4_torch.masks import Band
from flash4_torch.problem import Problem
from flash4_torch.reference import kvcache, tiled
from flash4_torch.reference import weights as reference_weights
from flash4_torch.reference.dropout import Dropout
from flash4_torch.reference.scoring import Scoring

NUM_SMS = 132


class OnCpu(Compiled):
    """The backend of our kernels, which takes the CPU for a GPU."""

    def __init__(self, target: Target):
        super().__init__(name_of(target), target)
        self._target = target

    def why_not(self, problem: Problem) -> list[str]:
        return super().why_not(self._on_gpu(problem))

    def target(self, problem: Problem) -> Target:
        return super().target(self._on_gpu(problem))

    def _on_gpu(self, problem: Problem) -> Problem:
        spec = problem.spec._replace(device="cuda", capability=self._target.capability)
        return problem._replace(spec=spec)


def name_of(target: Target) -> str:
    """Name of the target's backend."""
    return dispatch.own_backend(target.capability)


class Launch(NamedTuple):
    features: Features
    config: ForwardConfig
    args: tuple[Any, ...]
    """The dimensions of dense tensors are (B, S, H, D), whatever the order in which they came."""


class Machine(NamedTuple):
    """What ran while the stand-ins were in place."""

    launches: list[Launch]
    backwards: list[on_cpu_backward.Launch]
    masks: list[MaskPlan]
    """Plans of the kernel that reads masks beforehand."""
    built: list[tuple[str, tuple[object, ...], str]]
    """Kernels that the compile layer was asked for: entry, static arguments, architecture."""


@contextmanager
def gpu(target: Target = SM90A) -> Iterator[Machine]:
    """A context in which attention on CPU tensors goes to the kernels of that GPU, or else through tiled."""
    machine = Machine([], [], [], [])

    def function(entry: str, static: tuple[Any, ...], arch: str) -> compile.Function:
        machine.built.append((entry, static, arch))
        # Kernels know nothing of autocast.
        return torch.autocast("cpu", enabled=False)(stand_in(entry, static, arch))

    def stand_in(entry: str, static: tuple[Any, ...], arch: str) -> compile.Function:
        if entry == MASK_BLOCKS:
            return lambda mask, tables: _mask_blocks(machine, *static, mask, tables)
        if entry == MASK_TRANSPOSE:
            return lambda *args: _mask_transpose(machine, *static, *args)
        assert arch == target.arch
        if entry == WEIGHTS:
            return lambda *args: _weights(*static, *args)
        if entry != target.forward:
            return on_cpu_backward.stand_in(target, machine.backwards, entry, static)
        return lambda *args: _forward(machine, *static, *args)

    _forget()
    try:
        with (
            mock.patch.object(dispatch, "PRIORITY", (OnCpu(target), Tiled())),
            mock.patch.object(compile, "function", function),
            driver(),
            mock.patch.object(backend, "num_sms", lambda index: NUM_SMS),
            mock.patch("flash4_torch.problem._MADE_CONTIGUOUS", frozenset()),
        ):
            yield machine
    finally:
        _forget()


def _forget() -> None:
    mask_kinds._kind.cache_clear()
    fast_path.clear()
    backend._kernel.cache_clear()
    backend._backward_kernels.cache_clear()
    backend._weights_kernel.cache_clear()


def _forward(machine: Machine, features: Features, config: ForwardConfig, *args: Any) -> None:
    if features.splits:
        # The kernel has memory for results of splits: all of it, and of all of them.
        *args, parts = args
        numbers = sum(x.numel() for x in args[3:6] if x is not None)
        assert parts.shape[0] > 1 and parts.shape[1:] == (-(-numbers // 8) * 8,)
        assert parts.is_contiguous() and parts.dtype == torch.float32
        parts.fill_(math.nan)
    *qkv, out, lse, low, counter, ends_q, ends_k, mask_args, rng_state, sinks, params = args
    *_, drop_byte, drop_fraction, keep_scale, _, heads_first, out_heads_first = params
    q, k, v = on_cpu_backward.in_order(heads_first, *qkv)
    (out,) = on_cpu_backward.in_order(out_heads_first, out)
    args = q, k, v, out, lse, low, counter, ends_q, ends_k, mask_args, rng_state, sinks, params
    machine.launches.append(Launch(features, config, args))
    _check(features, config, *args)
    scale, softcap, left, right, max_seqlen, *_ = params
    p = (drop_byte + drop_fraction / 2**32) / 256
    assert keep_scale == (0.0 if p == 1.0 else 1.0 / (1.0 - p)) or abs(keep_scale * (1.0 - p) - 1.0) < 1e-9
    band = Band(left if features.left else None, right if features.right else None)
    mask = mask_args[0] if mask_args else None
    sequences = [(0, slice(None), slice(None))]
    if features.varlen:
        spans = (starmap(slice, pairwise(ends.tolist())) for ends in (ends_q, ends_k))
        sequences = [(b, rows, keys) for b, (rows, keys) in enumerate(zip(*spans, strict=True))]
        assert all(rows.stop - rows.start <= max_seqlen for _, rows, _ in sequences)
    for b, rows, keys in sequences:
        dropout = Dropout(rng_state, p, b) if features.dropout else None
        scoring = Scoring(scale, band, softcap if features.softcap else 0.0, mask, dropout)
        if features.varlen:
            results = tiled.forward(q[None, rows], k[None, keys], v[None, keys], scoring, sinks=sinks)
            out[rows], lse[:, rows] = results[0][0], results[1][0]
        else:
            results = tiled.forward(q, k, v, scoring, sinks=sinks)
            own_lse = lse[..., : q.shape[1]]
            if features.running == "add":
                parts = torch.stack([out, results[0].float()]), torch.stack([own_lse, results[1]])
                results = (*kvcache.merge(*([part] for part in parts)), None)
            for result, exact in zip((out, own_lse, low), results, strict=True):
                if result is not None:
                    result.copy_(exact)


def _weights(features: Features, average_heads: bool, has_tma: bool, *args: Any) -> None:
    signed = args[0] is True
    args = args[1:] if signed else args
    assert not signed or (features.dropout and not average_heads)
    q, k, lse, low, weights, mask_args, rng_state, params = args
    B, Sq, Hq, _ = q.shape
    Sk = k.shape[1]
    for x in (q, k):
        on_cpu_backward.check_rows(x, features.dtype, False)
    assert weights.shape == ((B, Sq, Sk) if average_heads else (B, Hq, Sq, Sk)) and weights.is_contiguous()
    assert weights.dtype == q.dtype and q.shape[-1] == k.shape[-1] == features.D and not features.sinks
    for x in (lse, low):
        assert x is None or (x.shape == (B, Hq, Sq) and x.is_contiguous() and x.dtype == torch.float32)
    assert (low is not None) == features.float_mask and (rng_state is not None) == features.dropout
    assert (mask_args is not None) == bool(features.mask)
    scale, softcap, left, right, *_, drop_byte, drop_fraction, _, _, heads_first, _ = params
    assert not heads_first
    p = (drop_byte + drop_fraction / 2**32) / 256
    band = Band(left if features.left else None, right if features.right else None)
    mask = mask_args[0] if mask_args else None
    dropout = Dropout(rng_state, p) if features.dropout else None
    scoring = Scoring(scale, band, softcap if features.softcap else 0.0, mask, dropout)
    weights.copy_(reference_weights.forward(q, k, lse, low, scoring, average_heads, signed))


def _check(
    features: Features,
    config: ForwardConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    low: Tensor | None,
    counter: Tensor,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    mask_args: tuple[Tensor, Tensor] | None,
    rng_state: Tensor | None,
    sinks: Tensor | None,
    params: tuple[Any, ...],
) -> None:
    """Asserts what the kernel is promised."""
    for x in (q, k, v):
        assert x.dim() == 4 - features.varlen and x.numel() > 0
        assert str(x.dtype) == f"torch.{features.dtype}"
        assert x.stride(-1) == 1 and all(s > 0 and s % 8 == 0 for s in x.stride()[:-1])
        assert x.data_ptr() % 16 == 0
    D, Dv = features.D, features.Dv
    assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (D, D, Dv) and D % 8 == Dv % 8 == 0
    *batch, Sq, Hq, _ = q.shape
    assert out.shape == (*batch, Sq, Hq, Dv) and out.data_ptr() % 16 == 0
    assert str(out.dtype) == f"torch.{'float32' if features.running else features.dtype}"
    assert lse.is_contiguous() and lse.dtype == torch.float32
    if features.running:
        assert out.stride(-1) == 1 and all(s > 0 and s % 8 == 0 for s in out.stride()[:-1])
        assert lse.shape[:-1] == (*batch, Hq) and lse.shape[-1] >= Sq
        assert not (features.varlen or features.sinks or features.large_scores)
    else:
        assert out.is_contiguous() and lse.shape == (*batch, Hq, Sq)
    assert (low is not None) == features.float_mask
    if low is not None:
        assert low.shape == lse.shape and low.is_contiguous() and low.dtype == torch.float32
    assert counter.shape == (1,) and counter.dtype == torch.int32 and counter.item() == 0
    assert (ends_q is not None) == (ends_k is not None) == features.varlen
    for ends in (ends_q, ends_k):
        assert ends is None or (ends.dtype == torch.int32 and ends.is_contiguous())
    assert (rng_state is not None) == features.dropout
    assert (sinks is not None) == bool(features.sinks)
    if sinks is not None:
        assert str(sinks.dtype) == f"torch.{features.sinks}"
        assert sinks.shape == (Hq,) and sinks.is_contiguous()
    assert (mask_args is not None) == bool(features.mask)
    if mask_args:
        mask, tables = mask_args
        assert str(mask.dtype) == f"torch.{features.mask}" and mask.shape[3] == k.shape[1]
        plan = forward.mask_plan(features.mask, config)
        on_cpu_backward.check_tables(plan, mask, tables)
    if not features.varlen:
        hidden = features.right and params[3] <= 0
        tail = getattr(config, "ragged_k", True)
        assert tail or k.shape[1] % config.keys == 0 or hidden
        assert params[4] == Sq
    assert params[6] == NUM_SMS
    assert params[5] >= 1
    assert params[0] > 0.0 or features.scaled


def _mask_blocks(machine: Machine, plan: MaskPlan, mask: Tensor, tables: Tensor) -> None:
    machine.masks.append(plan)
    tables.zero_()


def _mask_transpose(
    machine: Machine, plan: MaskPlan, mask: Tensor, copy: Tensor | None, tables: Tensor
) -> None:
    _mask_blocks(machine, plan, mask, tables)
    assert not plan.column_major and (copy is None) == (plan.dtype == "bool")
    if copy is not None:
        Sq = mask.shape[3]
        assert copy.is_contiguous() and copy.shape == (*mask.shape[:3], -(-Sq // 8) * 8)
        copy[..., :Sq], copy[..., Sq:] = mask, torch.nan
