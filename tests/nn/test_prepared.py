"""The module's fast path: its later calls have the results of the first, and nobody can tell them apart."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import flash4_torch
from everything import examples
from flash4_torch import testing
from flash4_torch.errors import DoubleBackwardError
from flash4_torch.fast_path import gradients
from flash4_torch.nn import fused, materialized, prepared
from flash4_torch.nn.contract import Call
from flash4_torch.nn.projection import Parameters
from live_bytes import can_be_counted, peak_of
from module_masks import masks
from module_ways import Way, ways
from on_cpu import gpu

E, H, N, S = 16, 2, 2, 5


def module(
    batch_first: bool = True, dtype: torch.dtype = torch.float32, **more: Any
) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return flash4_torch.MultiheadAttention(E, H, batch_first=batch_first, dtype=dtype, **more)


def an_input(batch_first: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn((N, S, E) if batch_first else (S, N, E)).to(dtype)


@given(
    data=st.data(),
    way=ways(),
    bias=st.booleans(),
    dropout=st.sampled_from([0.0, 0.3]),
    weights=st.sampled_from([None, True, False]),
    on_gpu=st.booleans(),
    frozen=st.sampled_from(["", "input", "in_proj", "out_proj", "all"]),
    of_weights_alone=st.booleans(),
    cast=st.booleans(),
)
@settings(max_examples=examples(60, 200))
def test_later_steps_are_the_first(
    data: st.DataObject,
    way: Way,
    bias: bool,
    dropout: float,
    weights: bool | None,
    on_gpu: bool,
    frozen: str,
    of_weights_alone: bool,
    cast: bool,
) -> None:
    dtype = torch.bfloat16 if on_gpu and not cast else torch.float32
    sizes = way.sizes(N, S, 4)
    call = data.draw(masks(H, sizes, dtype, way.batched))
    attention = way.module(E, H, dtype, bias=bias, dropout=dropout)
    leaves = [x.to(dtype).requires_grad_(frozen not in ("input", "all")) for x in way.leaves(sizes, E)]
    for name, parameter in attention.named_parameters():
        is_out = name.startswith("out_proj")
        parameter.requires_grad_(frozen not in ("all", "out_proj" if is_out else "in_proj"))
    wanted = [p for p in (*leaves, *attention.parameters()) if p.requires_grad]
    flags = {"need_weights": weights is not None, "average_attn_weights": bool(weights)}

    def step() -> list[Tensor]:
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out, found = attention(*way.inputs(leaves), **call, **flags)
        total = (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)).sum()
        if found is not None:
            of_weights = (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum()
            alone = of_weights_alone and of_weights.requires_grad
            total = of_weights if alone else total + of_weights
        made = [out, *([] if found is None else [found])]
        if not wanted:
            return made
        grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        return [*made, *grads]

    with gpu() if on_gpu else contextlib.nullcontext():
        first, *later = [step() for _ in range(4)]
    is_rough = on_gpu or cast
    for one in later:
        for a, b in zip(first, one, strict=True):
            assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
            # The sums of bias gradients, and matmuls, may be of other layouts.
            torch.testing.assert_close(a, b, rtol=2e-2 if is_rough else 1e-5, atol=2e-2 if is_rough else 1e-6)


def is_taken(call: Callable[[], Any]) -> bool:
    seen: list[bool] = []
    run = prepared.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "run", lambda *args: seen.append(True) or run(*args))
        call()
    return bool(seen)


def test_the_second_call_takes_it() -> None:
    # With biases, or weights, what serves later calls would serve the first one, too.
    attention, x = module(bias=False).eval(), an_input()
    call = lambda *given: is_taken(lambda: attention(*given, need_weights=False))  # noqa: E731
    with torch.no_grad():
        assert [call(x, x, x) for _ in range(3)] == [False, True, True]
        assert not call(x, x, x.clone())
        assert not call(x[:, :3], x[:, :3], x[:, :3])
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert [call(x, x, x) for _ in range(2)] == [False, True]
    attention.train()
    step = lambda: attention(x, x, x, need_weights=False)[0].sum().backward()  # noqa: E731
    assert [is_taken(step) for _ in range(3)] == [False, True, True]


ONE_OF_EACH = [
    Way("qkv", False, True, True),
    Way("kv", False, True, False),
    Way("qk", False, True, True),
    Way("", False, False, True),
    Way("", True, True, True),
]


@pytest.mark.parametrize("way", ONE_OF_EACH)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("saves_weights", [False, True])
def test_gradients_of_a_batch_are_those_of_each(
    way: Way,
    need_weights: bool,
    create_graph: bool,
    cast: bool,
    saves_weights: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not saves_weights:
        monkeypatch.setattr(materialized, "of", lambda *args: None)
    attention, inputs = a_call(way)
    wanted = [*{id(x): x for x in inputs}.values(), *attention.parameters()]
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out, _ = attention(*inputs, need_weights=need_weights)
        douts = torch.randn(2, *out.shape).to(out.dtype)
        more = {"retain_graph": True, "create_graph": create_graph}
        batch = torch.autograd.grad(out, wanted, douts, is_grads_batched=True, **more)
        for i, dout in enumerate(douts):
            for found, one in zip(batch, torch.autograd.grad(out, wanted, dout, **more), strict=True):
                error = 3e-2 if cast else 1e-5
                torch.testing.assert_close(found[i], one, rtol=error, atol=error)


@pytest.mark.parametrize("way", ONE_OF_EACH)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("saves_weights", [False, True])
def test_a_backward_under_autocast_is_as_exact(
    way: Way, need_weights: bool, saves_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not saves_weights:
        monkeypatch.setattr(materialized, "of", lambda *args: None)
    attention, inputs = a_call(way)
    wanted = [*{id(x): x for x in inputs}.values(), *attention.parameters()]
    attention(*inputs, need_weights=need_weights)  # whose projections are torch's own, if it is prepared
    for _ in range(2):
        out, weights = attention(*inputs, need_weights=need_weights)
        loss = out.square().sum() + (0.0 if weights is None else weights.square().sum())
        expected = torch.autograd.grad(loss, wanted, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad(loss, wanted)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b)


def test_gradients_of_output_and_weights_are_made_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = module(add_bias_kv=True), an_input().requires_grad_()  # the attention alone is prepared
    together, seen = gradients.backward_of_both, []

    def watched(*args: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return together(*args)

    monkeypatch.setattr(gradients, "backward_of_both", watched)
    for _ in range(3):
        out, weights = attention(x, x, x)
        with torch.autocast("cpu", torch.bfloat16):
            torch.autograd.grad(out.sum() + weights.square().sum(), x)
    assert seen and not any(seen)


@pytest.mark.parametrize("way", ONE_OF_EACH)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("few", [0, 1 << 13])
def test_autocast_is_a_cast_by_hand(
    way: Way, need_weights: bool, training: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "serves", lambda *args: False)
    monkeypatch.setattr(materialized, "FEW", few)
    attention, inputs = a_call(way)
    cast = copy.deepcopy(attention).bfloat16()
    leaves = {id(x): x.detach().bfloat16().requires_grad_() for x in inputs}
    for _ in range(3):
        with torch.set_grad_enabled(training):
            expected = cast(*(leaves[id(x)] for x in inputs), need_weights=need_weights)
            with torch.autocast("cpu", torch.bfloat16):
                found = attention(*inputs, need_weights=need_weights)
        assert all(b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        if not training:
            continue
        given = [x for x in expected if x is not None]
        ramps = [torch.linspace(-1, 1, x.numel()).view(x.shape).bfloat16() for x in given]
        by_hand = torch.autograd.grad(given, [*leaves.values(), *cast.parameters()], ramps)
        wanted = [*{id(x): x for x in inputs}.values(), *attention.parameters()]
        grads = torch.autograd.grad([x for x in found if x is not None], wanted, ramps)
        assert all(torch.equal(a, b.float()) for a, b in zip(grads, by_hand, strict=True))


@pytest.mark.parametrize("of", ["module", "input"])
def test_autocast_leaves_float64(of: str) -> None:
    attention, x = module(dtype=torch.float64), an_input(dtype=torch.float64)
    attention, x = (attention.float(), x) if of == "input" else (attention, x)
    outcomes = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            try:
                outcomes.append([y.dtype for y in attention(x, x, x)])
            except RuntimeError as error:
                outcomes.append([str(error)])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0] == [torch.float64] * 2 or of == "input"


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_weights_without_a_batch(average: bool, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialized, "of", lambda *args: None)
    attention, x = module(), an_input()[0].requires_grad_(training)
    attention.requires_grad_(training)
    monkeypatch.setattr(fused, "serves", lambda *args: False)
    for _ in range(3):
        out, weights = attention(x, x, x, average_attn_weights=average)
        assert out.shape == (S, E) and weights.shape == ((S, S) if average else (H, S, S))
        if training:
            torch.autograd.grad(out.sum() + weights.square().sum(), x)


@pytest.mark.parametrize("way", [*ONE_OF_EACH, Way("qv", False, True, True)])
@pytest.mark.parametrize("cast", [False, True])
def test_every_way_is_recognised_at_once(way: Way, cast: bool) -> None:
    attention, inputs = a_call(way)
    call, parameters = Call(*inputs, need_weights=False), Parameters.of(attention)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        for _ in range(3):
            attention(*inputs, need_weights=False)
        assert prepared.recall(attention, call, parameters) is not None
    with torch.autocast("cpu", torch.float16, enabled=cast):
        assert (prepared.recall(attention, call, parameters) is None) == cast


def test_ways_of_equal_sizes_are_told_apart() -> None:
    attention = module(bias=False).eval()
    x, y, z = (torch.randn(N, S, E, generator=torch.Generator().manual_seed(i)) for i in range(3))
    calls = [(x, x, x), (x, y, y), (x, x, y), (x, y, x), (x, y, z), (y, x, x)]
    with torch.no_grad():
        rounds = [[attention(*call, need_weights=False)[0] for call in calls] for _ in range(3)]
    assert all(map(torch.equal, rounds[1], rounds[2]))
    with testing.backends_used():
        for call, *made in zip(calls, *rounds, strict=True):
            expected, _ = attention(*call, need_weights=False)
            for out in made:
                torch.testing.assert_close(out, expected)


def a_call(way: Way) -> tuple[nn.MultiheadAttention, tuple[Tensor, Tensor, Tensor]]:
    leaves = [x.float().requires_grad_() for x in way.leaves(way.sizes(N, S, 4), E)]
    return way.module(E, H, torch.float32), way.inputs(leaves)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "observed",
    [Mode, testing.backends_used, lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)],
)
def test_observers_see_the_operators(observed: Callable[[], Any]) -> None:
    attention, x = module(), an_input()
    for _ in range(2):
        attention(x, x, x)
    with observed():
        assert not is_taken(lambda: attention(x, x, x))


def test_other_modules_do_not_take_it() -> None:
    class Own(flash4_torch.MultiheadAttention):
        pass

    x = an_input()
    for attention in (
        Own(E, H, batch_first=True),
        module(add_bias_kv=True),
        module(add_zero_attn=True),
    ):
        assert not any(is_taken(lambda a=attention: a(x, x, x)) for _ in range(3))


@pytest.mark.parametrize("way", ONE_OF_EACH)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("frozen", ["", "inputs", "in_proj"])
@pytest.mark.parametrize("saves_weights", [False, True])
def test_second_derivatives_raise_as_before(
    way: Way,
    need_weights: bool,
    cast: bool,
    frozen: str,
    saves_weights: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not saves_weights:
        monkeypatch.setattr(materialized, "of", lambda *args: None)
    attention, inputs = a_call(way)
    for x in inputs if frozen == "inputs" else ():
        x.requires_grad_(False)
    for name, parameter in attention.named_parameters():
        parameter.requires_grad_(not (frozen == "in_proj" and "out_proj" not in name))
    of = inputs[0] if frozen != "inputs" else next(attention.parameters())
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out, _ = attention(*inputs, need_weights=need_weights)
        (grad,) = torch.autograd.grad(out.sum(), of, create_graph=True)
        with pytest.raises(DoubleBackwardError):
            grad.sum().backward()


@pytest.mark.parametrize("batch_first", [False, True])
def test_results_may_be_changed_in_place(batch_first: bool) -> None:
    attention, x = module(batch_first), an_input(batch_first).requires_grad_()
    grads = []
    for _ in range(3):
        out, weights = attention(x, x, x)
        out += x
        weights *= 2
        grads.append(torch.autograd.grad(out.sum() + weights.square().sum(), x)[0])
    torch.testing.assert_close(grads[0], grads[2])


def test_wrong_calls_raise_as_before() -> None:
    attention, x = module(), an_input()
    for _ in range(3):
        attention(x, x, x)
        with pytest.raises(flash4_torch.errors.ArgumentError, match="need_weights"):
            attention(x, x, x, need_weights="yes")
        with pytest.raises((RuntimeError, AssertionError)):
            attention(x, x, x, key_padding_mask=torch.zeros(N, S + 1, dtype=torch.bool))


def test_its_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_MOST", 3)
    attention = module().eval()
    for length in range(1, 9):
        x = torch.randn(1, length, E)
        attention(x, x, x)
        assert len(prepared._calls) <= 3


@pytest.mark.skipif(not can_be_counted(), reason="the C library does not tell what is allocated")
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_peak_of_a_step_on_a_gpu_is_bounded(batch_first: bool) -> None:
    """The unit is a tensor as large as the input. While dq is summed there are q, k, v, out, the output,
    dout, dq, dk, dv, and float32 sums of dq, which are two; parameters' gradients are an eighth."""
    width, tokens = 64, 2048
    attention = flash4_torch.MultiheadAttention(width, 1, batch_first=batch_first, dtype=torch.bfloat16)
    shape = (4, 512, width) if batch_first else (512, 4, width)
    x, dy = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=i == 0) for i in range(2))

    def step() -> None:
        out, _ = attention(x, x, x, need_weights=False)
        torch.autograd.grad(out, [x, *attention.parameters()], dy)

    with gpu() as machine:

        def forget() -> None:
            machine.launches.clear()
            machine.backwards.clear()

        for _ in range(3):
            step()
        assert is_taken(step)
        peak = peak_of(step, "/prepared.py", forget)
    assert 9.0 < peak / (2 * tokens * width) < 11.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "chunk"), [(1, 1), (48, 16), (256, 128), (1024, 128), (16384, 128)])
