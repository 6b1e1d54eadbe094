"""The fast path to a kernel: it does what the slow path does, only where nobody could tell the difference."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash4_torch
from cases import Case, cases
from flash4_torch import backends, errors, fast_path, testing
from flash4_torch.backends import tile_counters
from flash4_torch.ops import impl
from on_cpu import Machine, gpu

pytestmark = [
    # Torch's warning of its own tracer, when it is asked for and when forward mode loads it.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with gpu() as machine:
        yield machine


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


class LongWay:
    """Counts the calls that reach the operator's implementation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = 0
        choose = backends.choose

        def counting(problem: Any) -> Any:
            self.calls += 1
            return choose(problem)

        # A choice that `record` asks for is not a call.
        monkeypatch.setattr(impl, "backends", type("Backends", (), {"choose": staticmethod(counting)}))

    def taken(self, call: Callable[[], Any]) -> bool:
        before = self.calls
        call()
        return self.calls > before


@pytest.fixture
def long_way(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> LongWay:
    return LongWay(monkeypatch)


def test_the_second_call_takes_it(long_way: LongWay) -> None:
    x = half(1, 128, 2, 64)
    assert [long_way.taken(lambda: flash4_torch.attention(x, x, x)) for _ in range(3)] == [True, False, False]
    other = half(1, 128, 2, 64)
    assert not long_way.taken(lambda: flash4_torch.attention(other, other, other))


@given(cases((torch.bfloat16, torch.float16)), st.booleans(), st.sampled_from((0.0, 0.3, 1.0)))
@settings(max_examples=150)
def test_it_launches_what_the_long_way_does(case: Case, return_lse: bool, dropout_p: float) -> None:
    tensors = [x.detach() for x in (case.q, case.k, case.v)]
    kwargs = {name: x.detach() if isinstance(x, Tensor) else x for name, x in case.kwargs.items()}

    def call() -> Any:
        torch.manual_seed(1)
        return flash4_torch.attention(*tensors, **kwargs, return_lse=return_lse, dropout_p=dropout_p)

    with gpu() as machine:
        first, second = call(), call()
    if not return_lse:
        first, second = (first,), (second,)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
        assert not a.numel() or a.data_ptr() != b.data_ptr()
    if machine.launches:
        long, short = machine.launches
        assert long[:2] == short[:2] and long.args[12] == short.args[12]
        assert long.args[7:9] == short.args[7:9] == (None,) * 2
        for i in (9, 10, 11):  # the mask and its tables, dropout's state, sinks
            assert_same(long.args[i], short.args[i])
        assert (long.args[10] is not None) == bool(dropout_p)
        for a, b in zip(long.args[:6], short.args[:6], strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype)


def test_one_tensor_may_be_both_cu_seqlens(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Self-attention's calls are recognised without their signature, and never taken for others."""
    q, k, v = (half(10, 2, 64) for _ in "qkv")
    ends, others = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 6, 10], dtype=torch.int32)
    looked_up = mock.Mock(wraps=fast_path._by_signature)
    monkeypatch.setattr(fast_path, "_by_signature", looked_up)

    def call(ends_q: Tensor, ends_k: Tensor) -> bool:
        before = looked_up.call_count
        flash4_torch.attention_varlen(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
        assert machine.launches[-1].args[7] is ends_q and machine.launches[-1].args[8] is ends_k
        return looked_up.call_count > before

    assert [call(ends, ends) for _ in range(3)] == [True, True, False]
    assert [call(ends, others) for _ in range(3)] == [True, False, False]
    assert not call(others, others) and not call(others, ends)


def test_what_kernels_cannot_read_in_place_is_copied(machine: Machine) -> None:
    """Sinks with strides, and cu_seqlens in 64 bits; the stand-ins assert what kernels are promised."""
    q, k, v = (half(10, 2, 64) for _ in "qkv")
    sinks, ends = torch.randn(4)[::2], torch.tensor([0, 4, 10])
    call = partial(flash4_torch.attention_varlen, cu_seqlens_q=ends, cu_seqlens_k=ends, sinks=sinks)
    first, *others = [call(q, k, v) for _ in range(3)]
    assert len(machine.launches) == 3 and all(torch.equal(first, out) for out in others)


X, Y, Z = (half(1, 128, 2, 64) for _ in "qkv")
ANOTHER_CALL: dict[str, Callable[[], Any]] = {
    "longer": lambda: flash4_torch.attention(*[half(1, 129, 2, 64)] * 3),
    "more keys": lambda: flash4_torch.attention(X, half(1, 130, 2, 64), half(1, 130, 2, 64)),
    "more queries": lambda: flash4_torch.attention(half(1, 130, 2, 64), Y, Z),
    "other strides": lambda: flash4_torch.attention(*[half(1, 2, 128, 64).transpose(1, 2)] * 3),
    "q alone strided": lambda: flash4_torch.attention(half(1, 2, 128, 64).transpose(1, 2), Y, Z),
    "k alone strided": lambda: flash4_torch.attention(X, half(1, 2, 128, 64).transpose(1, 2), Z),
    "v alone strided": lambda: flash4_torch.attention(X, Y, half(1, 2, 128, 64).transpose(1, 2)),
    "other dtype": lambda: flash4_torch.attention(*[X.half()] * 3),
    "causal": lambda: flash4_torch.attention(X, Y, Z, causal=True),
    "window": lambda: flash4_torch.attention(X, Y, Z, window=(1, None)),
    "window's left": lambda: flash4_torch.attention(X, Y, Z, window=(1, 2)),
    "window's right": lambda: flash4_torch.attention(X, Y, Z, window=(2, 1)),
    "scale": lambda: flash4_torch.attention(X, Y, Z, scale=1.0),
    "softcap": lambda: flash4_torch.attention(X, Y, Z, softcap=1.0),
    "dropout": lambda: flash4_torch.attention(X, Y, Z, dropout_p=0.5),
    "mask": lambda: flash4_torch.attention(X, Y, Z, attn_mask=torch.ones(128, dtype=torch.bool)),
    "odd base": lambda: flash4_torch.attention(half(1 + 128 * 128)[1:].view(1, 128, 2, 64), Y, Z),
    "deterministic": lambda: flash4_torch.attention(X, Y, Z, deterministic=True),
    "lse": lambda: flash4_torch.attention(X, Y, Z, return_lse=True),
}


@pytest.mark.parametrize("call", ANOTHER_CALL.values(), ids=ANOTHER_CALL)
def test_another_call_goes_the_long_way(long_way: LongWay, call: Callable[[], Any]) -> None:
    # The third time it is recognised without its signature.
    for _ in range(3):
        for flags in ({}, {"window": (2, 2)}, {"scale": 2.0}, {"deterministic": False}):
            flash4_torch.attention(X, Y, Z, **flags)
    assert long_way.taken(call)


@pytest.mark.parametrize("call", [ANOTHER_CALL[n] for n in ("odd base",)])
def test_some_calls_always_do(long_way: LongWay, call: Callable[[], Any]) -> None:
    assert all(long_way.taken(call) for _ in range(3))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def compiled(x: Tensor) -> Tensor:
    return torch.compile(flash4_torch.attention, backend="aot_eager", fullgraph=True)(x, x, x)


def attend(x: Tensor, **kwargs: Any) -> Any:
    # Calls with the same tensor twice are found by their signature.
    return flash4_torch.attention(x, x[:], x[:], **kwargs)


LISTENERS: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Any]]] = {
    "saved tensors' hooks": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        lambda x: attend(x.clone().requires_grad_()),
    ),
    "function mode": (FunctionMode, attend),
    "dispatch mode": (DispatchMode, attend),
    "default device": (lambda: torch.device("cpu"), attend),
    "subclass": (nullcontext, lambda x: attend(x.as_subclass(Subclass))),
    "parameter": (nullcontext, lambda x: attend(torch.nn.Parameter(x))),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.float16), attend),
    "profiler": (lambda: torch.profiler.profile(acc_events=True), attend),
    "vmap": (nullcontext, lambda x: torch.func.vmap(attend)(x[None])),
    "vmap of something else": (
        nullcontext,
        lambda x: torch.func.vmap(lambda y: attend(x).sum() + y)(x[0, 0, 0]),
    ),
    "grad transform": (nullcontext, lambda x: torch.func.grad(lambda y: attend(y).sum())(x)),
    "compile": (nullcontext, compiled),
    "memory is filled": (testing.poisoned_memory, attend),
    "excluded backend": (lambda: backends.excluding("sdpa"), attend),
    "observer": (testing.backends_used, attend),
}


