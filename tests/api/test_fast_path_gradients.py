"""The fast path through autograd: gradients equal the slow path's, and no active observer is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash4_torch
from cases import Case, cases
from flash4_torch import errors, testing
from flash4_torch.configs.types import Scope
from flash4_torch.ops import impl
from on_cpu import Machine, gpu
from test_fast_path import UNRESOLVED, DispatchMode, LongWay, assert_same, half


@pytest.fixture
def machine() -> Iterator[Machine]:
    with gpu() as machine:
        yield machine


@pytest.fixture
def long_way(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> LongWay:
    return LongWay(monkeypatch)


X = [half(1, 128, 2, 64).requires_grad_() for _ in "qkv"]


def attend(**kwargs: Any) -> Any:
    return flash4_torch.attention(*X, **kwargs)


def grads(out: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, X, torch.ones_like(out), **kwargs)


def step() -> tuple[Tensor, ...]:
    return grads(attend())


def test_the_third_step_takes_it(long_way: LongWay) -> None:
    """The first step's forward and the second step's backward prepare the others."""
    assert [long_way.taken(step) for _ in range(4)] == [True, True, False, False]
    assert not long_way.taken(lambda: [x.sum() for x in step()])


@given(
    cases((torch.bfloat16, torch.float16)),
    st.booleans(),
    st.booleans(),
    st.sampled_from((0.0, 0.3)),
)
@settings(max_examples=100)
def test_its_gradients_are_the_long_ways(case: Case, expanded: bool, some: bool, dropout_p: float) -> None:
    inputs = [x.detach().requires_grad_(i == 2 or not some) for i, x in enumerate((case.q, case.k, case.v))]
    kwargs = dict(case.kwargs)
    if kwargs["attn_mask"] is not None:
        kwargs["attn_mask"] = kwargs["attn_mask"].detach()
    inputs.append(kwargs["sinks"])
    wanted = [x for x in inputs if x is not None and x.requires_grad]

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        out = flash4_torch.attention(*inputs[:3], **kwargs, dropout_p=dropout_p)
        dout = torch.ones_like(out[:1, :1]).expand(out.shape) if expanded else torch.ones_like(out)
        return [out, *torch.autograd.grad(out, wanted, dout)]

    with gpu() as machine:
        steps = [step() for _ in range(3)]
    for a, b in zip(steps[0], steps[2], strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
    assert type(steps[0][0].grad_fn).__name__ == type(steps[2][0].grad_fn).__name__
    if machine.backwards:
        long, _, short = machine.backwards
        assert long[:2] == short[:2] and long.args[16:] == short.args[16:]
        for i in (10, 11, 12, 13, 14, 15):
            assert_same(long.args[i], short.args[i])
        assert (long.args[15] is not None) == bool(dropout_p)
        for a, b in zip(long.args[:9], short.args[:9], strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@given(
    st.tuples(*[st.integers(1, n) for n in (2, 40, 40, 2, 3)]),
    st.sampled_from(((8, 8), (16, 8), (8, 16))),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.sampled_from((None, torch.bool, torch.float32, torch.bfloat16)),
    st.booleans(),
    st.booleans(),
    st.sampled_from((0.0, 0.3)),
)
@settings(max_examples=60)
def test_calls_with_heads_first_are_the_long_ways(
    sizes: tuple[int, ...],
    widths: tuple[int, int],
    contiguous: list[bool],
    mask_dtype: torch.dtype | None,
    recorded: bool,
    expanded: bool,
    dropout_p: float,
) -> None:
    """Kernels get scaled_dot_product_attention's tensors as they are, and results come in their order.

    Gradients lie in memory as their tensors do: autograd would copy others for a leaf.
    """
    (B, Sq, Sk, Hk, group), (D, Dv) = sizes, widths
    shapes = (B, Hk * group, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv)
    inputs = [half(*shape) for shape in shapes]
    inputs = [
        (x if plain else x.transpose(1, 2).contiguous().transpose(1, 2)).requires_grad_(recorded)
        for x, plain in zip(inputs, contiguous, strict=True)
    ]
    mask = None
    if mask_dtype is not None:
        mask = torch.randn(Sq, Sk) > 0.0 if mask_dtype is torch.bool else torch.randn(Sq, Sk).to(mask_dtype)

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        attend = flash4_torch.scaled_dot_product_attention
        out = attend(*inputs, attn_mask=mask, dropout_p=dropout_p, enable_gqa=True)
        if not recorded:
            return [out]
        dout = (
            torch.ones_like(out[:, :, :1]).expand(out.shape) if expanded else torch.randn(out.shape).to(out)
        )
        return [out, *torch.autograd.grad(out, inputs, dout)]

    def strides(x: Tensor) -> list[int]:
        return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]

    with gpu() as machine:
        steps = [step(), step()]
        with mock.patch.object(impl, "backends", None):
            steps.append(step())
    for a, b in zip(steps[0], steps[2], strict=True):
        assert torch.equal(a, b) and strides(a) == strides(b) and a.dtype == b.dtype
    assert [strides(x) for x in steps[2][1:]] == [strides(x) for x in inputs[: 3 * recorded]]
    for launches, results in ((machine.launches, 6), (machine.backwards, 9)):
        if launches:
            long, _, short = launches
            assert long[:2] == short[:2]
            for i, (a, b) in enumerate(zip(long.args[:results], short.args[:results], strict=True)):
                assert (a is None) == (b is None)
                assert a is None or (a.shape, a.dtype) == (b.shape, b.dtype)
                # A copy of the gradient of a sum is contiguous in the order of its dimensions.
                is_copy = expanded and results == 9 and i == 3
                assert a is None or is_copy or strides(a) == strides(b)
            assert_same(long.args[results + 1 : -1], short.args[results + 1 : -1])


def test_gradients_of_heads_apart_are_the_long_ways(machine: Machine) -> None:
    q, k, v = (half(1, 1024, *head).requires_grad_() for head in ((8, 128), (2, 128), (2, 64)))
    steps = []
    for _ in range(3):
        out = flash4_torch.attention(q, k, v, causal=True)
        steps.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    for a, b in zip(steps[0], steps[2], strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    for launch in machine.backwards:
        assert launch.config.scope == Scope.Q_HEAD
        assert [tuple(x.shape) for x in launch.args[7:9]] == [(1, 1024, 8, 128), (1, 1024, 8, 64)]
        assert launch.args[1].shape == k.shape


def test_sinks_that_a_module_learns_take_it(long_way: LongWay) -> None:
    """A parameter among the other tensors is like any tensor that requires gradients."""
    sinks = torch.nn.Parameter(torch.randn(2))

    def step() -> tuple[Tensor, ...]:
        out = attend(sinks=sinks)
        return torch.autograd.grad(out, [*X, sinks], torch.ones_like(out))

    first = step()
    assert [long_way.taken(step) for _ in range(3)] == [True, False, False]
    for a, b in zip(first, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("S", "turns"), [(200, True), (100, False)])
def test_deterministic_steps_have_turns(machine: Machine, S: int, turns: bool) -> None:
    """dQ is summed in order unless one CTA takes all tiles of a KV head."""
    q, k, v = (half(1, S, 2, 64).requires_grad_() for _ in range(3))
    for _ in range(3):
        flash4_torch.attention(q, k, v, deterministic=True).sum().backward()
    assert [launch.args[10] is not None for launch in machine.backwards] == [turns] * 3


def prepared(long_way: LongWay) -> None:
    step()
    step()
    assert not long_way.taken(step)


LISTENERS: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Any]]] = {
    "gradient of lse": (nullcontext, lambda out: torch.autograd.grad(attend(return_lse=True)[1].sum(), X)),
    "dispatch mode": (DispatchMode, grads),
    "profiler": (lambda: torch.profiler.profile(acc_events=True), grads),
    "batched": (
        nullcontext,
        lambda out: torch.autograd.grad(out, X, torch.ones(3, *out.shape).bfloat16(), is_grads_batched=True),
    ),
    "memory is filled": (testing.poisoned_memory, grads),
    "observer": (testing.backends_used, grads),
    "other strides": (
        nullcontext,
        lambda out: torch.autograd.grad(out, X, half(1, 2, 128, 64).transpose(1, 2)),
    ),
    "odd base": (
        nullcontext,
        lambda out: torch.autograd.grad(out, X, half(1 + 128 * 128)[1:].view(1, 128, 2, 64)),
    ),
}


@pytest.mark.parametrize(("context", "backward"), LISTENERS.values(), ids=LISTENERS)
def test_whoever_listens_is_not_passed_by(
    long_way: LongWay, context: Callable[[], Any], backward: Callable[[Tensor], Any]
) -> None:
    prepared(long_way)
    out = attend()
    with context():
        assert long_way.taken(lambda: backward(out))
    assert not long_way.taken(step)


@pytest.mark.parametrize("unresolved", UNRESOLVED.values(), ids=UNRESOLVED)
def test_numbers_that_are_not_in_memory_reach_the_kernel(
    long_way: LongWay, machine: Machine, unresolved: Callable[[Tensor], Tensor]
) -> None:
    """The kernel gets plain numbers where torch hands a tensor on as it is."""
    prepared(long_way)
    dout = unresolved(half(1, 128, 2, 64))
    launched = len(machine.backwards)
    found = torch.autograd.grad(attend(), X, dout)
    assert len(machine.backwards) == launched + 1
    seen = machine.backwards[-1].args[3]
    assert not seen.is_neg() and seen.data_ptr() and torch.equal(seen, dout)
    for a, b in zip(found, torch.autograd.grad(attend(), X, dout.clone()), strict=True):
        assert torch.equal(a, b)


def test_gradients_have_no_gradient(long_way: LongWay) -> None:
    prepared(long_way)
    found = grads(attend(), create_graph=True)
    with pytest.raises(errors.DoubleBackwardError):
        torch.autograd.grad(found[0].sum(), X)


def test_a_graph_may_be_kept(long_way: LongWay) -> None:
    prepared(long_way)
    out = attend()
    once, again = grads(out, retain_graph=True), grads(out)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        grads(out)


def test_changes_of_what_was_saved_are_noticed(long_way: LongWay) -> None:
    prepared(long_way)
    out = attend()
    with torch.no_grad():
        X[0].add_(0.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        grads(out)


def heads_first(mask: Tensor | None) -> Tensor:
    return flash4_torch.scaled_dot_product_attention(*X, attn_mask=mask)


@pytest.mark.parametrize("changed", [0, 1, 2, 3])
def test_changes_of_what_others_see_through_views_are_noticed(long_way: LongWay, changed: int) -> None:
    """q, k, v and the mask, of which the kernel gets views."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    for _ in range(3):
        grads(heads_first(mask))
    out = heads_first(mask)
    assert not long_way.taken(lambda: grads(out, retain_graph=True))
    with torch.no_grad():
        [*X, mask][changed].mul_(1.0 if changed < 3 else True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        grads(out)


def test_gradients_through_views_have_no_gradient(long_way: LongWay) -> None:
    for _ in range(3):
        grads(heads_first(None))
    found = torch.autograd.grad(heads_first(None).sum(), X, create_graph=True)
    with pytest.raises(errors.DoubleBackwardError):
        torch.autograd.grad(found[0].sum(), X)


def test_checkpoints_recompute(long_way: LongWay) -> None:
    prepared(long_way)
    wanted = step()
    for _ in range(2):
        found = grads(checkpoint(flash4_torch.attention, *X, use_reentrant=False))
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_what_is_saved_may_lie_elsewhere(long_way: LongWay) -> None:
    """Hooks take saved tensors away and bring back copies."""
    prepared(long_way)
    wanted = step()
    with torch.autograd.graph.save_on_cpu():
        out = attend()
    assert all(torch.equal(a, b) for a, b in zip(wanted, grads(out), strict=True))


def test_what_it_remembers_is_bounded(long_way: LongWay) -> None:
    prepared(long_way)
    for padding in range(70):
        room = half(1, 128, 2 + padding, 64)
        torch.autograd.grad(attend(), X, room[:, :, :2])
    training = attend().grad_fn.call
    assert len(training.backwards) <= 64


@pytest.mark.parametrize("wants_grad", [False, True])
def test_lse_is_contiguous_on_a_cpu(wants_grad: bool) -> None:
    """PyTorch's kernel leaves it as (B, S, H), and so does a launch whose lse nobody gets."""
    x = torch.randn(2, 40, 3, 16, requires_grad=wants_grad)
    for _ in range(3):
        _, lse = flash4_torch.attention(x, x, x, return_lse=True)
        assert lse.shape == (2, 3, 40) and lse.is_contiguous()
