"""Launching the Hopper backward kernel alone in the emulator: its calls, its neighbours in torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch import testing
from flash4_torch.compile import jit
from flash4_torch.configs.types import Features, Sm90Backward
from flash4_torch.emulator.host import Launch
from flash4_torch.kernels.common.dq_blocks import DqBlocks
from flash4_torch.kernels.common.mask_tables import MaskPlan, place
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention
from flash4_torch.reference.dropout import Dropout, thresholds
from flash4_torch.reference.scoring import Scoring
from flash4_torch.testing import emulate

Kernel = tuple[Features, Sm90Backward]


def static(D: int, Dv: int, tiles: tuple[int, int], dtype: str = "bfloat16", **more: Any) -> Kernel:
    of_config = {name: more.pop(name) for name in tuple(more) if name in Sm90Backward._fields}
    return Features(dtype, D, Dv, **more), Sm90Backward(*tiles, **of_config)


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dmask: Tensor | None = None


@dataclass(repr=False)
class Call:
    """One launch; `lengths` are those of the sequences' queries and keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    scale: float
    softcap: float = 0.0
    left: int = 0
    right: int = 0
    section: int = 2
    multiprocessors: int = 2
    mask: Tensor | None = None
    p: float = 0.0
    rng_state: Tensor | None = None

    def __repr__(self) -> str:
        tensors = {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout, "mask": self.mask}
        shapes = {name: (tuple(x.shape), x.stride()) for name, x in tensors.items() if x is not None}
        names = ("lengths", "scale", "softcap", "left", "right", "section", "multiprocessors", "p")
        return f"Call({shapes} { {name: getattr(self, name) for name in names} })"


LENGTHS = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 192, 257]), st.integers(1, 300))


