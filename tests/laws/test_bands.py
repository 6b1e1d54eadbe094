"""Bands on PyTorch's CPU kernel, as masks and as parts of a problem: as exact as torch's own call."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import flash4_torch
from cases import FLOAT_DTYPES, LAYOUTS, Case, laid_out
from everything import examples
from flash4_torch import testing
from flash4_torch.backends import bands, cpu
from flash4_torch.backends.base import Order
from flash4_torch.masks import Band
from flash4_torch.ops import check, impl
from flash4_torch.problem import CallOptions, Inputs, Saved
from flash4_torch.reference import at_once

LENGTH = st.one_of(st.integers(1, 9), st.sampled_from([33, 64, 150]))
BOUND = st.none() | st.integers(-3, 9) | st.sampled_from([31, 100])


@st.composite
def masks(draw: st.DrawFn, full: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor | None:
    """A mask of two to four dimensions, some of which broadcast; whole rows of it may be hidden."""
    kind = draw(st.sampled_from(["none", "bool", "float", "float32"]))
    if kind == "none":
        return None
    shape = [draw(st.sampled_from([1, n])) for n in full][draw(st.integers(0, 2)) :]
    seen = torch.rand(shape) < draw(st.sampled_from([0.2, 0.8]))
    if kind == "bool":
        return seen
    work = torch.float32 if kind == "float32" and dtype != torch.float64 else dtype
    return torch.randn(shape).to(work).masked_fill(~seen, -torch.inf)


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """Calls with a band that torch's kernel has no flag for, most of them, and that it serves."""
    dtype, Sq, Sk, D = draw(st.sampled_from(FLOAT_DTYPES)), draw(LENGTH), draw(LENGTH), 8
    B, Hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    left, right = draw(BOUND), draw(BOUND)
    assume(left is None or right is None or left + right >= 0)
    torch.manual_seed(draw(st.integers(0, 99)))
    sizes = (B, Sq, Hk * group, D), (B, Sk, Hk, D), (B, Sk, Hk, D)
    q, k, v = (laid_out(size, dtype, draw(st.sampled_from(LAYOUTS)), i) for i, size in enumerate(sizes))
    kwargs: dict[str, Any] = {"window": (left, right)}
    kwargs["attn_mask"] = draw(masks((B, Hk * group, Sq, Sk), dtype))
    if draw(st.integers(0, 4)) == 0:
        kwargs["sinks"] = torch.randn(Hk * group).to(dtype)
    assume(not flash4_torch.support(q, k, v, **kwargs)["cpu"])
    return Case(q, k, v, kwargs)


def results(case: Case, out: Tensor, lse: Tensor, dout: Tensor) -> list[Tensor]:
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (case.q, case.k, case.v), dout)]


@settings(max_examples=examples(150, 2000))
@given(calls())
def test_values_and_gradients(case: Case) -> None:
    """Those of the first call, and of one that is prepared, which are the same."""
    dout = torch.randn(case.q.shape, dtype=torch.float64).to(case.q.dtype)

    def ours() -> list[Tensor]:
        with testing.poisoned_memory():
            out, lse = flash4_torch.attention(case.q, case.k, case.v, **case.kwargs, return_lse=True)
            return results(case, out, lse, dout)

    with testing.backends_used() as used:
        first = ours()
    assert used[("attention", "cpu")] == 1
    found = ours()
    exact = results(case, *case.exact(), dout.double())
    peer = results(case, *case.exact(case.q.dtype), dout)
    nothing = exact[1] == -torch.inf
    for name, a, b, e, p in zip(("out", "lse", "dq", "dk", "dv"), found, first, exact, peer, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.is_contiguous(), name
        testing.assert_close_as_peer(a, e.double(), p, what=name)
    for i in (0, 2):
        assert not found[i].transpose(1, 2)[nothing].any()


@settings(max_examples=examples(60, 600))
@given(calls())
def test_heads_first_calls(case: Case) -> None:
    """Prepared calls whose heads come first have the results of plain ones."""
    order = Order(heads_first=True, out_heads_first=True)
    q, k, v = (x.detach() for x in (case.q, case.k, case.v))
    mask = check.attn_mask(case.kwargs["attn_mask"], q, k)
    inputs = Inputs(q, k, v, mask, case.kwargs.get("sinks"))
    problem = impl.describe_inputs(inputs, CallOptions(0.3, *case.kwargs["window"]))
    backend = cpu.Cpu()
    expected = backend.forward(inputs, problem)
    launch = backend.prepare(inputs, problem, order)
    assert launch is not None
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, *_ = launch(*heads, mask, inputs.sinks)
    assert torch.equal(out.transpose(1, 2), expected.out) and torch.equal(lse, expected.lse)
    saved = Saved(torch.randn_like(expected.out), None, expected.out, expected.lse, False, expected.lse_low)
    grads = backend.backward(saved, inputs, problem)
    launch_backward = backend.prepare_backward(saved, inputs, problem, order)
    assert launch_backward is not None
    dout = saved.dout.transpose(1, 2)
    found = launch_backward(dout, out, lse, saved.lse_low, *heads, mask, inputs.sinks)
    for a, b in zip(found[:3], grads[:3], strict=True):
        assert torch.equal(a.transpose(1, 2), b) and a.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("Sq", "Sk", "window"), [(9, 5, (None, 0)), (9, 5, (2, 0)), (5, 9, (-3, 4))])