@pytest.mark.parametrize(("context", "call"), LISTENERS.values(), ids=LISTENERS)
def test_whoever_listens_is_not_passed_by(
    long_way: LongWay, context: Callable[[], Any], call: Callable[[Tensor], Any]
) -> None:
    for _ in range(3):
        attend(X)
        attend(X.clone().requires_grad_())
    with context():
        assert long_way.taken(lambda: call(X))
    assert not long_way.taken(lambda: attend(X))


def test_a_profilers_execution_trace_holds_every_call(machine: Machine, tmp_path: Path) -> None:
    attend(X)
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    with torch.profiler.profile(execution_trace_observer=observer, acc_events=True):
        for _ in range(3):
            attend(X)
    nodes = json.loads((tmp_path / "trace.json").read_text())["nodes"]
    assert [node["name"] for node in nodes].count("flash4::attention") == 3


UNRESOLVED: dict[str, Callable[[Tensor], Tensor]] = {
    "negative bit": torch._neg_view,
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}
"""Tensors of plain type whose numbers are not those in memory: the dispatcher resolves them."""


@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("unresolved", UNRESOLVED.values(), ids=UNRESOLVED)
def test_numbers_that_are_not_in_memory_reach_the_kernel(
    machine: Machine, unresolved: Callable[[Tensor], Tensor], place: str
) -> None:
    inputs = {name: half(1, 128, 2, 64) for name in "qkv"}
    for _ in range(3):
        flash4_torch.attention(**inputs)
    inputs[place] = unresolved(inputs[place])
    launched, x = len(machine.launches), inputs[place].clone()
    out = flash4_torch.attention(**inputs)
    assert len(machine.launches) == launched + 1
    seen = machine.launches[-1].args["qkv".index(place)]
    assert not seen.is_neg() and seen.data_ptr() and torch.equal(seen, x)
    assert torch.equal(out, flash4_torch.attention(**inputs | {place: x}))