@st.composite
def calls(draw: st.DrawFn, features: Features, config: Sm90Backward) -> Call:
    """What the host may ask of such a kernel."""
    Hk = draw(st.integers(1, 2))
    Hq = Hk * draw(st.integers(1, 3))
    if features.varlen:
        B = draw(st.integers(1, 3))
        length = st.one_of(st.sampled_from([0, 0, 1]), LENGTHS)
        lengths = tuple(tuple(draw(length) for _ in range(B)) for _ in range(2))
        lengths = tuple(n if any(n) else (5,) * B for n in lengths)
        Sq, Sk = max(lengths[0]), max(lengths[1])
    else:
        B, Sq, Sk = draw(st.integers(1, 2)), draw(LENGTHS), draw(LENGTHS)
        Sk = Sk if config.tail else -(-Sk // config.ticket_keys) * config.ticket_keys
        lengths = ((Sq,) * B, (Sk,) * B)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = getattr(torch, features.dtype)
    heads_first = draw(st.booleans())

    def tensor(sizes: tuple[int, ...], H: int, D: int) -> Tensor:
        shape = (sum(sizes), H, D) if features.varlen else (B, sizes[0], H, D)
        order = [*shape[:-3], shape[-2], shape[-3], shape[-1]] if heads_first else shape
        x = torch.randn(order, generator=generator).to(dtype)
        return x.transpose(-3, -2) if heads_first else x

    scales = [0.0, -0.1, 0.2] if features.scaled else [features.D**-0.5, 0.5]
    return Call(
        tensor(lengths[0], Hq, features.D),
        tensor(lengths[1], Hk, features.D),
        tensor(lengths[1], Hk, features.Dv),
        tensor(lengths[0], Hq, features.Dv),
        lengths,
        scale=draw(st.sampled_from(scales)),
        softcap=draw(st.sampled_from([1.0, 7.5])) if features.softcap else 0.0,
        left=draw(st.integers(-200, 200)) if features.left else 0,
        right=draw(st.one_of(st.just(0), st.integers(-200, 200))) if features.right else 0,
        section=draw(st.integers(1, 5)),
        multiprocessors=draw(st.integers(1, 4)),
        mask=draw(masks((B, Hq, Sq, Sk), features.mask)) if features.mask else None,
        p=draw(st.sampled_from([0.1, 0.5, 0.8])) if features.dropout else 0.0,
        rng_state=torch.tensor([draw(st.integers(0, 1 << 40)), draw(st.integers(0, 99))]),
    )


@st.composite
def masks(draw: st.DrawFn, full: tuple[int, int, int, int], dtype: str) -> Tensor:
    """Any dimension may broadcast; whole stretches of queries are hidden, others visible, others mixed."""
    shape = [draw(st.sampled_from([1, n])) for n in full]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    stretch = torch.randint(0, 3, (*shape[:2], -(-shape[2] // 70), shape[3]), generator=generator)
    if draw(st.booleans()):
        stretch = stretch[..., :1].expand_as(stretch)
    kind = stretch.repeat_interleave(70, 2)[:, :, : shape[2]]
    seen = (kind == 2) | ((kind == 1) & (torch.rand(shape, generator=generator) < 0.7))
    if dtype == "bool":
        return seen
    bias = torch.where(kind == 2, 0.0, torch.randn(shape, generator=generator))
    return bias.masked_fill(~seen, -math.inf).to(getattr(torch, dtype))


def drawn(kernel: Kernel, Hk: int = 1, **changes: Any) -> Call:
    """A plain call, of two query heads to each key head."""
    features, _ = kernel
    lengths = changes.pop("lengths", ((150,), (300,)))
    generator = torch.Generator().manual_seed(changes.pop("seed", 0))
    dtype = getattr(torch, features.dtype)

    def tensor(sizes: tuple[int, ...], H: int, D: int) -> Tensor:
        shape = (sum(sizes), H, D) if features.varlen else (len(sizes), sizes[0], H, D)
        return torch.randn(shape, generator=generator).to(dtype)

    (q, k), D, Dv = lengths, features.D, features.Dv
    tensors = tensor(q, 2 * Hk, D), tensor(k, Hk, D), tensor(k, Hk, Dv), tensor(q, 2 * Hk, Dv)
    more = {"softcap": 3.0 if features.softcap else 0.0, "rng_state": torch.tensor([5, 7])} | changes
    return Call(*tensors, lengths, D**-0.5, **more)


@functools.cache
def compiled(features: Features, config: Sm90Backward) -> Any:
    from flash4_torch.kernels.sm90.bwd.launch import compile_backward

    with jit.quiet():
        return compile_backward(features, config)


@functools.cache
def compiled_tables(plan: MaskPlan) -> Any:
    from flash4_torch.kernels.shared.mask_blocks import compile_mask_blocks

    return compile_mask_blocks(plan)


def run(kernel: Kernel, call: Call, stats_of: Call | None = None, **schedule: Any) -> Gradients:
    """A launch into memory full of NaN; raises for whatever the emulator finds wrong.

    stats_of: the call whose rows the preprocess has seen, if another one.
    """
    features, config = kernel
    blocks = DqBlocks(features.D, config.queries, config.dq_pieces)
    stats, first = _stats(features, stats_of or call, config.queries)
    count = stats.shape[-1] // config.queries
    dq_acc = torch.zeros(*stats.shape[1:-1], count, blocks.floats)
    turns = torch.zeros(*stats.shape[1:-1], count, dtype=torch.int32) if features.deterministic else None
    dk, dv = (torch.full(x.shape, math.nan, dtype=x.dtype) for x in (call.k, call.v))
    dmask = torch.zeros(call.mask.shape) if features.dmask else None
    tickets = torch.zeros(1, dtype=torch.int32)
    ends = [None, None]
    if features.varlen:
        ends = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in call.lengths]
    byte, fraction = thresholds(call.p)
    numbers = (call.scale, call.softcap, call.left, call.right, max(call.lengths[1]))
    rule = (*numbers, call.section, call.multiprocessors, byte, fraction, 1.0 / (1.0 - call.p))
    rng_state = call.rng_state if features.dropout else None
    with (
        shared_memory_of_launches() as asked,
        emulate.device("sm_90a", multiprocessors=call.multiprocessors, **schedule) as device,
    ):
        mask = _mask_args(features, config, call, device)
        turned = None if dmask is None else dmask.transpose(2, 3)
        workspaces = (call.q, call.k, call.v, call.dout, stats, dq_acc, dk, dv, tickets, turns, *ends)
        touched = (*workspaces, *(mask or ()), turned, rng_state)
        with device.touching(*(x for x in touched if x is not None)):
            compiled(features, config)(*workspaces, mask, turned, rng_state, rule)
    assert tickets.item() == 0
    assert asked[-1] <= config.shared_memory(features), "the tables allow for less"
    order = torch.tensor([[blocks.place(i, j) for j in range(features.D)] for i in range(config.queries)])
    rows = dq_acc[..., order].flatten(-3, -2) * call.scale
    if features.varlen:
        parts = [rows[:, start : start + n] for start, n in zip(first, call.lengths[0], strict=True)]
        rows = torch.cat(parts, 1).transpose(0, 1)
    else:
        rows = rows[:, :, : call.q.shape[1]].transpose(1, 2)
    return Gradients(rows.to(call.q.dtype), dk, dv, dmask)


@contextmanager
def shared_memory_of_launches() -> Iterator[list[int]]:
    """Bytes that each launch asks for."""
    launch = emulate.Device.launch
    asked: list[int] = []

    def noted(device: emulate.Device, what: Launch) -> None:
        asked.append(what.smem_bytes)
        launch(device, what)

    with mock.patch.object(emulate.Device, "launch", noted):
        yield asked


def _stats(features: Features, call: Call, m: int) -> tuple[Tensor, list[int]]:
    """What the preprocess makes, and where each sequence begins in it."""
    out, lse = _forward(features, call)
    delta = (out * call.dout.double()).sum(-1).transpose(-1, -2)
    rows = torch.stack([(lse * math.log2(math.e)).masked_fill(lse == -math.inf, math.inf), delta])
    if not features.varlen:
        Sq = call.q.shape[1]
        stats = rows.new_zeros(*rows.shape[:-1], -(-Sq // m) * m)
        stats[0] = math.inf
        stats[..., :Sq] = rows
        return stats.float(), []
    lengths = call.lengths[0]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    first = [(start // m + b) * m for b, start in enumerate(starts)][:-1]
    stats = rows.new_zeros(2, rows.shape[1], (starts[-1] // m + len(lengths)) * m)
    stats[0] = math.inf
    for b, (start, end) in enumerate(pairwise(starts)):
        stats[..., first[b] : first[b] + end - start] = rows[..., start:end]
    return stats.float(), first


def _mask_args(
    features: Features, config: Sm90Backward, call: Call, device: emulate.Device
) -> tuple[Tensor, Tensor] | None:
    if call.mask is None:
        return None
    turned = call.mask.transpose(2, 3).expand(-1, -1, -1, call.q.shape[1])
    plan = MaskPlan(features.mask, config.ticket_keys, config.queries)
    tables = torch.full((place(plan, *turned.shape).words,), -7, dtype=torch.int32)
    with device.touching(turned, tables):
        compiled_tables(plan)(turned, tables)
    return turned, tables


def _sequences(features: Features, call: Call, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """(q, k, v, ...) of each sequence, as batches of one; the fourth and further ones are like q."""
    if not features.varlen:
        return [tensors]
    sizes = [call.lengths[1 if i in (1, 2) else 0] for i in range(len(tensors))]
    parts = [x.split(n) for x, n in zip(tensors, sizes, strict=True)]
    return [tuple(x[None] for x in found) for found in zip(*parts, strict=True)]


def _scoring(features: Features, call: Call, b: int, mask: Tensor | None) -> Scoring:
    band = Band(call.left if features.left else None, call.right if features.right else None)
    dropout = Dropout(call.rng_state, call.p, b) if features.dropout else None
    return Scoring(call.scale, band, call.softcap, mask, dropout)


def _forward(features: Features, call: Call) -> tuple[Tensor, Tensor]:
    """Exact out and lse."""
    tensors = tuple(x.double() for x in (call.q, call.k, call.v))
    mask = None if call.mask is None or call.mask.dtype == torch.bool else call.mask.double()
    found = [
        attention(*each, _scoring(features, call, b, call.mask if mask is None else mask))
        for b, each in enumerate(_sequences(features, call, tensors))
    ]
    if not features.varlen:
        return found[0]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def reference(kernel: Kernel, call: Call, dtype: torch.dtype) -> Gradients:
    """By definition, in `dtype`."""
    features, _ = kernel
    leaves = [x.detach().clone().to(dtype).requires_grad_() for x in (call.q, call.k, call.v)]
    mask = call.mask
    if features.dmask:
        mask = call.mask.detach().clone().to(dtype).requires_grad_()
    each = _sequences(features, call, (*leaves, call.dout.to(dtype)))
    total = leaves[0].new_zeros(())
    for b, (q, k, v, dout) in enumerate(each):
        if q.numel() and k.numel():
            out, _ = attention(q, k, v, _scoring(features, call, b, mask))
            total = total + (out * dout).sum()
    wanted = [*leaves, *([mask] if features.dmask else [])]
    if not total.requires_grad:  # no sequence has both queries and keys
        return Gradients(*map(torch.zeros_like, wanted))
    found = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    return Gradients(*found)


def check(kernel: Kernel, call: Call, found: Gradients) -> None:
    exact, peer = reference(kernel, call, torch.float64), reference(kernel, call, call.q.dtype)
    for name, result, truth, plain in zip(Gradients._fields, found, exact, peer, strict=True):
        if result is not None:
            testing.assert_close_as_peer(result.to(plain.dtype), truth, plain, what=name, noise=noise(call))


def noise(call: Call) -> float:
    """Of dP - delta where both are equal, as for a row that sees one key: each is rounded to float32."""
    rows, heads = call.dout.shape[-3], call.dout.shape[-2]
    values = call.v.repeat_interleave(heads // call.v.shape[-2], -2)
    terms = (call.dout.abs().double().amax((-3, -2)) * values.abs().double().amax((-3, -2))).sum(-1).max()
    largest = max(call.q.abs().max().item(), call.k.abs().max().item())
    keep = 1.0 / (1.0 - call.p)
    return 4 * torch.finfo(torch.float32).eps * terms.item() * keep * abs(call.scale) * largest * rows**0.5