def test_rows_that_see_nothing(Sq: int, Sk: int, window: tuple[int | None, int]) -> None:
    q, k, v = (torch.randn(1, S, 2, 8, requires_grad=True) for S in (Sq, Sk, Sk))
    seen = torch.as_tensor(Band(*window).visible(torch.arange(Sq)[:, None], torch.arange(Sk), Sq, Sk))
    rows, keys = ~seen.any(1), ~seen.any(0)
    assert rows.any() or keys.any()
    for _ in range(2):
        with testing.poisoned_memory():
            out, lse = flash4_torch.attention(q, k, v, window=window, return_lse=True)
            dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert not out[:, rows].any() and not dq[:, rows].any()
        assert torch.equal(lse == -torch.inf, rows.expand_as(lse))
        assert not dk[:, keys].any() and not dv[:, keys].any()


@given(st.lists(st.booleans(), min_size=4, max_size=4))
def test_masks_are_no_larger_than_they_need_to_be(broadcasts: list[bool]) -> None:
    full = 3, 2, 12, 14
    shape = [1 if one else n for one, n in zip(broadcasts, full, strict=True)]
    q, k = torch.randn(3, 12, 2, 8), torch.randn(3, 14, 2, 8)
    sizes = []

    def kernel(*args: Any, attn_mask: Tensor, **options: Any) -> Any:
        sizes.append(tuple(attn_mask.shape))
        return forward(*args, attn_mask=attn_mask, **options)

    forward = cpu._forward
    with mock.patch.object(cpu, "_forward", kernel):
        flash4_torch.attention(q, k, k, window=(20, 1), attn_mask=torch.ones(shape, dtype=torch.bool))
    assert sizes == [(*shape[:2], 12, 14)]


def test_masks_are_kept_and_plain() -> None:
    hidden = bands.Hidden(torch.float32, 7, 9, Band(3, 1))
    for mode in (FakeTensorMode(), torch.inference_mode(), torch.device("meta")):
        bands.bias.cache_clear()
        with mode:
            found = bands.bias(hidden)
        assert type(found) is Tensor and found.is_cpu and not found.is_inference()
        assert bands.bias(hidden) is found
    rows, keys = torch.arange(7)[:, None], torch.arange(9)
    assert torch.equal(found == 0.0, torch.as_tensor(Band(3, 1).visible(rows, keys, 7, 9)))


@pytest.mark.parametrize(
    ("Sq", "Sk", "window", "server"),
    [
        (128, 128, (8, 8), "cpu"),
        (512, 512, (400, None), "cpu"),
        (512, 512, (30, 0), "tiled"),
        (1024, 1024, (600, 600), "cpu"),
        (1024, 1024, (200, 200), "tiled"),
        (2048, 2048, (1900, 1900), "tiled"),
        (4, 4096, (100, 0), "cpu"),
        (2048, 1024, (None, 0), "cpu"),
        (2048, 2048, (2047, 0), "cpu"),
        (2048, 2048, (2046, 0), "tiled"),
        (8, 2, (None, -5), "tiled"),
    ],
)
def test_narrow_windows_go_to_tiles(Sq: int, Sk: int, window: tuple[int | None, int], server: str) -> None:
    q, k = torch.empty(1, Sq, 1, 8), torch.empty(1, Sk, 1, 8)
    why = flash4_torch.support(q, k, k, window=window)["cpu"]
    assert (not why) == (server == "cpu")
    assert all(f"Sq={Sq}, Sk={Sk}" in sentence for sentence in why)


def test_slow_dtypes_go_to_tiles() -> None:
    """Those that a CPU does not multiply; small calls are the kernel's in any case."""
    x = torch.randn(1, 64, 8, 8).half().requires_grad_()
    never = mock.Mock(side_effect=AssertionError)
    with (
        mock.patch.object(at_once, "products_dtype", lambda dtype: torch.float32),
        mock.patch.multiple(cpu, _forward=never, _backward=never),
    ):
        for window in ((3, 3), (None, 1)):
            for _ in range(2):
                flash4_torch.attention(x, x, x, window=window).sum().backward()
        with pytest.raises(AssertionError):
            flash4_torch.attention(x[:, :8], x[:, :8], x[:, :8], window=(3, 3))
