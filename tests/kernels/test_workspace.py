"""Workspace that the launches of a thread on a stream share: who may have the same memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash4_torch.backends.compiled import workspace
from test_compiled import Streams, words_of

NEEDS = st.tuples(
    st.lists(st.integers(0, 90), min_size=1, max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.int32]),
)
SMALL: tuple[workspace.Need, ...] = (((2, 5), torch.float32), ((7,), torch.int32))


class Allocations:
    """An allocator that counts."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        def allocate() -> Tensor:
            self.number += 1
            return torch.empty(shape, dtype=dtype)

        return allocate


def where(tensors: tuple[Tensor, ...]) -> set[int]:
    return {word for x in tensors for word in words_of(x)}


@given(st.lists(NEEDS, min_size=1, max_size=4).map(tuple))
@settings(max_examples=30)
def test_tensors_of_a_call_lie_apart(needs: tuple[workspace.Need, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Streams(patch)
        patch.setattr(workspace, "_words", {})
        fits = sum(map(workspace._room, needs)) <= workspace._WORDS
        allocator = Allocations()
        found = workspace.shared(0, needs, allocator)()
        assert fits == (allocator.number == 0)
        assert [(x.shape, x.dtype, x.is_contiguous()) for x in found] == [
            (shape, dtype, True) for shape, dtype in needs
        ]
        assert not any(where((a,)) & where((b,)) for a, b in combinations(found, 2))


def test_only_launches_that_cannot_overlap_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one thread on one stream do, whatever the call; other threads, streams and devices do not."""
    streams, allocator = Streams(monkeypatch), Allocations()
    monkeypatch.setattr(workspace, "_words", {})
    calls = [workspace.shared(index, needs, allocator) for index in (0, 1) for needs in (SMALL, SMALL[::-1])]
    devices = 0, 0, 1, 1

    def ask() -> dict[Any, set[int]]:
        found: dict[Any, set[int]] = {}
        for _ in range(2):
            for index, call in zip(devices, calls, strict=True):
                for stream in (0, 11):
                    streams.current[index] = stream
                    owner = threading.get_ident(), index, stream
                    found.setdefault(owner, set()).update(where(call()))
        return found

    with ThreadPoolExecutor(1) as pool:
        found = ask() | pool.submit(ask).result()
    assert len(found) == 8 and allocator.number == 0
    assert not any(a & b for a, b in combinations(found.values(), 2))
    assert all(max(words) - min(words) < 4 * 3 * workspace._APART for words in found.values())


def test_captures_have_their_graphs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, allocator = Streams(monkeypatch), Allocations()
    monkeypatch.setattr(workspace, "_words", {})
    call = workspace.shared(0, SMALL, allocator)
    shared = where(call())
    streams.capturing = True
    captured = [call(), call()]
    assert allocator.number == 2 * len(SMALL)
    assert not where(captured[0]) & where(captured[1]) and not shared & where(captured[0] + captured[1])
    streams.capturing = False
    assert where(call()) == shared


def test_what_needs_more_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are tensors of 1 MiB and more, and those of threads and streams after the first ones."""
    streams, allocator = Streams(monkeypatch), Allocations()
    monkeypatch.setattr(workspace, "_words", {})
    monkeypatch.setattr(workspace, "_MOST", 2)
    big = workspace.shared(0, (((workspace._WORDS + 1,), torch.float32),), allocator)
    assert big()[0].data_ptr() and allocator.number == 1
    call = workspace.shared(0, SMALL, allocator)
    for streams.current[0] in (1, 2, 1):
        call()
    assert allocator.number == 1
    streams.current[0] = 3
    call()
    assert allocator.number == 1 + len(SMALL) and len(workspace._words) == 2
