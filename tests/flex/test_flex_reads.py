"""What a function reads: traced again when any of that has changed, and always where that is not known."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flash4_torch
from flash4_torch.flex import trace as tracing
from flash4_torch.flex.reads import reads_of
from flash4_torch.flex.trace import SCORE, Traced

CPU = torch.device("cpu")
GAIN: Any = 1.5
TABLE: Any = torch.arange(12.0).view(3, 4)


def helper(x: Tensor) -> Tensor:
    return x * GAIN


def doubled(x: Tensor) -> Tensor:
    return x + x


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    tracing._recipes.clear()
    yield
    tracing._recipes.clear()


def traced(function: Any) -> Traced:
    return tracing.trace(function, SCORE, CPU)


def fresh(function: Any) -> Traced:
    """What tracing gives without what was traced before."""
    known = dict(tracing._recipes)
    tracing._recipes.clear()
    try:
        return traced(function)
    finally:
        tracing._recipes.clear()
        tracing._recipes.update(known)


def is_traced(function: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a call would trace."""
    calls: list[Any] = []
    stock = tracing._translated
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "_translated", lambda *x: (calls.append(x), stock(*x))[1])
        traced(function)
    return bool(calls)


def assert_same(found: Traced, expected: Traced) -> None:
    assert found.program == expected.program and found.text == expected.text
    assert [x.hex() for x in map(float, found.scalars)] == [x.hex() for x in map(float, expected.scalars)]
    assert len(found.tensors) == len(expected.tensors)
    for x, y in zip(found.tensors, expected.tensors, strict=True):
        assert (x.dtype, x.shape, x.stride(), x.requires_grad) == (
            y.dtype,
            y.shape,
            y.stride(),
            y.requires_grad,
        )
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


class World:
    """A function, and everything that it reads."""

    def __init__(self) -> None:
        number, pair, captured, other = 2, (0.5, 3), torch.randn(4, 4), torch.randn(4, 4)

        def change(name: str, value: Any) -> None:
            nonlocal number, pair, captured, other
            if name == "number":
                number = value
            elif name == "pair":
                pair = value
            elif name == "captured":
                captured = value
            elif name == "other":
                other = value

        def mod(
            score: Tensor, b: Any, h: Any, i: Any, j: Any, factor: Any = 1.0, *, shift: Any = 0
        ) -> Tensor:
            if number > 3:
                score = score.tanh()
            bias = captured.exp()[h, j] + other[h, i] if captured.dim() == 2 else captured[h]
            # A view or a copy, by the strides; and of the default dtype.
            bias = bias * captured.reshape(-1)[h] + torch.ones(4)[h]
            rows = [x * pair[0] for x in (bias, score)]
            return (
                helper(rows[1])
                + torch.where(i > pair[1], rows[0], TABLE[h % TABLE.shape[0], j]) * factor
                + shift
            )

        self.change, self.mod = change, mod
        self.shared = torch.randn(4, 4)


numbers = st.sampled_from([0, 1, 5, True, 0.0, -0.0, 2.5, float("nan"), float("inf"), 1.0])
tensors = st.sampled_from(
    [
        lambda: torch.randn(4, 4),
        lambda: torch.randn(4, 4, requires_grad=True),
        lambda: torch.randn(4, 4).t(),
        lambda: torch.randn(5, 7),
        lambda: torch.randn(4),
        lambda: torch.randn(4, 4, dtype=torch.float64),
        lambda: torch.ones(4, 4, dtype=torch.int32),
        lambda: nn.Parameter(torch.randn(4, 4)),
    ]
)
changes = st.one_of(
    st.tuples(st.just("number"), numbers),
    st.tuples(st.just("pair"), st.tuples(numbers, numbers)),
    st.tuples(st.sampled_from(["captured", "other", "both", "TABLE"]), tensors),
    st.tuples(st.just("GAIN"), numbers),
    st.tuples(st.just("helper"), st.sampled_from([helper, doubled])),
    st.tuples(st.just("default"), numbers),
    st.tuples(st.just("keyword"), numbers),
    st.tuples(st.just("dtype"), st.sampled_from([torch.float32, torch.float64])),
    st.tuples(st.just("values"), st.just(None)),
    st.tuples(st.just("in place"), st.just(None)),
    st.tuples(st.just("nothing"), st.just(None)),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(changes, min_size=1, max_size=6))
def test_nothing_is_stale_whatever_changes(steps: list[tuple[str, Any]]) -> None:
    """Cells, globals, defaults, helpers; tensors' shapes, strides, dtypes and values; the default dtype."""
    world, mod = World(), None
    names = globals()
    before = {name: names[name] for name in ("GAIN", "TABLE", "helper")}
    try:
        mod = world.mod
        kept = torch.randn(4, 4)
        world.change("captured", kept)
        for name, value in [("nothing", None), *steps]:
            if name in ("number", "pair"):
                world.change(name, value)
            elif name in ("captured", "other"):
                world.change(name, value())
            elif name == "both":
                same = value()
                world.change("captured", same)
                world.change("other", same)
            elif name == "TABLE":
                made = value()
                names["TABLE"] = made if made.dim() == 2 else made[:, None].expand(4, 4)
            elif name in ("GAIN", "helper"):
                names[name] = value
            elif name == "default":
                mod.__defaults__ = (value,)
            elif name == "keyword":
                mod.__kwdefaults__["shift"] = value
            elif name == "dtype":
                torch.set_default_dtype(value)
            elif name == "values":
                kept.mul_(-2)
            elif name == "in place":
                kept.resize_(5, 5).normal_()
            assert reads_of(mod) is not None
            try:
                expected = fresh(mod)
            except Exception as error:
                with pytest.raises(type(error)):
                    traced(mod)
                continue
            assert_same(traced(mod), expected)
    finally:
        torch.set_default_dtype(torch.float32)
        names.update(before)


