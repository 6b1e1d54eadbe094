"""Masks and softcaps of any finite size: results and gradients stay as right as those of plain torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from everything import EVERYTHING, one_of
from flash4_torch import fast_path, testing

ARCHS = ("sm_90a", "sm_100a")
HAS_COMPILER = importlib.util.find_spec("cutlass") is not None
COMPILED = [
    pytest.param(arch, marks=pytest.mark.skipif(not HAS_COMPILER, reason="no nvidia-cutlass-dsl"))
    for arch in ARCHS
]
OF_MASKS = one_of(2, COMPILED[::-1])
LOWEST = torch.finfo(torch.float32).min
SIZES = (1e2, 1e4, 1e6, 1e9, 1e20, 3e38, -LOWEST)
Grads = tuple[Tensor, ...]


@contextmanager
def served_by(server: str) -> Iterator[None]:
    """Selects a backend by its name, or the compiled kernels in the emulator by their architecture's name."""
    with mock.patch.dict("os.environ", {"FLASH4_BACKEND": "emulator" if server in ARCHS else server}):
        if server not in ARCHS:
            yield
            return
        from flash4_torch.testing import emulate

        with emulate.device(server, num_sms=2, races=False):
            yield


def dtype_of(server: str) -> torch.dtype:
    return torch.bfloat16 if server in ARCHS else torch.float32


def by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Torch's math path: scores in the dtype that q, k and mask promote to, weights rounded to v's dtype."""
    wide = torch.promote_types(q.dtype, mask.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q.to(wide) @ k.to(wide).transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).tril().logical_not(), -torch.inf)
    out = torch.softmax(scores, -1).to(v.dtype) @ v
    return out.transpose(1, 2), torch.logsumexp(scores, -1)


def results_and_gradients(function: Any, inputs: list[Tensor], dout: Tensor) -> tuple[list[Tensor], Grads]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    return [out.detach(), lse.detach()], torch.autograd.grad(out, leaves, dout.to(out.dtype))


@dataclass(repr=False)
class Call:
    inputs: list[Tensor]
    dout: Tensor
    mask: Tensor
    causal: bool

    def __repr__(self) -> str:
        return f"Call(k {tuple(self.inputs[1].shape)}, {self.mask=}, {self.causal=})"


@st.composite
def masked_calls(draw: st.DrawFn, may_be_causal: bool) -> Call:
    """Calls whose mask has rows with one large number for all keys or for some, or with two such numbers."""
    causal = may_be_causal and draw(st.booleans())
    Sq = draw(st.integers(2, 12))
    Sk = Sq if causal else draw(st.sampled_from([1, 2, 40, 130]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    q, k, v, dout = (torch.randn(1, S, 2, 64, generator=generator) for S in (Sq, Sk, Sk, Sq))
    mask = torch.randn(1, 1, Sq, Sk, generator=generator)
    large = st.sampled_from(SIZES).flatmap(lambda n: st.sampled_from([-n, -n, n]))
    for i in draw(st.lists(st.integers(0, Sq - 1), min_size=1, max_size=4)):
        keys = draw(st.sampled_from([slice(None), slice(Sk // 2, None)]))
        mask[..., i, keys] = draw(large)
        sees_others = Sk > 1 and not (causal and i < Sk // 2)
        if Sk > 1 and draw(st.booleans()):
            mask[..., i, : Sk // 2] = draw(st.one_of(large, st.just(-torch.inf)) if sees_others else large)
    if draw(st.booleans()):
        mask[..., 0] = LOWEST  # left padding
    return Call([q, k, v], dout, mask, causal)


def noise(inputs: list[Tensor], dout: Tensor) -> float:
    """The float32 rounding error of dP - delta where both are equal, as for a row that sees one key."""
    q, k, v = (x.abs().double() for x in inputs)
    terms = (dout.abs().double().amax((1, 2)) * v.amax((1, 2))).sum(-1).max()
    of_sum = terms * max(q.max(), k.max()) * (dout.shape[1] / q.shape[-1]) ** 0.5
    return 4 * torch.finfo(torch.float32).eps * of_sum.item()


def check_masked(server: str, call: Call) -> None:
    dtype, mask, causal = dtype_of(server), call.mask, call.causal
    inputs, dout = [x.to(dtype) for x in call.inputs], call.dout.to(dtype)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kwargs = {"attn_mask": mask, "causal": causal, "deterministic": False}
        return flash4_torch.attention(q, k, v, **kwargs, return_lse=True)

    with served_by(server), testing.poisoned_memory():
        results, grads = results_and_gradients(ours, inputs, dout)
    exact_results, exact = results_and_gradients(
        lambda *x: by_definition(*x, mask.double(), causal), [x.double() for x in inputs], dout.double()
    )
    peer_results, peer = results_and_gradients(lambda *x: by_definition(*x, mask, causal), inputs, dout)
    for i in range(mask.shape[2]):
        # Row by row: a bound for a row of 1e38 would let anything pass in the others.
        rows = ((slice(None), i), (..., i))
        for name, at, *found in zip(("out", "lse"), rows, results, exact_results, peer_results, strict=True):
            testing.assert_close_as_peer(*(x[at] for x in found), what=f"{name} of row {i}")
    for name, *gradients in zip(("dq", "dk", "dv"), grads, exact, peer, strict=True):
        testing.assert_close_as_peer(*gradients, what=name, noise=noise(inputs, dout))


@pytest.mark.parametrize("server", ["cpu", "tiled"])
@settings(max_examples=20)
@given(call=masked_calls(may_be_causal=True))
def test_finite_masks_of_any_size(server: str, call: Call) -> None:
    check_masked(server, call)


@pytest.mark.parametrize("arch", OF_MASKS)
@pytest.mark.parametrize("hidden", [-torch.inf, LOWEST])
def test_blocks_that_a_float_mask_leaves_alone(arch: str, hidden: float) -> None:
    """Key padding leaves the blocks in front of it full, and those have a softmax of their own."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, S, 1, 64, generator=generator) for S in (150, 400, 400, 150))
    mask = torch.zeros(1, 1, 1, 400)
    mask[..., 370:] = hidden
    check_masked(arch, Call([q, k, v], dout, mask.expand(1, 1, 150, 400), causal=False))