@pytest.mark.parametrize("variable", ["FLASH4_BACKEND", "FLASH4_LOG"])
def test_the_environment_is_heard(long_way: LongWay, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for _ in range(3):
        attend(X)
    monkeypatch.setenv(variable, {"FLASH4_BACKEND": "tiled", "FLASH4_LOG": "backend"}[variable])
    assert long_way.taken(lambda: attend(X))
    monkeypatch.delenv(variable)
    assert not long_way.taken(lambda: attend(X))


def test_autocast_to_the_dtype_that_tensors_have_changes_nothing(long_way: LongWay) -> None:
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            attend(x).sum().backward()
        assert not long_way.taken(lambda: attend(x).sum().backward())
        assert long_way.taken(lambda: attend(X.half()))


def test_without_grad_mode_parameters_data_may_take_it(long_way: LongWay) -> None:
    leaves = [half(1, 128, 2, 64).requires_grad_() for _ in "qkv"]
    with torch.no_grad():
        flash4_torch.attention(*leaves)
        for _ in range(2):
            assert not long_way.taken(lambda: flash4_torch.attention(*leaves))
    assert flash4_torch.attention(*leaves).requires_grad


def test_the_mode_decides_whether_gradients_are_recorded() -> None:
    leaves = [torch.randn(1, 16, 2, 16, requires_grad=True) for _ in "qkv"]
    for recorded in (False, True, False):
        with torch.set_grad_enabled(recorded):
            assert all(flash4_torch.attention(*leaves).requires_grad == recorded for _ in range(4))


def test_in_inference_mode_its_results_are_of_it(long_way: LongWay) -> None:
    attend(X, return_lse=True)
    with torch.inference_mode():
        results: list[Tensor] = []
        assert not long_way.taken(lambda: results.extend(attend(X, return_lse=True)))
    assert all(x.is_inference() for x in results)
    assert not any(x.is_inference() for x in attend(X, return_lse=True))


def test_its_results_lie_where_the_inputs_do(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It allocates on the current device; while that is another one, it allocates nothing there."""
    guards, current = torch._C._dynamo.guards, [0]
    allocate = guards._empty_strided_cpu

    def on_current(*size_and_dtype: Any) -> Any:
        assert current[-1] == -1
        return allocate(*size_and_dtype)

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(guards, "_empty_strided_cpu", on_current)
    monkeypatch.setattr(tile_counters, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    assert torch.equal(attend(X), attend(X))
    assert len(machine.launches) == 2 and current == [0]


def test_a_tangent_is_not_lost(machine: Machine) -> None:
    """The slow path refuses it."""
    attend(X)
    refused = pytest.raises(errors.ForwardModeError, match="no forward-mode derivative")
    with torch.autograd.forward_ad.dual_level(), refused:
        attend(torch.autograd.forward_ad.make_dual(X, X))


class Constant(torch.nn.Module):
    """Its inputs stay plain tensors while others are traced."""

    def forward(self, x: Tensor) -> Tensor:
        return attend(X) + x


TRACERS: dict[str, Callable[[], object]] = {
    "jit.trace": lambda: torch.jit.trace(attend, (X,), check_trace=False).inlined_graph,
    "make_fx": lambda: make_fx(attend)(X).graph,
    "export": lambda: torch.export.export(Constant(), (X,), strict=False).graph,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trace", TRACERS.values(), ids=TRACERS)
def test_traced_graphs_hold_the_operator(machine: Machine, trace: Callable[[], object]) -> None:
    attend(X)
    with torch.no_grad():
        assert re.search("flash4(::|\\.)attention", str(trace()))


def test_fake_tensors_stay_fake(machine: Machine) -> None:
    attend(X)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
        assert isinstance(attend(fake), FakeTensor)
    assert isinstance(attend(fake), FakeTensor)


WRONG: dict[str, Callable[[], Any]] = {
    "return_lse": lambda: attend(X, return_lse=0),
    "scale": lambda: attend(X, scale=True),
    "scale text": lambda: attend(X, scale="1"),
    "scale tensor": lambda: attend(X, scale=torch.tensor(1.0)),
    "softcap": lambda: attend(X, softcap=False),
    "dropout_p": lambda: attend(X, dropout_p=False),
    "window": lambda: attend(X, window=(True, None)),
    "window's right": lambda: attend(X, window=(None, True)),
    "window float": lambda: attend(X, window=(1.0, None)),
    "window of one": lambda: attend(X, window=(1,)),
    "window dict": lambda: attend(X, window={1: 2, None: 3}),
    "window number": lambda: attend(X, window=1),
    "window list of lists": lambda: attend(X, window=([], [])),
    "rank": lambda: attend(X[0]),
    "no tensor": lambda: flash4_torch.attention(X, X, None),
    "q's dtype": lambda: flash4_torch.attention(X.half(), X, X),
    "k's dtype": lambda: flash4_torch.attention(X, X.half(), X),
    "v's dtype": lambda: flash4_torch.attention(X, X, X.half()),
    # The strides are the same.
    "q's batch": lambda: flash4_torch.attention(half(2, 128, 2, 64), X, X),
    "k's batch": lambda: flash4_torch.attention(X, half(2, 128, 2, 64), X),
    "v's batch": lambda: flash4_torch.attention(X, X, half(2, 128, 2, 64)),
    "sparse": lambda: attend(X.to_sparse()),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_errors_are_the_same(call: Callable[[], Any]) -> None:
    """Errors are those of the slow path, also after calls whose flags are equal as numbers."""
    with gpu(), mock.patch.object(fast_path, "lookup", lambda *call: (None, None)):
        expected = error_of(call)
    with gpu():
        assert error_of(call) == expected
        for scale, softcap, dropout_p, window in itertools.product(
            (1, 1.0, None), (0, 0.0), (0, 0.0), ((1, None), (None, 1), (None, None))
        ):
            for _ in range(2):
                attend(X, scale=scale, softcap=softcap, dropout_p=dropout_p, window=window)
        assert error_of(call) == expected


def error_of(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises((errors.ArgumentError, RuntimeError, TypeError)) as caught:
        call()
    return caught.type, str(caught.value)


def test_its_memory_is_bounded_and_holds_no_tensors(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "_MOST", 4)
    for S in range(1, 12):
        attend(half(1, S, 1, 8))
        assert len(fast_path.MEMORY.calls) <= 4
    for flag in ("causal", "deterministic"):
        with pytest.raises(errors.ArgumentError, match=f"{flag} is tensor"):
            attend(X, **{flag: torch.tensor(True)})
    assert not any(isinstance(x, Tensor) for call in fast_path.MEMORY.calls for x in call)


def test_another_backend_is_left_alone() -> None:
    """The CPU's own backend serves the prepared calls, too, and is seen to."""
    fast_path.clear()
    with testing.backends_used() as used:
        for _ in range(3):
            attend(X.float())
    assert used == {("attention", "cpu"): 3}


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(4, 2, 8), torch.randn(6, 2, 8)])


