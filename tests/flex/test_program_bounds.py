"""Bounds of programs over boxes of positions: what each element is lies between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples
from flash4_torch.flex.trace import MASK, trace
from flash4_torch.reference import bounds, programs

S = 97
Value = Callable[..., Tensor]
"""A function of b, h, q_idx and kv_idx."""


def _captured(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (20 * torch.randn(S, generator=generator)).to(dtype)


_LONG, _INT, _FLOAT = map(_captured, (0, 1, 2), (torch.int64, torch.int32, torch.float32))
_LEAVES: list[Value] = [
    lambda b, h, i, j: i,
    lambda b, h, i, j: j,
    lambda b, h, i, j: i - j,
    lambda b, h, i, j: h,
    lambda b, h, i, j: _LONG[i],
    lambda b, h, i, j: _INT[i],
    lambda b, h, i, j: _LONG[j],
    lambda b, h, i, j: _FLOAT[j],
    lambda b, h, i, j: _INT[(i + j) // 2],
    lambda b, h, i, j: _INT.view(1, S)[b, j],
]
_UNARY: list[Callable[..., Any]] = [
    lambda x, n: x + n,
    lambda x, n: n - x,
    lambda x, n: x * n,
    lambda x, n: x // (abs(n) + 1),
    lambda x, n: torch.div(x, -abs(n) - 1, rounding_mode="trunc"),
    lambda x, n: x % (abs(n) + 1),
    lambda x, n: x.abs() - n,
    lambda x, n: -x,
    lambda x, n: x.float() / (n + 0.5),
    lambda x, n: x.float() * 0.1,
    lambda x, n: x.clamp(min=n),
    lambda x, n: x.clamp(-abs(n), abs(n)),
    lambda x, n: x.to(torch.int32) + n,
    lambda x, n: x.to(torch.float32),
    lambda x, n: (x > n) + n,
]
_BINARY: list[Callable[..., Any]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    torch.maximum,
    lambda x, y: torch.minimum(x.float(), y.float()),
    lambda x, y: torch.where(x > y, x, y + 1),
    lambda x, y: (x <= y) * (x + 3),
    lambda x, y: x // (y.abs() + 1),
    lambda x, y: x // (2 * y + 1),
]


def _unary(f: Any, x: Value, n: int) -> Value:
    return lambda *at: f(x(*at), n)


def _binary(f: Any, x: Value, y: Value) -> Value:
    def both(*at: Tensor) -> Tensor:
        own, other = x(*at), y(*at)
        dtype = torch.promote_types(own.dtype, other.dtype)
        found: Tensor = f(own.to(dtype), other.to(dtype))
        return found

    return both


def _larger(inner: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    unary = st.builds(_unary, st.sampled_from(_UNARY), inner, st.integers(-9, 30))
    return unary | st.builds(_binary, st.sampled_from(_BINARY), inner, inner)


numbers = st.recursive(st.sampled_from(_LEAVES), _larger, max_leaves=5)
_COMPARISONS: list[Callable[..., Any]] = [
    lambda x, y: x < y,
    lambda x, y: x >= y,
    lambda x, y: x == y,
    lambda x, y: x != y,
]
_LOGIC: list[Callable[..., Any]] = [
    lambda x, y: x & y,
    lambda x, y: x | ~y,
    lambda x, y: x ^ y,
    lambda x, y: torch.logical_and(x, y).logical_not(),
    lambda x, y: torch.where(x, y, ~x),
]
masks = st.recursive(
    st.builds(_binary, st.sampled_from(_COMPARISONS), numbers, numbers),
    lambda inner: st.builds(_binary, st.sampled_from(_LOGIC), inner, inner),
    max_leaves=3,
)
spans = st.tuples(st.integers(0, S - 1), st.integers(0, S - 1)).map(sorted)


def _bounded(function: Value, q: Any, k: Any) -> tuple[bounds.Bounds | None, Tensor]:
    """Bounds over a box, and the elements."""
    device = torch.device("cpu")
    traced = trace(lambda *at: function(*at) != 0, MASK, device)
    scalars = programs.scalar_tensors(traced.program, traced.scalars, device)
    lanes = [
        bounds.whole(*(torch.full((1, 1, 1, 1), n) for n in (least, most)), least, most)
        for least, most in ((0, 0), (2, 2), q, k)
    ]
    found = bounds.of_result(traced.program, lanes, traced.tensors, scalars)
    views = (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1)
    places = [
        torch.arange(least, most + 1, dtype=torch.int32).view(view)
        for (least, most), view in zip(((0, 0), (2, 2), q, k), views, strict=True)
    ]
    (elements,) = programs.evaluate(traced.program, places, traced.tensors, scalars)
    return found, elements


@settings(max_examples=examples(60, 300))
@given(mask=masks, q=spans, k=spans)
def test_each_element_is_between_bounds(mask: Value, q: Any, k: Any) -> None:
    found, elements = _bounded(mask, q, k)
    if found is not None:
        assert not found.lowest.item() or bool(elements.all())
        assert found.highest.item() or not bool(elements.any())


@settings(max_examples=examples(60, 300))
@given(number=numbers, limit=st.integers(-40, 60), q=spans, k=spans)
def test_numbers_are_between_bounds(number: Value, limit: int, q: Any, k: Any) -> None:
    """What is compared with a number shows where a value's bounds are."""
    for compare in (lambda x: x <= limit, lambda x: x > limit):
        found, elements = _bounded(lambda *at, f=compare: f(number(*at)), q, k)
        if found is not None:
            assert not found.lowest.item() or bool(elements.all())
            assert found.highest.item() or not bool(elements.any())


