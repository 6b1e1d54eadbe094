"""The Hopper forward kernel in the emulator, with its race checks: every switch, against exact results."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch import testing
from flash4_torch.compile import jit
from flash4_torch.configs.types import Features, Sm90Forward
from flash4_torch.emulator.host import Launch
from flash4_torch.kernels.common.mask_tables import MaskPlan, place
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention
from flash4_torch.reference.dropout import Dropout, thresholds
from flash4_torch.reference.scoring import Scoring
from sm90_kernels import Kernel, covering

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.kernels.shared.mask_blocks import compile_mask_blocks
from flash4_torch.kernels.sm90.fwd.launch import compile_forward
from flash4_torch.testing import emulate


def static(D: int, Dv: int, tiles: tuple[int, int, int, int], dtype: str = "bfloat16", **more: Any) -> Kernel:
    of_config = {name: more.pop(name) for name in tuple(more) if name in Sm90Forward._fields}
    return Features(dtype, D, Dv, **more), Sm90Forward(*tiles, **of_config)


CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
# (warpgroups, keys, K and V stages, Q stages)
STATICS = {
    "one warpgroup": static(64, 64, (1, 128, 4, 2)),
    "no tail": static(64, 64, (2, 64, 2, 2), "float16", tail=False, **CAUSAL),
    "four warpgroups": static(64, 64, (4, 64, 4, 2), "float16", **CAUSAL),
    "next tile": static(64, 64, (4, 64, 4, 2), next_tile=True, conditional=True, wait=2, **CAUSAL),
    "turns": static(64, 64, (3, 112, 3, 2), pingpong=True, wait=1, **WINDOW),
    "turns, half": static(64, 64, (3, 128, 3, 2), pingpong=True, half=True, **CAUSAL),
    "turns, next tile": static(
        128, 128, (2, 128, 2, 2), "float16", pingpong=True, next_tile=True, k_ahead=True
    ),
    "half": static(96, 96, (2, 128, 3, 2), "float16", k_ahead=True, half=True, **CAUSAL),
    "narrow": static(128, 128, (3, 80, 2, 2), k_ahead=True, conditional=True, **CAUSAL),
    "polynomial": static(128, 64, (2, 96, 2, 2), polynomial=4, **CAUSAL),
    "wide": static(256, 256, (2, 48, 2, 1), k_ahead=True, conditional=True, **CAUSAL),
    "O over Q": static(256, 256, (2, 80, 2, 1), k_ahead=True, conditional=True, o_over_q=True, **CAUSAL),
    "O over one of two Q": static(192, 64, (2, 96, 2, 2), o_over_q=True, **CAUSAL),
    "O over Q, next tile": static(64, 64, (4, 64, 4, 2), next_tile=True, o_over_q=True, **CAUSAL),
    "few columns": static(8, 24, (1, 80, 2, 2), "float16", **CAUSAL),
    "left only": static(40, 136, (2, 80, 2, 2), left=True),
    "packed": static(64, 64, (2, 128, 2, 2), pack=4, **CAUSAL),
    "packed, one row": static(64, 64, (1, 128, 4, 2), "float16", pack=64, **CAUSAL),
    "pair": static(64, 64, (3, 128, 3, 2), pingpong=True, k_ahead=True, half=True, cluster=2, **CAUSAL),
    "pair, full": static(128, 128, (3, 80, 2, 2), "float16", k_ahead=True, conditional=True, cluster=2),
    "pair, many passed": static(128, 128, (3, 80, 2, 2), k_ahead=True, conditional=True, cluster=2, **CAUSAL),
    "pair, window": static(96, 80, (2, 48, 2, 2), "float16", pingpong=True, cluster=2, **WINDOW),
    "pair, next tile": static(
        128, 128, (2, 128, 2, 2), pingpong=True, next_tile=True, k_ahead=True, cluster=2, **CAUSAL
    ),
    "pair, O over Q": static(
        256, 256, (2, 64, 2, 1), pingpong=True, k_ahead=True, o_over_q=True, cluster=2, **CAUSAL
    ),
    "pair, packed": static(64, 64, (1, 64, 2, 2), k_ahead=True, pack=4, cluster=2, **CAUSAL),
    "softcap": static(64, 64, (2, 128, 2, 2), softcap=True, scaled=True, **WINDOW),
    "scaled": static(96, 40, (2, 80, 2, 2), "float16", scaled=True, next_tile=True, k_ahead=True),
    "bool mask": static(64, 64, (2, 128, 2, 2), mask="bool"),
    "bool mask, dropout": static(64, 64, (2, 96, 2, 2), mask="bool", dropout=True, pingpong=True, **CAUSAL),
    "bfloat16 mask": static(128, 128, (2, 80, 2, 2), mask="bfloat16", scaled=True, k_ahead=True, **WINDOW),
    "float16 mask": static(64, 64, (1, 64, 2, 2), "float16", mask="float16", scaled=True),
    "float32 mask": static(
        64, 64, (2, 64, 2, 2), mask="float32", softcap=True, scaled=True, dropout=True, **CAUSAL
    ),
    "dropout": static(64, 64, (2, 128, 2, 2), "float16", dropout=True, next_tile=True, k_ahead=True),
    "dropout, wide": static(
        256, 256, (2, 64, 2, 1), dropout=True, k_ahead=True, conditional=True, o_over_q=True, **CAUSAL
    ),
    "varlen": static(64, 64, (2, 128, 2, 2), varlen=True, k_ahead=True, **CAUSAL),
    "varlen, packed": static(64, 64, (1, 128, 2, 2), "float16", varlen=True, pack=2),
    "varlen, next tile": static(64, 64, (4, 64, 4, 2), varlen=True, next_tile=True, conditional=True),
    "varlen, next tile, causal": static(
        128, 128, (2, 128, 2, 2), varlen=True, pingpong=True, next_tile=True, k_ahead=True, **CAUSAL
    ),
    "varlen, everything": static(
        128, 64, (2, 80, 2, 2), varlen=True, softcap=True, scaled=True, dropout=True, **WINDOW
    ),
    "varlen, O over Q": static(192, 192, (2, 80, 2, 1), varlen=True, o_over_q=True, k_ahead=True, **CAUSAL),
}
STATICS |= covering(STATICS.values())


@dataclass(repr=False)
class Call:
    """One launch; `lengths` are those of the sequences' queries and keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    scale: float
    softcap: float
    left: int
    right: int
    section: int
    multiprocessors: int
    mask: Tensor | None
    p: float
    rng_state: Tensor

    def __repr__(self) -> str:
        tensors = {"q": self.q, "k": self.k, "v": self.v, "mask": self.mask}
        shapes = {name: (tuple(x.shape), x.stride()) for name, x in tensors.items() if x is not None}
        names = ("lengths", "scale", "softcap", "left", "right", "section", "multiprocessors", "p")
        values = {name: getattr(self, name) for name in names}
        return f"Call({shapes} {values})"