def _with_mask(x: Any, mask: Any, **flags: Any) -> Any:
    q, k, v = (torch.randn(2, 4, 2, 8) for _ in range(3))
    return flash4_torch.attention(q if x is None else x, k, v, attn_mask=mask, **flags)


def _cached(q: Any, used: Any) -> Any:
    cache = torch.randn(2, 2, 16, 2, 8)
    return flash4_torch.attention_kvcache(q, cache[0], cache[1], seqused_k=used)


def _weighted(x: Any, padding: Any, need_weights: bool) -> Any:
    module = flash4_torch.MultiheadAttention(16, 2, batch_first=True).eval()
    with torch.no_grad():
        return module(x, x, x, key_padding_mask=padding, need_weights=need_weights)


Q = torch.randn(2, 4, 2, 8)
# Calls, each with tensors like those that are remembered, of which one is then nested.
REMEMBERED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (flash4_torch.attention, (Q, Q + 1, Q + 2)),
    "sdpa": (flash4_torch.scaled_dot_product_attention, (Q, Q + 1, Q + 2)),
    "mask": (_with_mask, (Q, torch.ones(2, 1, 4, 4, dtype=torch.bool))),
    "kvcache": (_cached, (Q, torch.tensor([3, 9], dtype=torch.int32))),
    "module": (partial(_weighted, need_weights=False), (Q.flatten(2), torch.zeros(2, 4, dtype=torch.bool))),
    "weights": (partial(_weighted, need_weights=True), (Q.flatten(2), torch.zeros(2, 4, dtype=torch.bool))),
}