@pytest.mark.parametrize("arch", OF_MASKS)
@settings(max_examples=40 if EVERYTHING else 1)
@given(call=masked_calls(may_be_causal=EVERYTHING))
def test_finite_masks_of_any_size_in_kernels(arch: str, call: Call) -> None:
    check_masked(arch, call)


@pytest.mark.parametrize("form", ["in place", "columns apart", "dout apart", "weights too", "in a graph"])
@pytest.mark.parametrize("size", [100.0, 1e5, 1e9])
def test_later_calls_have_the_gradients_of_the_first(size: float, form: str) -> None:
    """The first ones, by the operators, save the rounding error of lse; the others find it later."""
    fast_path.clear()
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 33, 2, 16) for _ in range(4))
    if form == "columns apart":
        q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v))
    if form == "dout apart":
        dout = dout.transpose(1, 3).contiguous().transpose(1, 3)
    leaves, mask = [x.requires_grad_() for x in (q, k, v)], torch.randn(33, 33) + size
    module = flash4_torch.MultiheadAttention(32, 2, batch_first=True)
    direct, rules = torch.ops.flash4, (None, None, 0.25, None, None, 0.0, 0.0, False)

    def gradients() -> tuple[Tensor, ...]:
        if form == "weights too":
            x, memory = q[:, :20].flatten(2), k.flatten(2)
            out, weights = module(x, memory, memory, attn_mask=mask[:20])
            return torch.autograd.grad(out.sin().sum() + weights.square().sum(), leaves[:2])
        if form == "in a graph":
            tensors = [x.detach() for x in leaves]
            out, lse, low = direct.direct_attention(*tensors, mask[None, None], *rules)
            given = dout, None, *tensors, out, lse, low, mask[None, None]
            return direct.direct_attention_backward(*given, *rules, False)[:3]
        return torch.autograd.grad(flash4_torch.attention(*leaves, attn_mask=mask), leaves, dout)

    first = gradients()
    for _ in range(3):
        for own, expected in zip(gradients(), first, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("size", [100.0, 1e5, 1e9])
def test_lses_rounding_error_is_found_again(size: float, with_sinks: bool) -> None:
    """The backward's operator needs none; what it finds is the forward's."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 33, 2, 16) for _ in range(4))
    mask, sinks = torch.randn(33, 33)[None, None] + size, torch.tensor([0.0, 2.0]) + size
    rules = 0.25, None, None, 0.0, 0.0, False
    scored_by = mask, sinks if with_sinks else None, None
    out, lse, low = torch.ops.flash4.attention(q, k, v, *scored_by, *rules)
    expected, found = (
        torch.ops.flash4.attention_backward(dout, None, q, k, v, out, lse, x, *scored_by, *rules, False)
        for x in (low, None)
    )
    for own, given_low in zip(found, expected, strict=True):
        torch.testing.assert_close(own, given_low, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("server", ["cpu", "tiled", *OF_MASKS])
@pytest.mark.parametrize("number", [-1e9, LOWEST], ids=str)
def test_rows_of_one_large_number_attend_to_all_keys_alike(server: str, number: float) -> None:
    """The same holds in the backward: a value's gradient is a share of dout, not dout."""
    torch.manual_seed(0)
    dtype = dtype_of(server)
    q, k, v = (torch.randn(1, S, 1, 64).to(dtype).requires_grad_() for S in (3, 50, 50))
    mask = torch.full((3, 50), number)
    with served_by(server):
        out, lse = flash4_torch.attention(q, k, v, attn_mask=mask, return_lse=True)
        (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=0.02, atol=1e-3)
    assert (lse == number).all()
    torch.testing.assert_close(dv, torch.full_like(dv, 3 / 50), rtol=0.02, atol=0.0)


CAPS = st.one_of(st.floats(-30, 38.4).map(lambda n: 10.0**n), st.sampled_from([50.0, 64.0, 64.1, 3e38]))
LARGE_CAPS = st.one_of(st.floats(1.9, 38.4).map(lambda n: 10.0**n), st.just(3e38))


@settings(max_examples=20)
@given(softcap=CAPS, size=st.sampled_from([0.1, 1.0, 30.0]))
def test_softcap_of_any_size(softcap: float, size: float) -> None:
    check_capped("tiled", softcap, size)


@pytest.mark.parametrize("arch", COMPILED if EVERYTHING else COMPILED[:1])
@settings(max_examples=40 if EVERYTHING else 1)
@given(softcap=CAPS if EVERYTHING else LARGE_CAPS, size=st.sampled_from([0.1, 1.0, 30.0]))
def test_softcap_of_any_size_in_kernels(arch: str, softcap: float, size: float) -> None:
    check_capped(arch, softcap, size)


def check_capped(server: str, softcap: float, size: float) -> None:
    torch.manual_seed(0)
    dtype = dtype_of(server)
    q, k, v, dout = (torch.randn(1, S, 2, 64).to(dtype) for S in (20, 90, 90, 20))
    q = q * size
    with served_by(server), testing.poisoned_memory():
        found, grads = results_and_gradients(
            lambda *x: flash4_torch.attention(*x, softcap=softcap, deterministic=False, return_lse=True),
            [q, k, v],
            dout,
        )
    exact_results, exact = results_and_gradients(
        lambda *x: testing.reference(*x, softcap=softcap), [q, k, v], dout.double()
    )
    # The peer of lse is float32: our kernels should round a large softcap times tanh as little as it does.
    wide, _ = results_and_gradients(
        lambda *x: testing.reference(*x, softcap=softcap, dtype=torch.float32), [q, k, v], dout.float()
    )
    testing.assert_close_as_peer(found[1], exact_results[1], wide[1], what="lse")
    plain, peer = results_and_gradients(
        lambda *x: testing.reference(*x, softcap=softcap, dtype=dtype), [q, k, v], dout
    )
    testing.assert_close_as_peer(found[0], exact_results[0], plain[0], what="out")
    for name, ours, truth, plain in zip(("dq", "dk", "dv"), grads, exact, peer, strict=True):
        # Plain torch gives NaN for 0 * inf where softcap is tiny.
        peer_or_exact = torch.where(plain.isnan(), truth, plain)
        testing.assert_close_as_peer(ours, truth, peer_or_exact, what=name)
