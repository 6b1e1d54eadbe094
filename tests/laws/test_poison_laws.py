"""A poisoned token, one with NaN or an infinity, poisons all that attends to it, on every backend.

The float64 reference, given for each row only the keys that it may attend to, defines what must be poisoned.
Slightly more may be: a tile multiplies weights of 0 with masked tokens, and 0 times NaN is NaN. So poison may
reach masked tokens of the same batch entry and KV head, and nothing else. A poisoned query reaches no other
query.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from everything import EVERYTHING, one_of
from flash4_torch import env, testing
from flash4_torch.backends import cpu

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Served:
    """A backend, and the calls that hypothesis generates for it."""

    environment: dict[str, str]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    head_sizes: tuple[int, ...] = (1, 8, 20)
    longest: int = 40
    shapes: tuple[str, ...] = ("full", "causal", "mask", "window", "packed", "packed causal")
    """Kinds of calls, each with its rule for the keys that a query sees."""


BACKENDS = {
    "cpu": Served({"FLASH4_BACKEND": "cpu"}),
    "tiled": Served({"FLASH4_BACKEND": "tiled"}),
}
BY_MMA_SYNC = ("sm_80", "sm_86")
"""GPUs of one family of kernels, whose tiles differ by the size of SMEM."""
KERNELS = {
    arch: Served(
        {"FLASH4_BACKEND": "emulator", "FLASH4_ARCH": arch},
        dtypes=(torch.bfloat16, torch.float32) if EVERYTHING and arch in BY_MMA_SYNC else (torch.bfloat16,),
        head_sizes=(64,),
        shapes=("full", "causal", "mask", "window") if EVERYTHING else ("full",),
    )
    for arch in ("sm_90a", "sm_100a", *one_of(2, BY_MMA_SYNC))
}
# CI runs Blackwell's, whose exp2 is partly a polynomial.
EACH_ARCH = pytest.mark.parametrize(
    "arch", one_of(len(KERNELS), ["sm_100a", *(arch for arch in KERNELS if arch != "sm_100a")])
)


@dataclass(frozen=True)
class Poisoned:
    """q, k and v, one of which has a poisoned token, and the keys that each query sees: (Sq, Sk)."""

    tensors: dict[str, Tensor]
    visible: Tensor
    kwargs: dict[str, Any]
    is_packed: bool
    where: str
    batch: int
    token: int
    head: int
    environment: dict[str, str]

    @property
    def group(self) -> int:
        return self.tensors["q"].shape[2] // self.tensors["k"].shape[2]


@st.composite
def poisoned(draw: st.DrawFn, served: Served) -> Poisoned:
    shape = draw(st.sampled_from(served.shapes))
    dtype, D = draw(st.sampled_from(served.dtypes)), draw(st.sampled_from(served.head_sizes))
    length = st.one_of(st.integers(1, 9), st.integers(10, served.longest))
    Sq, Sk = draw(length), draw(length)
    B, Hk, group = (draw(st.integers(1, 2)) for _ in range(3))
    torch.manual_seed(draw(st.integers(0, 99)))
    sizes = {"q": (B, Sq, Hk * group, D), "k": (B, Sk, Hk, D), "v": (B, Sk, Hk, D)}
    tensors = {name: torch.randn(size, dtype=torch.float64).to(dtype) for name, size in sizes.items()}

    where = draw(st.sampled_from("qkv"))
    at = [draw(st.integers(0, n - 1)) for n in sizes[where][:3]]
    width = draw(st.sampled_from((1, D)))
    value = draw(st.sampled_from((torch.nan, torch.inf, -torch.inf)))
    tensors[where][(*at, slice(0, width))] = value

    distance = torch.arange(Sk) - torch.arange(Sq)[:, None] - (Sk - Sq)
    visible, kwargs = torch.ones(Sq, Sk, dtype=torch.bool), {}
    if "causal" in shape:
        visible, kwargs = distance <= 0, {"causal": True}
    elif shape == "window":
        left, right = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        visible, kwargs = (distance >= -left) & (distance <= right), {"window": (left, right)}
    elif shape == "mask":
        visible = torch.rand(Sq, Sk) < draw(st.sampled_from((0.2, 0.7)))
        kwargs = {"attn_mask": visible}
    return Poisoned(tensors, visible, kwargs, "packed" in shape, where, *at, served.environment)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = env.change(values)
    try:
        yield
    finally:
        env.change(before)


def served(call: Poisoned, dout: Tensor) -> dict[str, Tensor]:
    """The backend's results, gradients included."""
    leaves = [x.clone().requires_grad_() for x in call.tensors.values()]
    with environment(call.environment):
        if call.is_packed:
            B, Sq, Sk = leaves[0].shape[0], leaves[0].shape[1], leaves[1].shape[1]
            out, lse = flash4_torch.attention_varlen(
                *(x.flatten(0, 1) for x in leaves),
                cu_seqlens_q=torch.arange(0, B * Sq + 1, Sq),
                cu_seqlens_k=torch.arange(0, B * Sk + 1, Sk),
                max_seqlen_q=Sq,
                max_seqlen_k=Sk,
                return_lse=True,
                **call.kwargs,
            )
            out, lse = out.unflatten(0, (B, Sq)), lse.unflatten(1, (B, Sq)).transpose(0, 1)
        else:
            out, lse = flash4_torch.attention(*leaves, return_lse=True, **call.kwargs)
        gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return dict(zip(NAMES, (out, lse, *gradients), strict=True))