def test_equal_functions_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other objects of the same code, tensors and numbers: as a layer makes them anew in each call."""

    def made(number: float) -> Callable[..., Tensor]:
        slopes = torch.randn(4, requires_grad=True)
        return lambda s, b, h, i, j: torch.where(i >= j, s + slopes.exp()[h] * number, -float("inf"))

    assert is_traced(made(2.0), monkeypatch)
    assert not is_traced(made(2.0), monkeypatch)
    assert is_traced(made(3.0), monkeypatch)
    scaled = functools.partial(lambda factor, s, b, h, i, j: s * factor, 0.5)
    assert [is_traced(scaled, monkeypatch) for _ in range(2)] == [True, False]
    query = torch.randn(1, 4, 8, 4)
    function = made(2.0)
    out = flash4_torch.flex_attention(query, query, query, function)
    tracing._recipes.clear()
    assert torch.equal(out, flash4_torch.flex_attention(query, query, query, function)) and out.requires_grad


class Holder:
    scale = 2.0

    def __init__(self) -> None:
        self.own, self.numbers, self.linear, self.table = 3.0, [1.0], nn.Linear(1, 1), torch.arange(4.0)
        self.next: Any = None

    @property
    def twice(self) -> float:
        return 2 * self.own

    def item(self) -> float:
        return random.random()

    def mod(self, score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return self.helped(score, j) * self.scale

    def helped(self, score: Tensor, j: Tensor) -> Tensor:
        return score * self.own + self.table[j % 4] * (j + 1).float()

    def passes(self, score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return doubled_own(score, self)

    def changes(self, score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        self.own += 1
        return score * self.own

    def __call__(self, score: Tensor, *places: Tensor) -> Tensor:
        return score * self.own

    class Called:
        """Called in the place of a function."""

        def __init__(self, held: Holder):
            self.held = held

        def __call__(self, score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
            return self.held.helped(score, j) * self.held.own

    def __eq__(self, other: object) -> bool:
        return bool(self.own == other)

    __hash__ = None  # type: ignore[assignment]


def doubled_own(score: Tensor, holder: Holder) -> Tensor:
    return score * holder.own


class Odd(Holder):
    def __getattr__(self, name: str) -> float:
        return random.random()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.randn(4))
        self.inner, self.factor = nn.Linear(2, 3), 2.0

    def mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inner = self.inner.weight[0, 0] * self.factor
        return score + self.bias[h] * (i - j).float() + self.table[j % 4] * inner

    forward = mod


def test_attributes_of_objects_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain attributes, those of classes, modules' parameters and buffers, methods, and objects inside."""
    holder, layer = Holder(), Layer()
    holder.next = Holder()
    functions: dict[str, Any] = {
        "closure": lambda s, b, h, i, j: s * holder.own,
        "class": lambda s, b, h, i, j: s * holder.scale,
        "inside": lambda s, b, h, i, j: s * holder.next.own + holder.next.table[j % 4],
        "method": holder.mod,
        "partial": functools.partial(holder.mod),
        "called": lambda s, b, h, i, j: holder.mod(s, b, h, i, j) + 1,
        "module": layer.mod,
        "module itself": layer,
        "object": Holder.Called(holder),
        "parameter": lambda s, b, h, i, j: s + layer.inner.weight[0, 0],
    }
    changes: list[Callable[[], Any]] = [
        lambda: setattr(holder, "own", 7.0),
        lambda: setattr(holder, "scale", 5.0),
        lambda: setattr(holder.next, "own", 2),
        lambda: setattr(holder, "table", torch.arange(8.0)[::2]),
        lambda: setattr(holder.next, "table", torch.ones(4, dtype=torch.int32)),
        lambda: setattr(holder, "next", Holder()),
        lambda: setattr(layer, "factor", 4.0),
        lambda: setattr(layer, "bias", nn.Parameter(torch.ones(4, dtype=torch.float64))),
        lambda: layer.register_buffer("table", torch.ones(2, 4)[1]),
        lambda: setattr(layer, "inner", nn.Linear(5, 1)),
        lambda: monkeypatch.setattr(Holder, "scale", 9.0),
        lambda: monkeypatch.setattr(Holder, "helped", lambda self, score, j: score - j),
        lambda: monkeypatch.setattr(Holder, "own", property(lambda self: 1.0), raising=False),
    ]
    for change in [lambda: None, *changes]:
        change()
        for name, function in functions.items():
            assert_same(traced(function), fresh(function))
            known = reads_of(function) is not None
            assert known or change is changes[-1], name
            assert not known or not is_traced(function, monkeypatch)
    assert any(x is layer.bias for x in traced(layer.mod).tensors)