_DOCUMENT = torch.arange(S) // 10
_KNOWN: list[tuple[Value, tuple[int, int], tuple[int, int], bool]] = [
    (lambda b, h, i, j: i >= j, (10, 20), (0, 10), True),
    (lambda b, h, i, j: i >= j, (10, 20), (21, 30), False),
    (lambda b, h, i, j: (i - j).abs() <= 40, (10, 20), (15, 50), True),
    (lambda b, h, i, j: (i >= j) & (i - j < 5), (50, 60), (0, 40), False),
    (lambda b, h, i, j: _DOCUMENT[i] == _DOCUMENT[j], (10, 19), (12, 18), True),
    (lambda b, h, i, j: _DOCUMENT[i] == _DOCUMENT[j], (10, 19), (20, 60), False),
    (lambda b, h, i, j: (j < 7) | (i // 8 == j // 8), (16, 23), (16, 20), True),
    (lambda b, h, i, j: (i % 64 - j % 64).abs() < 5, (0, 20), (40, 50), False),
    (lambda b, h, i, j: torch.where(i >= 48, j >= 48, j < i), (48, 60), (50, 70), True),
    (lambda b, h, i, j: i >= _DOCUMENT[-1], (10, 20), (0, 9), True),
    (lambda b, h, i, j: 0.5 * i < j + 0.25, (10, 20), (30, 40), True),
]


@pytest.mark.parametrize("case", range(len(_KNOWN)))
def test_what_is_known_of_common_masks(case: int) -> None:
    mask, q, k, seen = _KNOWN[case]
    found, elements = _bounded(mask, q, k)
    assert found is not None and found.lowest.item() == found.highest.item() == seen
    assert bool((elements == seen).all())


def test_nothing_is_known_of_what_may_leave_its_dtype() -> None:
    """Whole numbers that wrap around, infinite ones, and a divisor that may be 0."""
    huge = torch.tensor([float("inf"), 1.0] * S)
    for mask in (
        lambda b, h, i, j: i * 1000000 * 1000 > j,
        lambda b, h, i, j: huge[i] > j,
        lambda b, h, i, j: i / (j - 3) > 2,
    ):
        found, _ = _bounded(mask, (0, 90), (0, 90))
        assert found is None