@pytest.mark.parametrize(
    ("name", "place"), [(name, i) for name, (_, given) in REMEMBERED.items() for i in range(len(given))]
)
def test_a_nested_tensor_is_no_call_like_others(name: str, place: int) -> None:
    """Torch's check of tensors ends the process that gives it a nested one."""
    call, given = REMEMBERED[name]
    nested = _nested() if given[0].dim() == 4 else torch.nested.nested_tensor([x[:3] for x in given[0]])
    others = [nested if i == place else x for i, x in enumerate(given)]
    fast_path.clear()
    expected = _outcome(call, others)
    for _ in range(4):
        call(*given)
    assert _outcome(call, others) == expected


def _outcome(call: Callable[..., Any], given: list[Any]) -> Any:
    """The kind of what is returned, or the error."""
    try:
        found = call(*given)
    except Exception as error:
        return type(error), str(error)
    return [type(x) for x in found] if isinstance(found, tuple) else (type(found), found.is_nested)


def test_a_nested_gradient_is_refused_as_at_first() -> None:
    x = [torch.randn(2, 4, 2, 8, requires_grad=True) for _ in range(3)]
    given = flash4_torch.attention(*x), [x[0]], [_nested()]
    expected = _outcome(lambda *a: torch.autograd.grad(*a, retain_graph=True), list(given))
    for _ in range(4):
        flash4_torch.attention(*x).sum().backward()
    given = flash4_torch.attention(*x), [x[0]], [_nested()]
    assert _outcome(torch.autograd.grad, list(given)) == expected