def test_layers_of_one_kind_share_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Layer(), Layer()
    assert is_traced(first.mod, monkeypatch) and not is_traced(second.mod, monkeypatch)
    assert any(x is second.bias for x in traced(second.mod).tensors)


def test_what_is_not_known_is_traced_in_each_call() -> None:
    """Lists, dicts, objects, attributes of tensors and functions, counters, random numbers, sets, modules."""
    numbers, named, holder, odd, calls = [1.0], {"a": 1.0}, Holder(), Odd(), 0
    marked, learned = torch.ones(4), torch.ones(4, requires_grad=True)
    marked.sum = lambda: 3.0  # type: ignore[method-assign, assignment]
    linear, hooked, replaced = nn.Linear(1, 1), Layer(), Layer()
    hooked.register_forward_hook(lambda module, args, out: out * random.random())
    replaced.forward = lambda s, *places: s * random.random()  # type: ignore[method-assign]

    def counts(s: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return s * calls

    def with_attribute(s: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return s

    with_attribute.scale = 2.0  # type: ignore[attr-defined]

    def imports(s: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        import math

        return s * math.pi

    unknown: list[Any] = [
        lambda s, b, h, i, j: s * numbers[0],
        lambda s, b, h, i, j: s * named["a"],
        lambda s, b, h, i, j: s * Holder.scale,
        lambda s, b, h, i, j: s * holder.twice,
        lambda s, b, h, i, j: holder(s),
        lambda s, b, h, i, j: s * (holder == 3),
        lambda s, b, h, i, j: s * holder.item(),
        lambda s, b, h, i, j: s * holder.numbers[0],
        lambda s, b, h, i, j: s * (holder, 3)[0].own,
        lambda s, b, h, i, j, held=(holder,): s * held[0].own,
        lambda s, b, h, i, j: linear(s),
        lambda s, b, h, i, j: holder.linear(s),
        lambda s, b, h, i, j: s * odd.own,
        lambda s, b, h, i, j: s * learned.requires_grad,
        lambda s, b, h, i, j: s * marked.sum(),
        lambda s, b, h, i, j: s * random.random(),
        lambda s, b, h, i, j: s * len(globals()),
        lambda s, b, h, i, j: with_attribute(s, b, h, i, j) * with_attribute.scale,
        lambda s, b, h, i, j: s * learned.data[h],
        lambda s, b, h, i, j: s * eval("1"),
        lambda s, b, h, i, j, n=[2.0]: s * n[0],
        odd,
        hooked,
        replaced,
        nn.Sequential(Layer()),
        torch.compile(Layer()),
        counts,
        with_attribute,
        imports,
        holder.passes,
        holder.changes,
    ]
    for function in unknown:
        assert reads_of(function) is None, function
    for function, change in (
        (unknown[0], lambda: numbers.__setitem__(0, 5.0)),
        (unknown[3], lambda: setattr(holder, "own", 7.0)),
    ):
        traced(function)
        change()
        assert_same(traced(function), fresh(function))
    assert [traced(counts).scalars for _ in range(2)] == [(1.0,), (2.0,)]


def test_a_function_of_torchs_that_was_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def mod(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return torch.tanh(score).exp()

    first = traced(mod)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tanh", torch.sin)
        assert traced(mod).program != first.program
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "exp", Tensor.sin)
        assert traced(mod).program != first.program
    assert_same(traced(mod), first)


def test_modes_and_transforms_are_not_bypassed() -> None:
    def mod(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return score * torch.ones(4)[h]

    with torch.device("meta"):
        assert reads_of(mod) is None
    known: list[Any] = []
    torch.vmap(lambda x: known.append(reads_of(mod)) or x)(torch.ones(3))
    assert known == [None] and reads_of(mod) is not None


def test_the_same_tensor_twice_is_not_two() -> None:
    one, other = torch.randn(4), torch.randn(4)

    def made(x: Tensor, y: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, i, j: s + x[h] * y[j]

    for pair in ((one, one), (one, other), (other, other), (other, one)):
        assert_same(traced(made(*pair)), fresh(made(*pair)))
    assert len(traced(made(one, one)).tensors) == 1 and len(traced(made(one, other)).tensors) == 2


def test_no_tensor_and_no_function_is_kept() -> None:
    def once() -> list[weakref.ref[Any]]:
        bias = torch.randn(4, requires_grad=True)
        mod = lambda s, b, h, i, j: s + bias.exp()[h]  # noqa: E731
        traced(mod)
        return [weakref.ref(bias), weakref.ref(mod)]

    known = once()
    gc.collect()
    assert tracing._recipes and [ref() for ref in known] == [None, None]


def test_recipes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST_RECIPES", 3)
    for number in range(8):
        traced(lambda s, b, h, i, j, number=number: s * number)
        assert len(tracing._recipes) <= 3
