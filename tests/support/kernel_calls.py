"""Calls of one attention kernel, forward or backward, of any architecture, and their right results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch import testing
from flash4_torch.configs.types import Features
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention
from flash4_torch.reference.dropout import Dropout
from flash4_torch.reference.scoring import Scoring

Kernel = tuple[Features, Any]
"""The features that a kernel computes, and its config."""


def static(
    of: type[Any], D: int, Dv: int, tiles: tuple[int, ...], dtype: str = "bfloat16", **more: Any
) -> Kernel:
    """A kernel with a config of that type; `more` are fields of features or config."""
    of_config = {name: more.pop(name) for name in tuple(more) if name in of._fields}
    return Features(dtype, D, Dv, **more), of(*tiles, **of_config)


class Results(NamedTuple):
    out: Tensor
    lse: Tensor


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
    heads_per_section: int = 2
    run_length: int = 0
    num_sms: int = 2
    mask: Tensor | None = None
    p: float = 0.0
    rng_state: Tensor | None = None
    sinks: Tensor | None = None
    splits: int = 1
    """Splits of every tile's keys, for kernels that have them."""
    order: tuple[bool, bool] = (False, False)
    """Whether q, k, v and their gradients, and out and dout, come as (B, H, S, D) if they are dense."""

    def __repr__(self) -> str:
        tensors = {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout, "mask": self.mask}
        shapes = {name: (tuple(x.shape), x.stride()) for name, x in tensors.items() if x is not None}
        names = (
            "lengths",
            "scale",
            "softcap",
            "left",
            "right",
            "heads_per_section",
            "run_length",
            "num_sms",
            "p",
            "splits",
            "order",
        )
        return f"Call({shapes} { {name: getattr(self, name) for name in names} })"


EDGES = (1, 2, 63, 64, 65, 80, 127, 128, 129, 192, 256, 257)
LENGTHS = st.one_of(st.sampled_from(EDGES), st.integers(1, 300))
SHORT = st.integers(1, 20)