def exact(call: Poisoned, dout: Tensor) -> dict[str, Tensor]:
    """The definition's results in float64, with no row given a key that it may not attend to."""
    q, k, v = leaves = [x.double().requires_grad_() for x in call.tensors.values()]
    out = torch.zeros(*q.shape, dtype=torch.float64, requires_grad=True)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64)
    for seen in call.visible.unique(dim=0):
        rows = (call.visible == seen).all(1).nonzero()[:, 0]
        if seen.any():
            part, part_lse = testing.reference(q[:, rows], k[:, seen], v[:, seen])
            out = out.index_copy(1, rows, part)
            lse = lse.index_copy(2, rows, part_lse)
    gradients = torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)
    return dict(zip(NAMES, (out, lse, *gradients), strict=True))


def within_reach(call: Poisoned, name: str, like: Tensor) -> Tensor:
    """A bool tensor shaped like the result of that name: the most that may be poisoned."""
    reach = torch.zeros_like(like, dtype=torch.bool)
    if name in ("dk", "dv"):
        reach[call.batch, :, call.head // call.group if call.where == "q" else call.head] = True
        return reach
    tokens_and_heads = reach.transpose(1, 2) if name == "lse" else reach
    if call.where == "q":
        tokens_and_heads[call.batch, call.token, call.head] = True
    else:
        first = call.head * call.group
        tokens_and_heads[call.batch, :, first : first + call.group] = True
    return reach


def assert_poison_spreads_as_it_must(call: Poisoned) -> None:
    dout = torch.randn(call.tensors["q"].shape, dtype=torch.float64)
    actual, expected = served(call, dout), exact(call, dout)
    for name in NAMES:
        is_poisoned, must_be = ~actual[name].isfinite(), ~expected[name].isfinite()
        if name == "lse":
            # A row without keys has an lse of -inf.
            is_poisoned &= actual[name] != -torch.inf
            must_be &= expected[name] != -torch.inf
        missed, leaked = must_be & ~is_poisoned, is_poisoned & ~within_reach(call, name, is_poisoned)
        assert not missed.any(), f"{name} is not poisoned at {missed.nonzero()[:4].tolist()}"
        assert not leaked.any(), f"{name} is poisoned at {leaked.nonzero()[:4].tolist()}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_poison_reaches_what_attends_to_it(backend: str) -> None:
    @given(poisoned(BACKENDS[backend]))
    @settings(max_examples=5000 if EVERYTHING else 100)
    def law(call: Poisoned) -> None:
        with environment(call.environment):
            why = flash4_torch.support(*call.tensors.values(), **call.kwargs)[backend]
        assume(call.is_packed or not why)
        assert_poison_spreads_as_it_must(call)

    law()


@EACH_ARCH
def test_poison_reaches_what_attends_to_it_in_kernels(arch: str) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

    @given(poisoned(KERNELS[arch]))
    @settings(max_examples=200 if EVERYTHING else 3)
    def law(call: Poisoned) -> None:
        assert_poison_spreads_as_it_must(call)

    law()


@EACH_ARCH
def test_every_column_of_a_block_carries_poison(arch: str) -> None:
    """Columns whose exp2 is the polynomial do so, too, though it would take NaN for a masked key."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    q, k, v = (torch.rand(1, S, 1, 64).bfloat16() for S in (3, 40, 40))
    with environment(KERNELS[arch].environment):
        for value, columns in ((torch.nan, range(40)), (torch.inf, range(26, 32))):
            for j in columns:
                spoiled = k.clone()
                spoiled[:, j] = value
                out, lse = flash4_torch.attention(q, spoiled, v, return_lse=True)
                assert out.isnan().all() and not lse.isfinite().any(), f"{value} at key {j}"


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("Sk", [1, 5, 16, 33])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_poisoned_mask_poisons_its_rows(
    monkeypatch: pytest.MonkeyPatch, backend: str, Sk: int, value: float
) -> None:
    monkeypatch.setenv("FLASH4_BACKEND", backend)
    q, k = torch.randn(1, 7, 2, 8), torch.randn(1, Sk, 2, 8)
    mask = torch.randn(7, Sk)
    mask[2, Sk // 2] = mask[5, 0] = value
    out, lse = flash4_torch.attention(q, k, k, attn_mask=mask, return_lse=True)
    rows = torch.tensor([False, False, True, False, False, True, False])
    assert torch.equal(out.isnan().all(-1), rows[None, :, None].expand(1, 7, 2))
    assert torch.equal(~lse.isfinite(), rows.expand(1, 2, 7))


@pytest.mark.parametrize("Sk", [1, 5, 16, 33])
def test_scores_that_overflow_are_poison(monkeypatch: pytest.MonkeyPatch, Sk: int) -> None:
    q, k, v = torch.randn(1, 7, 2, 8), torch.randn(1, Sk, 2, 8), torch.randn(1, Sk, 2, 8)
    # The first two terms of each score are both beyond float32, and they have opposite signs.
    q[0, 3], k[..., :2] = 1e30, torch.tensor([1e30, -1e30])
    poisoned = []
    for backend in ("cpu", "tiled"):
        monkeypatch.setenv("FLASH4_BACKEND", backend)
        out, lse = flash4_torch.attention(q, k, v, return_lse=True)
        assert out[0, 3].isnan().all() and not lse[0, :, 3].isfinite().any()
        poisoned.append(~out.isfinite())
    assert torch.equal(*poisoned)


def test_rows_whose_lse_is_rightly_0_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal rows of zeros have an lse of 0: padding, or model weights that are initialised to zero."""
    x = torch.randn(1, 4, 2, 8)
    x[0, 0] = 0.0
    expected, _ = testing.reference(x, x, x, causal=True)
    monkeypatch.setattr(cpu, "Tiled", None)
    out, lse = flash4_torch.attention(x, x, x, causal=True, return_lse=True)
    assert (lse[..., 0] == 0).all()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@given(st.data(), st.sampled_from([torch.float32, torch.float64]), st.sampled_from([1, 5, 64, 8192, 8193]))
def test_one_odd_lse_is_found_wherever_it_is(data: st.DataObject, dtype: torch.dtype, count: int) -> None:
    ordinary = st.floats(1e-30, 1e30) | st.floats(-1e30, -1e-30)
    numbers = torch.tensor(data.draw(st.lists(ordinary, min_size=4, max_size=4)), dtype=dtype)
    lse = numbers.repeat(count)[:count].contiguous()
    assert not cpu._is_odd(lse)
    place = data.draw(st.sampled_from([0, count - 1]) | st.integers(0, count - 1))
    lse[place] = data.draw(st.sampled_from([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan]))
    assert cpu._is_odd(lse)