LENGTHS = st.one_of(
    st.sampled_from([1, 2, 63, 64, 65, 80, 127, 128, 129, 192, 256, 257]), st.integers(1, 300)
)
SHORT = st.integers(1, 20)


@st.composite
def calls(draw: st.DrawFn, features: Features, config: Sm90Forward) -> Call:
    """What the host may ask of such a kernel."""
    Hk = draw(st.integers(1, 2))
    Hq = Hk * draw(st.integers(1, 5 if config.pack > 1 else 2))
    length = SHORT if config.pack > 1 else LENGTHS
    if features.varlen:
        B = draw(st.integers(1, 3))
        empty = st.sampled_from([0, 0, 1])
        lengths = tuple(tuple(draw(st.one_of(empty, length)) for _ in range(B)) for _ in range(2))
        lengths = tuple(n if any(n) else (5,) * B for n in lengths)
        Sq, Sk = max(lengths[0]), max(lengths[1])
    else:
        B, Sq, Sk = draw(st.integers(1, 2)), draw(length), draw(LENGTHS)
        Sk = Sk if config.tail else -(-Sk // config.keys) * config.keys
        lengths = ((Sq,) * B, (Sk,) * B)
    right = draw(st.sampled_from([0, 0, draw(st.integers(-200, 200))]))
    if features.varlen and not config.tail:
        right = min(right, 0)  # which hides all that follows the last key
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
        lengths,
        scale=draw(st.sampled_from(scales)),
        softcap=draw(st.sampled_from([1.0, 7.5])) if features.softcap else 0.0,
        left=draw(st.integers(-200, 200)) if features.left else 0,
        right=right if features.right else 0,
        section=draw(st.integers(1, 5)),
        multiprocessors=draw(st.integers(1, 4)),
        mask=draw(masks((B, Hq, Sq, Sk), features.mask)) if features.mask else None,
        p=draw(st.sampled_from([0.1, 0.5, 0.8])) if features.dropout else 0.0,
        rng_state=torch.tensor([draw(st.integers(0, 1 << 40)), draw(st.integers(0, 99))]),
    )