@st.composite
def calls(draw: st.DrawFn, features: Features, *, whole: int = 1, packed: bool = False) -> Call:
    """Calls that the host may make of such a kernel.

    whole: a divisor of Sk, for a kernel that handles no end inside a block.
    packed: query heads share tiles, as they do for few queries.
    """
    Hk = draw(st.integers(1, 2))
    Hq = Hk * draw(st.integers(1, 5 if packed else 3))
    length = SHORT if packed else LENGTHS
    right = draw(st.one_of(st.just(0), st.integers(-200, 200)))
    if features.varlen:
        B = draw(st.integers(1, 3))
        any_length = st.one_of(st.sampled_from([0, 0, 1]), length)
        lengths = tuple(tuple(draw(any_length) for _ in range(B)) for _ in range(2))
        lengths = tuple(n if any(n) else (5,) * B for n in lengths)
        Sq, Sk = max(lengths[0]), max(lengths[1])
        if whole > 1:
            right = min(right, 0)  # masks all that follows the last key
    else:
        B, Sq, Sk = draw(st.integers(1, 2)), draw(length), draw(LENGTHS)
        Sk = -(-Sk // whole) * whole
        lengths = ((Sq,) * B, (Sk,) * B)
    scales = [0.0, -0.1, 0.2] if features.scaled else [features.D**-0.5, 0.5]
    return Call(
        *_tensors(features, Hq, Hk, lengths, draw(st.integers(0, 999)), draw(st.booleans())),
        lengths,
        scale=draw(st.sampled_from(scales)),
        softcap=draw(st.sampled_from([1.0, 7.5])) if features.softcap else 0.0,
        left=draw(st.integers(-200, 200)) if features.left else 0,
        right=right if features.right else 0,
        heads_per_section=draw(st.integers(1, 5)),
        num_sms=draw(st.integers(1, 4)),
        mask=draw(masks((B, Hq, Sq, Sk), features.mask)) if features.mask else None,
        p=draw(st.sampled_from([0.1, 0.5, 0.8])) if features.dropout else 0.0,
        rng_state=torch.tensor([draw(st.integers(0, 1 << 40)), draw(st.integers(0, 99))]),
        sinks=draw(sinks(features, Hq)),
        splits=draw(st.sampled_from([3, 2, 1, 5, 7])) if features.splits else 1,
    )


def drawn(kernel: Kernel, Hk: int = 1, **changes: Any) -> Call:
    """A plain call with two query heads for each KV head."""
    features, _ = kernel
    lengths = changes.pop("lengths", ((150,), (300,)))
    tensors = _tensors(features, 2 * Hk, Hk, lengths, changes.pop("seed", 0), heads_first=False)
    more = {"softcap": 3.0 if features.softcap else 0.0, "rng_state": torch.tensor([5, 7])} | changes
    if features.sinks:
        more["sinks"] = torch.linspace(-1.0, 2.0, 2 * Hk).to(getattr(torch, features.sinks))
    return Call(*tensors, lengths, features.D**-0.5, **more)


def _tensors(
    features: Features, Hq: int, Hk: int, lengths: tuple[Any, ...], seed: int, heads_first: bool
) -> Iterator[Tensor]:
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(seed)
    D, Dv = features.D, features.Dv
    for which, H, columns in ((0, Hq, D), (1, Hk, D), (1, Hk, Dv), (0, Hq, Dv)):
        sizes = lengths[which]
        shape = (sum(sizes), H, columns) if features.varlen else (len(sizes), sizes[0], H, columns)
        order = [*shape[:-3], shape[-2], shape[-3], shape[-1]] if heads_first else shape
        x = torch.randn(order, generator=generator).to(getattr(torch, features.dtype))
        yield x.transpose(-3, -2) if heads_first else x


@st.composite
def masks(draw: st.DrawFn, full: tuple[int, int, int, int], dtype: str) -> Tensor:
    """A mask of which any dimension may broadcast; stretches of it are masked, visible or mixed."""
    shape = [draw(st.sampled_from([1, n])) for n in full]
    along = draw(st.sampled_from([2, 3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    stretches = [-(-n // 70) if i == along else n for i, n in enumerate(shape)]
    kind = torch.randint(0, 3, stretches, generator=generator).repeat_interleave(70, along)
    kind = kind.narrow(along, 0, shape[along])
    seen = (kind == 2) | ((kind == 1) & (torch.rand(shape, generator=generator) < 0.7))
    if dtype == "bool":
        return seen
    bias = torch.where(kind == 2, 0.0, torch.randn(shape, generator=generator))
    return bias.masked_fill(~seen, -math.inf).to(getattr(torch, dtype))


@st.composite
def sinks(draw: st.DrawFn, features: Features, Hq: int) -> Tensor | None:
    """The sinks of a kernel that takes some: near the scores, far from them, or none of a head."""
    if not features.sinks:
        return None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = draw(st.sampled_from([1.0, 30.0])) * torch.randn(Hq, generator=generator)
    if draw(st.booleans()):
        values[0] = -math.inf
    return values.to(getattr(torch, features.sinks))


def results(features: Features, call: Call, dtype: torch.dtype) -> Results:
    """Results by definition, in `dtype`; a floating mask is taken as it is."""
    found = [
        attention(q, k, v, _scoring(features, call, b, call.mask), _sinks(call, dtype))
        for b, (q, k, v, _) in enumerate(_sequences(features, call, *_in(dtype, call)))
    ]
    if not features.varlen:
        return Results(*found[0])
    return Results(torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1))


def gradients(features: Features, call: Call, dtype: torch.dtype) -> Gradients:
    """Gradients by definition, in `dtype`."""
    *inputs, given = _in(dtype, call)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    mask = call.mask
    if features.dmask:
        mask = call.mask.detach().clone().to(dtype).requires_grad_()
    total = leaves[0].new_zeros(())
    for b, (q, k, v, dout) in enumerate(_sequences(features, call, *leaves, given)):
        if q.numel() and k.numel():
            out, _ = attention(q, k, v, _scoring(features, call, b, mask))
            total = total + (out * dout).sum()
    wanted = [*leaves, *([mask] if features.dmask else [])]
    if not total.requires_grad:  # no sequence has both queries and keys
        return Gradients(*map(torch.zeros_like, wanted))
    found = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    return Gradients(*found)


def check_results(kernel: Kernel, call: Call, found: Results) -> None:
    exact, peer = results(kernel[0], call, torch.float64), results(kernel[0], *of_peer(kernel[0], call))
    for name, result, truth, plain in zip(Results._fields, found, exact, peer, strict=True):
        testing.assert_close_as_peer(result, truth, plain, what=name)


def check_gradients(kernel: Kernel, call: Call, found: Gradients) -> None:
    exact, peer = gradients(kernel[0], call, torch.float64), gradients(kernel[0], *of_peer(kernel[0], call))
    for name, result, truth, plain in zip(Gradients._fields, found, exact, peer, strict=True):
        if result is not None:
            more = noise_of_sums(kernel[0], call) if name == "dmask" else noise(kernel[0], call)
            testing.assert_close_as_peer(result.to(plain.dtype), truth, plain, what=name, noise=more)


def of_peer(features: Features, call: Call) -> tuple[Call, torch.dtype]:
    """The call whose results are a peer's, in which dtype: in TF32 the tensors are rounded to it."""
    if features.tf32:
        names = ("q", "k", "v", "dout")
        call = replace(call, **{name: in_tf32(getattr(call, name)) for name in names})
    return call, call.q.dtype


def in_tf32(x: Tensor) -> Tensor:
    """Float32 numbers, rounded to ten bits after the point."""
    bits = x.detach().clone().view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def noise(features: Features, call: Call) -> float:
    """The error of gradients of q and k where those of scores are 0."""
    largest = max(call.q.abs().max().item(), call.k.abs().max().item())
    return noise_of_scores(features, call) * abs(call.scale) * largest


def noise_of_scores(features: Features, call: Call) -> float:
    """The error of dP - delta where both are equal, as for a row with one key: each is rounded to float32,
    and in TF32 what makes dP to that.

    Sums are over rows.
    """
    rows, heads = call.dout.shape[-3], call.dout.shape[-2]
    values = call.v.repeat_interleave(heads // call.v.shape[-2], -2)
    terms = (call.dout.abs().double().amax((-3, -2)) * values.abs().double().amax((-3, -2))).sum(-1).max()
    last_place = 2.0**-11 if features.tf32 else 4 * torch.finfo(torch.float32).eps
    return last_place * terms.item() / (1.0 - call.p) * rows**0.5


def noise_of_sums(features: Features, call: Call) -> float:
    """The error of a broadcast mask's gradient: weights are rounded, and what is made of them may sum to 0.

    It is three and a half times the deviation of numbers that are each off by up to half an ulp.
    """
    full = (call.q.shape[0], call.q.shape[2], call.q.shape[1], call.k.shape[1])
    each = gradients(features, replace(call, mask=call.mask.expand(full).clone()), torch.float64).dmask
    summed = [i for i, n in enumerate(call.mask.shape) if n == 1]
    of_sum = each.square().sum(summed).sqrt().max().item() if summed else 0.0
    return noise_of_scores(features, call) + torch.finfo(call.q.dtype).eps * of_sum


class Alone(NamedTuple):
    """A packed sequence whose neighbours are spoiled."""

    call: Call
    rows: slice
    keys: slice


def each_alone(call: Call, poison: float) -> Iterator[Alone]:
    """Each sequence of a packed call, with `poison` in all others."""
    ends = [list(pairwise([0, *torch.tensor(n).cumsum(0).tolist()])) for n in call.lengths]
    for rows, keys in zip(*(map(lambda end: slice(*end), each) for each in ends), strict=True):
        spoiled = {}
        for mine, names in ((rows, ("q", "dout")), (keys, ("k", "v"))):
            for name in names:
                x = getattr(call, name)
                spoiled[name] = torch.full_like(x, poison)
                spoiled[name][mine] = x[mine]
        yield Alone(replace(call, **spoiled), rows, keys)


def blind(kernel: Kernel) -> Call:
    """A call in which no row sees a key: by its band or mask, or as no sequence has both queries and keys."""
    features, _ = kernel
    call = drawn(kernel, right=-400, left=-400)
    if features.mask:
        dtype = getattr(torch, features.mask)
        hidden = torch.zeros(()) if features.mask == "bool" else torch.tensor(-math.inf)
        return replace(call, mask=hidden.to(dtype).expand(1, 1, 150, 300).contiguous())
    if features.varlen and not (features.left or features.right):
        return drawn(kernel, lengths=((150, 0), (0, 300)))
    return call


def _sinks(call: Call, dtype: torch.dtype) -> Tensor | None:
    return None if call.sinks is None else call.sinks.to(dtype)


def _in(dtype: torch.dtype, call: Call) -> list[Tensor]:
    return [x.to(dtype) for x in (call.q, call.k, call.v, call.dout)]


def _sequences(features: Features, call: Call, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """q, k, v and dout of each sequence, as batches of one."""
    if not features.varlen:
        return iter([tensors])
    parts = [x.split(call.lengths[which]) for x, which in zip(tensors, (0, 1, 1, 0), strict=True)]
    return (tuple(x[None] for x in found) for found in zip(*parts, strict=True))


def _scoring(features: Features, call: Call, b: int, mask: Tensor | None) -> Scoring:
    band = Band(call.left if features.left else None, call.right if features.right else None)
    dropout = Dropout(call.rng_state, call.p, b) if features.dropout else None
    return Scoring(call.scale, band, call.softcap, mask, dropout)
