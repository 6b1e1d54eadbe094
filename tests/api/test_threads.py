"""Threads and forks: whoever calls at the same time, or after a fork, gets what a single caller gets."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash4_torch
from flash4_torch import fast_path, testing
from flash4_torch.backends import tile_counters
from on_cpu import gpu
from test_fast_path import half

THREADS = 6


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads switch as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(tasks: list[Callable[[], Any]]) -> list[Any]:
    """Results of tasks that begin at the same time, a thread each."""
    together = threading.Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> Any:
        together.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


SHAPES = ((1, 40, 2, 16), (1, 40, 2, 32), (2, 24, 1, 16))
CALLS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = tuple(
    itertools.product(SHAPES, ({}, {"causal": True}, {"deterministic": True}))
)
"""Call signatures: two threads begin with each three of them."""


def steps(inputs: list[list[Tensor]], first: int) -> list[tuple[Tensor, ...]]:
    """Out and gradients of all calls, starting at `first` and wrapping around, each made three times."""
    found: dict[int, tuple[Tensor, ...]] = {}
    for i in (*range(first, len(CALLS)), *range(first)):
        for _ in range(3):
            out = flash4_torch.attention(*inputs[i], **CALLS[i][1])
            found[i] = (out.detach(), *torch.autograd.grad(out, inputs[i], torch.ones_like(out)))
    return [found[i] for i in range(len(CALLS))]


def assert_all_equal(results: list[list[tuple[Tensor, ...]]]) -> None:
    expected, *others = results
    for other in others:
        for a, b in zip(itertools.chain(*expected), itertools.chain(*other), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["cpu", "prepared"])
def test_first_calls_of_many_threads(restless: None, backend: str) -> None:
    """The fast path prepares each signature once, or more often, and always the same."""
    inputs = [[half(*shape).requires_grad_() for _ in "qkv"] for shape, _ in CALLS]
    tasks = [lambda first=first: steps(inputs, first) for first in (0, 0, 3, 3, 6, 6)]
    if backend == "cpu":
        assert_all_equal([steps(inputs, 0), *at_once(tasks)])
        return
    with gpu():
        expected = steps(inputs, 0)
    with gpu() as machine:
        assert_all_equal([expected, *at_once(tasks)])
        assert len(machine.launches) == THREADS * len(CALLS) * 3 == len(machine.backwards)
        assert len(fast_path.MEMORY.calls) == len(CALLS)


def test_a_thread_forgets_while_others_call(restless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path's memory is emptied when it is full, whoever reads it."""
    monkeypatch.setattr(fast_path, "_MOST", 2)
    inputs = [[half(*shape).requires_grad_() for _ in "qkv"] for shape, _ in CALLS]
    with gpu():
        expected = steps(inputs, 0)
        assert_all_equal(
            [expected, *at_once([lambda: steps(inputs, 0)] * 2 + [lambda: steps(inputs, 4)] * 2)]
        )


def test_functions_are_traced_in_many_threads(restless: None) -> None:
    """Torch's tracer changes modules for all threads: afterwards they are as they were."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)

    def power_of(exponent: int) -> Callable[..., Tensor]:
        """A score_mod whose exponent makes a program of its own."""
        return lambda score, b, h, i, j: score + (i - j) ** exponent

    def task(first: int) -> None:
        for exponent in range(first, first + 12):
            assert flash4_torch.flex_attention(q, q, q, power_of(exponent)).isfinite().all()

    at_once([functools.partial(task, 2 + 12 * n) for n in range(4)])
    assert not torch.fx._symbolic_trace.is_fx_tracing()
    assert torch.nn.Linear(8, 3)(q).shape == (1, 2, 5, 3)


def test_every_stream_has_one_counter(restless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has, also where threads ask for the first ones at once, and for more than are allocated together."""
    own = threading.local()
    allocated: list[Tensor] = []

    def zeros(index: int, n: int, wait: bool = False) -> Tensor:
        allocated.append(torch.zeros(n, dtype=torch.int32))
        return allocated[-1]

    monkeypatch.setattr(tile_counters, "_of_stream", {})
    monkeypatch.setattr(tile_counters, "_unused", {})
    monkeypatch.setattr(tile_counters, "current_stream", lambda index: own.stream)
    monkeypatch.setattr(tile_counters, "is_capturing", lambda index: False)
    monkeypatch.setattr(tile_counters, "_zeros", zeros)
    streams = range(tile_counters._STREAMS + 20)

    def ask() -> list[int]:
        def counter(stream: int) -> int:
            own.stream = stream
            return tile_counters.counter(0).data_ptr()

        return list(map(counter, streams))

    first, *others = at_once([ask] * THREADS)
    assert len(set(first)) == len(streams) and all(other == first for other in others)
    assert len(allocated) == 3  # two blocks of counters, and the reserve for captures


def test_observers_hear_every_thread() -> None:
    x = torch.randn(1, 8, 1, 8)
    with testing.backends_used() as used:
        at_once([lambda: flash4_torch.attention(x, x, x)] * THREADS)
    assert used == {("attention", "cpu"): THREADS}


FORK = """
import multiprocessing, sys
sys.path.insert(0, sys.argv[1])
import torch, flash4_torch
from on_cpu import gpu
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 40, 2, 16).bfloat16().requires_grad_() for _ in "qkv")

def step(**kwargs):
    torch.manual_seed(1)
    out = flash4_torch.attention(q, k, v, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

CALLS = ({}, {"window": (7, 0)}, {"causal": True, "dropout_p": 0.5})

def all_steps():
    #The first is served by cpu, the others by tiled; then three times by the kernels' stand-ins.
    found = [step(**kwargs) for kwargs in CALLS]
    with gpu():
        return found + [step(**kwargs) for _ in range(3) for kwargs in CALLS]

expected = all_steps()

def check():
    for a, b in zip(all_steps(), expected, strict=True):
        assert all(map(torch.equal, a, b))

child = multiprocessing.get_context("fork").Process(target=check)
child.start()
child.join(100)
assert child.exitcode == 0, child.exitcode
"""


def test_a_fork_after_the_first_call() -> None:
    command = [sys.executable, "-c", FORK, str(Path(__file__).parents[1] / "support")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