@st.composite
def masks(draw: st.DrawFn, full: tuple[int, int, int, int], dtype: str) -> Tensor:
    """Any dimension may broadcast; whole stretches of keys are hidden, others visible, others mixed."""
    shape = [draw(st.sampled_from([1, n])) for n in full[:3]] + [full[3]]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    stretch = torch.randint(0, 3, (*shape[:3], -(-shape[3] // 70)), generator=generator)
    kind = stretch.repeat_interleave(70, 3)[..., : shape[3]]
    seen = (kind == 2) | ((kind == 1) & (torch.rand(shape, generator=generator) < 0.7))
    if dtype == "bool":
        return seen
    bias = torch.where(kind == 2, 0.0, torch.randn(shape, generator=generator))
    return bias.masked_fill(~seen, -math.inf).to(getattr(torch, dtype))


@functools.cache
def compiled(features: Features, config: Sm90Forward) -> Any:
    with jit.quiet():
        return compile_forward(features, config)


compiled_tables = functools.cache(compile_mask_blocks)


def run(features: Features, config: Sm90Forward, call: Call, **schedule: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of a launch into memory full of NaN; raises for whatever the emulator finds wrong."""
    heads = call.q.shape[-2]
    out = torch.full((*call.q.shape[:-1], features.Dv), math.nan, dtype=call.q.dtype)
    lse = torch.full((*call.q.shape[:-3], heads, call.q.shape[-3]), math.nan)
    tickets = torch.zeros(1, dtype=torch.int32)
    ends = [None, None]
    if features.varlen:
        ends = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in call.lengths]
    rng_state = call.rng_state if features.dropout else None
    byte, fraction = thresholds(call.p)
    rule = (
        call.scale,
        call.softcap,
        call.left,
        call.right,
        max(call.lengths[0]),
        call.section,
        call.multiprocessors,
        byte,
        fraction,
        1.0 / (1.0 - call.p),
    )
    with (
        _shared_memory_of_launches() as asked,
        emulate.device("sm_90a", multiprocessors=call.multiprocessors, **schedule) as device,
    ):
        mask = _mask_args(features, config, call, device)
        tensors = (call.q, call.k, call.v, out, lse, tickets, *ends, *(mask or ()), rng_state)
        with device.touching(*(x for x in tensors if x is not None)):
            compiled(features, config)(
                call.q, call.k, call.v, out, lse, tickets, *ends, mask, rng_state, rule
            )
    assert tickets.item() == 0
    assert asked[-1] <= config.shared_memory(features), "the tables allow for less"
    return out, lse


@contextmanager
def _shared_memory_of_launches() -> Iterator[list[int]]:
    """Bytes that each launch asks for."""
    launch = emulate.Device.launch
    asked: list[int] = []

    def noted(device: emulate.Device, what: Launch) -> None:
        asked.append(what.smem_bytes)
        launch(device, what)

    with mock.patch.object(emulate.Device, "launch", noted):
        yield asked


def _mask_args(
    features: Features, config: Sm90Forward, call: Call, device: emulate.Device
) -> tuple[Tensor, Tensor] | None:
    if call.mask is None:
        return None
    plan = MaskPlan(features.mask, config.queries, config.keys, config.pack)
    tables = torch.full((place(plan, *call.mask.shape).words,), -7, dtype=torch.int32)
    with device.touching(call.mask, tables):
        compiled_tables(plan)(call.mask, tables)
    return call.mask, tables


def reference(features: Features, call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out, lse) by definition, in `dtype`."""
    band = Band(call.left if features.left else None, call.right if features.right else None)

    def results(q: Tensor, k: Tensor, v: Tensor, b: int) -> tuple[Tensor, Tensor]:
        dropout = Dropout(call.rng_state, call.p, b) if features.dropout else None
        scoring = Scoring(call.scale, band, call.softcap, call.mask, dropout)
        return attention(q.to(dtype), k.to(dtype), v.to(dtype), scoring)

    if not features.varlen:
        return results(call.q, call.k, call.v, 0)
    q_lengths, k_lengths = call.lengths
    parts = zip(call.q.split(q_lengths), call.k.split(k_lengths), call.v.split(k_lengths), strict=True)
    found = [results(q[None], k[None], v[None], b) for b, (q, k, v) in enumerate(parts)]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


@pytest.mark.parametrize("name", STATICS)
# No shrinking: a launch is slow, and says itself what is wrong.
@settings(max_examples=6, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    """Right, whatever the schedule, and the same bits."""
    features, config = STATICS[name]
    call = data.draw(calls(features, config))
    out, lse = run(features, config, call, schedule="late")
    exact, exact_lse = reference(features, call, torch.float64)
    peer, peer_lse = reference(features, call, call.q.dtype)
    testing.assert_close_as_peer(out, exact, peer, what="out")
    testing.assert_close_as_peer(lse, exact_lse, peer_lse, what="lse")
    schedule, seed = data.draw(st.sampled_from(["eager", "fuzz"])), data.draw(st.integers(0, 9))
    again, lse_again = run(features, config, call, schedule=schedule, seed=seed)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


def drawn(name: str, seed: int = 0, **changes: Any) -> tuple[Features, Sm90Forward, Call]:
    """A plain call of one of the kernels."""
    features, config = STATICS[name]
    torch.manual_seed(seed)
    lengths = changes.pop("lengths", ((150,), (300,)))
    dtype = getattr(torch, features.dtype)

    def tensor(sizes: tuple[int, ...], D: int) -> Tensor:
        shape = (sum(sizes), 2, D) if features.varlen else (len(sizes), sizes[0], 2, D)
        return torch.randn(shape).to(dtype)

    tensors = [tensor(lengths[0], features.D), *(tensor(lengths[1], n) for n in (features.D, features.Dv))]
    state = torch.tensor([5, 7])
    call = Call(*tensors, lengths, features.D**-0.5, 0.0, 0, 0, 2, 2, None, 0.0, state)
    return features, config, replace(call, **changes)


@pytest.mark.parametrize("p", [0.25, 0.7])
def test_dropout_keeps_the_weights_that_the_reference_keeps(p: float) -> None:
    """With one-hot values the weights themselves come out."""
    features, config, call = drawn("dropout", lengths=((130,) * 2, (64,) * 2), p=p)
    call.v[:] = torch.eye(64)[:, None].to(call.v.dtype)
    out, _ = run(features, config, call)
    kept = testing.dropout_mask(call.rng_state, 2, 2, 130, 64, p)
    assert torch.equal(out.transpose(1, 2) != 0, kept)


@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [name for name in STATICS if "pair" in name])
def test_pairs_draw_every_tile_once(name: str, tiles: int) -> None:
    """Odd numbers of tiles leave a CTA without rows; fewer than two multiprocessors still are a cluster."""
    features, config = STATICS[name]
    lengths = ((config.queries * tiles - 7,) * 2, (150,) * 2)
    for multiprocessors, schedule in ((1, "late"), (5, "fuzz")):
        _, _, call = drawn(name, tiles, lengths=lengths, multiprocessors=multiprocessors, right=9)
        out, lse = run(features, config, call, schedule=schedule)
        exact, exact_lse = reference(features, call, torch.float64)
        peer, peer_lse = reference(features, call, call.q.dtype)
        testing.assert_close_as_peer(out, exact, peer, what="out")
        testing.assert_close_as_peer(lse, exact_lse, peer_lse, what="lse")


@pytest.mark.parametrize(
    "name", ["narrow", "turns, half", "turns", "left only", "pair", "bool mask", "varlen"]
)
def test_rows_that_see_nothing_are_zero_whatever_the_values(name: str) -> None:
    features, config, call = drawn(name, right=-400, left=-400)
    if features.mask:
        call = replace(call, mask=torch.zeros(1, 1, 150, 300, dtype=torch.bool))
    call.v.fill_(math.nan)
    out, lse = run(features, config, call)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("name", [name for name in STATICS if "varlen" in name])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_sequences_do_not_see_their_neighbours(name: str, poison: float) -> None:
    lengths = ((40, 70, 9), (50, 101, 33))
    more = {"softcap": 3.0, "left": 60, "right": 20, "p": 0.2} if "everything" in name else {}
    features, config, call = drawn(name, lengths=lengths, **more)
    clean = run(features, config, call)
    for (q0, q1), (k0, k1) in zip(*(pairwise([0, *torch.tensor(n).cumsum(0)]) for n in lengths), strict=True):
        others = torch.ones(len(call.k), dtype=torch.bool)
        others[k0:k1] = False
        k, v = (x.masked_fill(others[:, None, None], poison) for x in (call.k, call.v))
        out, lse = run(features, config, replace(call, k=k, v=v))
        assert torch.equal(out[q0:q1], clean[0][q0:q1]) and torch.equal(lse[:, q0:q1], clean[1][:, q0:q1])


def test_a_wrong_launch_is_found() -> None:
    """The checks that the other tests rely on: memory beyond the tensors is not to be touched."""
    features, config, call = drawn("one warpgroup")
    out, lse = torch.empty(1, 150, 2, 64, dtype=torch.bfloat16), torch.empty(1, 2, 150)
    tickets = torch.zeros(1, dtype=torch.int32)
    rule = (0.1, 0.0, 0, 0, 150, 1, 1, 0, 0, 1.0)
    with emulate.device("sm_90a") as device, device.touching(call.q, call.k, call.v, out, tickets):
        function = compiled(features, config)
        with pytest.raises(emulate.EmulationError, match="out-of-bounds"):
            function(call.q, call.k, call.v, out, lse, tickets, None, None, None, None, rule)