def test_rows_are_summed_in_parts(count: int, chunk: int, dtype: torch.dtype) -> None:
    rows = torch.randn(count, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    found, exact = prepared._sum_in_parts(rows, chunk), rows.double().sum(0)
    assert found.dtype == dtype and found.shape == (24,)
    torch.testing.assert_close(found, exact.to(dtype), rtol=8e-3 if dtype.itemsize == 2 else 1e-6, atol=1e-4)


def test_parameters_that_are_replaced_are_seen() -> None:
    attention, x = module().eval(), an_input()
    with torch.no_grad():
        before = [attention(x, x, x)[0] for _ in range(3)][-1]
        attention.out_proj.weight = nn.Parameter(2 * attention.out_proj.weight)
        attention.out_proj.bias = nn.Parameter(2 * attention.out_proj.bias)
        torch.testing.assert_close(attention(x, x, x)[0], 2 * before)
        attention.out_proj.bias = None
        assert attention(x, x, x)[0].shape == before.shape


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_call_that_plain_torch_serves_is_the_same_under_autocast(dropout_p: float) -> None:
    q, k, v = (torch.randn(2, 16, 2, 16).bfloat16().requires_grad_() for _ in range(3))

    def results() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        out = flash4_torch.attention(q, k, v, softcap=5.0, dropout_p=dropout_p)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert all(map(torch.equal, results(), expected))
    assert all(map(torch.equal, results(), expected))


def _found(attention: nn.MultiheadAttention, x: Tensor) -> prepared.Prepared | None:
    call = Call(x, x, x, need_weights=False)
    return prepared.lookup(attention, call, Parameters.of(attention))[1]


def test_another_precision_of_products_is_another_call() -> None:
    attention, x = module().eval(), an_input()
    for _ in range(3):
        attention(x, x, x, need_weights=False)
    assert _found(attention, x) is not None
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = not before
        assert _found(attention, x) is None
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert _found(attention, x) is not None


@pytest.mark.parametrize("of_out", [False, True])
def test_parametrised_weights_are_read_anew(of_out: bool) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    stock, ours = nn.MultiheadAttention(E, H, batch_first=True), module()
    ours.load_state_dict(stock.state_dict())
    x = an_input()
    ours(x, x, x)
    for attention in (stock, ours):
        owner, name = (attention.out_proj, "weight") if of_out else (attention, "in_proj_weight")
        nn.utils.parametrize.register_parametrization(owner, name, Twice())
    for _ in range(2):
        for actual, expected in zip(ours(x, x, x), stock(x, x, x), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("masked", ["", "bool", "float", "learned"])
def test_gradients_of_output_and_weights_are_made_together(
    average: bool, dropout: float, masked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cross-attention on a CPU: what one backward gives are the sums of both operators'."""
    monkeypatch.setattr(materialized, "of", lambda *args: None)
    attention = module(dtype=torch.float64, dropout=dropout)
    x, memory = (torch.randn(N, n, E, dtype=torch.float64).requires_grad_() for n in (S, 7))
    hidden = torch.rand(N * H, S, 7) < 0.3
    mask = {"": None, "bool": hidden}.get(
        masked, (hidden.double() * -90.0).requires_grad_(masked == "learned")
    )
    leaves = [x, memory, *attention.parameters(), *([mask] if masked == "learned" else [])]
    calls: list[Any] = []

    def step() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        options = {"attn_mask": mask, "average_attn_weights": average}
        out, weights = attention(x, memory, memory, **options)
        loss = (out * out).sum() + (weights * weights).sum()
        return torch.autograd.grad(loss, leaves)

    step()  # which the operators serve, if anything has to be prepared
    together = gradients.backward_of_both
    monkeypatch.setattr(gradients, "backward_of_both", lambda *args: calls.append(args) or together(*args))
    found = step()
    assert len(calls) == 1
    monkeypatch.setattr(gradients, "backward_of_both", lambda *args: None)
    for own, expected in zip(found, step(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-10)
